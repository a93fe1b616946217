"""Which implementation a call gets where none is named: a function of the call, the device and what was found on it.

On NVIDIA GPUs cuDNN and on TPUs splash attention, which others ship and test, wherever they can do the call; kernels of
this package once the check has passed on such a device; else the tiled engine. Where the check has timed such calls,
the fastest goes first. Everything here is static: shapes, dtypes, pattern, device.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Mapping, Sequence

from xformer.attention.device import Device
from xformer.attention.kernels.tables import KERNELS, STATE, Table
from xformer.attention.pattern import Pattern
from xformer.checks import did_you_mean

logger = logging.getLogger(__name__)

VARIABLE = "XFORMER_IMPLEMENTATION"
LIBRARY = {"cudnn": "cuDNN's flash attention", "splash": "JAX's splash attention"}
CHECK = "xformer check-device"


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation and the reason for it, in words."""

    name: str
    reason: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the user forces and forbids, for calls that name no implementation."""

    forced: str | None = None
    forbidden: frozenset[str] = frozenset()


def rule(text: str | None = None) -> Rule:
    """The rule in `$XFORMER_IMPLEMENTATION`: a name forces, `-name` forbids; several with commas between them.

    Raises:
      ValueError: an unknown name, two that are forced, or one that is forced and forbidden.
    """
    return _parse(os.environ.get(VARIABLE, "") if text is None else text)


@functools.cache
def _parse(text: str) -> Rule:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word.removeprefix("-") not in (*KERNELS, "xla") or word == "-xla":
            names = ", ".join([*KERNELS, "xla", *(f"-{name}" for name in KERNELS)])
            near = did_you_mean(word, names.split(", "))
            raise ValueError(f"{VARIABLE}: got {word!r}, takes {names}, with commas between them{near}")
    forced = [word for word in words if not word.startswith("-")]
    if len(forced) > 1:
        raise ValueError(f"{VARIABLE}: got {text!r}, takes one name to force; -name forbids")
    forbidden = frozenset(word[1:] for word in words if word.startswith("-"))
    if forced and forced[0] in forbidden:
        raise ValueError(f"{VARIABLE}: got {text!r}, which forces and forbids {forced[0]}; takes one of the two")
    return Rule(forced[0] if forced else None, forbidden)


def unusable(device: Device) -> dict[str, str]:
    """The kernels for devices of this platform, and why this one can't run them: "" for those that it can."""
    if device.platform == "tpu":
        return {"splash": ""}
    if device.platform != "gpu" or device.capability is None:
        return {}
    old = device.capability < (8, 0)
    return {"cudnn": "cuDNN's flash attention needs compute capability 8.0" if old else "", "pallas": ""}


def candidates(device: Device, table: Table | None) -> dict[str, str]:
    """Kernels that a call on a device may get, and why each that it may not get is out: "" for those it may.

    What failed the check is out, whoever made it.
    """
    known = unusable(device)
    for name in known:
        if table is not None and name in table.failed:
            known[name] = f"it failed the check on this device: {table.failed[name]}"
        elif name not in LIBRARY and (table is None or name not in table.passed):
            known[name] = f"it is not checked on this device; {CHECK} does"
    return known


def automatic(
    device: Device,
    table: Table | None,
    rule: Rule,
    refusals: Mapping[str, Sequence[str]],
    *,
    pattern: Pattern,
    dtype: str,
    length: int,
    head_dim: int,
) -> Choice:
    """The implementation of a call.

    Args:
      device: what the call is to run on.
      table: what was found on such a device; None where nothing was.
      rule: what the user forces and forbids.
      refusals: kernel -> why it can't do the call; empty where it can.
      pattern, dtype, length, head_dim: of the call; `length` is that of the keys.
    """
    allowed = candidates(device, table)
    able = [name for name, out in allowed.items() if not (out or refusals.get(name) or name in rule.forbidden)]
    if rule.forced == "xla":
        return Choice("xla", f"{VARIABLE} says so")
    if rule.forced is not None:
        out = unusable(device).get(rule.forced) or ""  # forcing skips the check, not what the device can't do
        if table is not None and rule.forced in table.failed:
            out = allowed[rule.forced]
        why = list(refusals.get(rule.forced, ())) + ([out] if out else [])
        if rule.forced not in allowed:
            why = [f"there is none for {device.kind}"]
        if not why:
            return Choice(rule.forced, f"{VARIABLE} says so")
        return Choice("xla", f"{rule.forced}, which {VARIABLE} asks for, cannot do the call: {'; '.join(why)}")
    timing = None if table is None else table.nearest(pattern, dtype, length, head_dim)
    if timing is not None and timing.seconds:
        timed = sorted((seconds, name) for name, seconds in timing.seconds.items() if name in (*able, "xla"))
        if timed:
            assert table is not None
            case = f"{timing.pattern} attention, {timing.length:,} tokens, head_dim {timing.head_dim}"
            wrong = "".join(f"; {name} failed the check" for name in allowed if name in table.failed)
            return Choice(timed[0][1], f"the fastest for {case} in {table.source}{wrong}")
    if able:
        name = able[0]
        unchecked = table is None or name not in table.passed
        what = LIBRARY.get(name, "checked on this device")
        return Choice(name, what + (f", not checked on this device ({CHECK} does)" if unchecked else ""))
    forbidden = lambda name: [f"{VARIABLE} forbids it"] if name in rule.forbidden else []
    why_not = [f"{name}: {'; '.join(forbidden(name) or refusals.get(name) or [out])}" for name, out in allowed.items()]
    return Choice(
        "xla", f"no kernel can do the call ({', '.join(why_not)})" if why_not else "no kernel for this device"
    )


def without_kernel(rule: Rule, why: str) -> Choice:
    """The choice for a call that no kernel can do, for the reason given."""
    if rule.forced not in (None, "xla"):
        return Choice("xla", f"{rule.forced}, which {VARIABLE} asks for, cannot do the call: {why}")
    return Choice("xla", f"{VARIABLE} says so" if rule.forced else f"no kernel can do the call ({why})")


def automatic_state(
    device: Device, table: Table | None, rule: Rule, refusals: Sequence[str], *, dtype: str, length: int, head_dim: int
) -> Choice:
    """The implementation of a call of linear attention: "pallas" or "xla". `refusals`: why the kernels can't do it."""
    forced = rule.forced
    if forced == "xla":
        return Choice("xla", f"{VARIABLE} says so")
    if forced not in (None, "pallas"):
        return Choice("xla", f"{forced}, which {VARIABLE} asks for, cannot do the call: it is linear attention")
    here = unusable(device)
    if "pallas" not in here:
        return Choice("xla", "no kernel for this device")
    why = list(refusals)
    if "pallas" in rule.forbidden:
        why.append(f"{VARIABLE} forbids it")
    if table is not None and STATE in table.failed:
        why.append(f"it failed the check on this device: {table.failed[STATE]}")
    elif forced is None and (table is None or STATE not in table.passed):
        why.append(f"it is not checked on this device; {CHECK} does")
    if why:
        return Choice("xla", f"no kernel can do the call (pallas: {'; '.join(why)})")
    if forced is not None:
        return Choice("pallas", f"{VARIABLE} says so")
    assert table is not None
    timing = table.nearest("state", dtype, length, head_dim)
    if timing is not None and timing.seconds.get("xla", math.inf) < timing.seconds.get(STATE, math.inf):
        return Choice("xla", f"the fastest for linear attention, {timing.length:,} tokens, in {table.source}")
    return Choice("pallas", "checked on this device")


@functools.cache
def announce(device: Device, choice: Choice, checked: bool) -> None:
    """Says what runs, once for each implementation; as a warning on a device that is not checked.

    On a CPU only where the environment asks for something.
    """
    if device.platform != "cpu" or VARIABLE in choice.reason:
        nothing = checked or CHECK in choice.reason or not any(why == "" for why in unusable(device).values())
        hint = "" if nothing else f"; {CHECK} checks and times the kernels of this device"
        level = logging.INFO if checked else logging.WARNING
        logger.log(level, "attention on %s runs %s: %s%s", device.kind, choice.name, choice.reason, hint)
