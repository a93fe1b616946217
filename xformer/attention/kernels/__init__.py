"""Accelerator kernels behind the same call: what each can do, and which one a call gets.

`device` describes the device, `tables` holds what `xformer check-device` found on it, `choice` decides where no
implementation is named, `meshes` runs kernels on the shards of a mesh. `pallas` (through `triton`), `splash` and
`cudnn` are the kernels; `running_state` (through `state_kernels`) is that of linear attention.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax

from xformer.attention.device import Device, aimed_at, present
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.kernels import choice, cudnn, meshes, pallas, running_state, splash, tables
from xformer.attention.pattern import Full, Pattern
from xformer.attention.state import operands as of_state

__all__ = [
    "KERNELS", "Device", "aimed_at", "attend", "choose", "choose_state", "interpreted", "only_tiled", "quietly",
]  # fmt: skip

KERNELS = {"pallas": pallas, "splash": splash, "cudnn": cudnn}
PLATFORMS = {"pallas": "gpu", "splash": "tpu", "cudnn": "gpu"}

_interpreted = contextvars.ContextVar("interpreted", default=False)
_quiet = contextvars.ContextVar("quiet", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it "pallas" and "splash" can be called where there is no GPU or TPU, by name.

    On a CPU they run in Pallas's interpreter, right but slow: to test them, and to lower them for their platform.
    """
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Within it no line says what runs: for traces of what is looked at and not run, maybe without the run's mesh."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def only_tiled(why: str) -> str:
    """The implementation, "xla", of a call that names none and that no kernel can do. `why`: the reason in words."""
    device, rule = present(), choice.rule()
    if device.platform != "cpu" or rule.forced is not None:
        _say(device, choice.without_kernel(rule, why), tables.current() is not None)
    return "xla"


def choose(
    implementation: str | None,
    inputs: Inputs,
    controls: Controls,
    settings: Settings,
    pattern: Pattern,
    *,
    anywhere: bool = False,
    with_lse: bool = False,
) -> str:
    """The implementation of a call, of which only shapes, dtypes and static choices are read.

    With `anywhere`, an implementation that is named need not be able to run on this machine; with `with_lse`, it must
    give the log-sum-exp. Raises NotImplementedError when the kernel that was named can't do the call.
    """
    call = _in_one_dtype(inputs), controls, settings, pattern
    if implementation is None and with_lse:
        return only_tiled("kernels give no log-sum-exp")
    if implementation is None:
        with quietly() if anywhere else contextlib.nullcontext():
            return _automatic(*call)
    if implementation in KERNELS:
        here = [] if anywhere or (_interpreted.get() and implementation != "cudnn") else _absent(implementation)
        reasons = here + KERNELS[implementation].refusals(*call)
        reasons += ["it gives no log-sum-exp"] if with_lse else []
        if reasons:
            raise NotImplementedError(f'implementation="{implementation}" cannot do this call: {"; ".join(reasons)}')
        if not anywhere:
            _say_if_wrong(implementation, implementation)
    return implementation


def choose_state(
    implementation: str | None, settings: of_state.Settings, inputs: of_state.Inputs, controls: of_state.Controls
) -> str:
    """The implementation of a call of linear attention: "pallas", "xla" or "reference".

    Raises NotImplementedError when a kernel that was named can't do the call.
    """
    if implementation in KERNELS:
        reasons = [] if _interpreted.get() else _absent(implementation)
        reasons += running_state.refusals(settings, inputs, controls)
        reasons = reasons if implementation == "pallas" else ["it is linear attention, which has no softmax"]
        if reasons:
            raise NotImplementedError(f'implementation="{implementation}" cannot do this call: {"; ".join(reasons)}')
        _say_if_wrong(implementation, tables.STATE)
    if implementation is not None:
        return implementation
    device, rule = present(), choice.rule()
    if device.platform == "cpu" and rule.forced is None:
        return "xla"
    reasons = running_state.refusals(settings, inputs, controls)
    masked: Any = Controls(None, controls.real)
    reasons += meshes.refusals(inputs, masked, Full(), running_state, device.count)  # type: ignore[arg-type]
    chosen = choice.automatic_state(
        device, tables.current(), rule, reasons, dtype=str(inputs.value.dtype), length=inputs.key.shape[1],
        head_dim=inputs.key.shape[-1],
    )  # fmt: skip
    _say(device, chosen, tables.current() is not None)
    return chosen.name


def attend(implementation: str, inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> jax.Array:
    """A kernel's attention, `[batch, q_len, heads, head_dim]`; on the shards of a mesh in scope, each its own.

    Padded keys and values, those of a mask `[batch, 1, 1, kv_len]`, are zeroed, so it does not matter what stands
    there. A NaN or infinity that only a pattern, a causal cut or segments hide can still reach queries of the same
    tile: kernels multiply it by a weight of zero.
    """
    kernel, inputs = KERNELS[implementation], _in_one_dtype(inputs)
    layout = meshes.layout(inputs, controls, pattern, kernel)
    if layout is None:
        return kernel.attend(inputs, controls, settings, pattern)
    return meshes.attend(kernel, layout, inputs, controls, settings, pattern)


def _automatic(inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> str:
    device, rule = present(), choice.rule()
    if device.platform == "cpu" and rule.forced is None:
        return "xla"
    table = tables.current()
    refusals = {
        name: KERNELS[name].refusals(inputs, controls, settings, pattern)
        + meshes.refusals(inputs, controls, pattern, KERNELS[name], device.count)
        for name in choice.candidates(device, table)
    }
    if "cudnn" in refusals and jax.default_backend() == "gpu":  # not where `aimed_at` speaks of a GPU elsewhere
        refusals["cudnn"] += cudnn.unusable()
    chosen = choice.automatic(
        device, table, rule, refusals, pattern=pattern, dtype=str(inputs.query.dtype), length=inputs.key.shape[1],
        head_dim=inputs.query.shape[-1],
    )  # fmt: skip
    _say(device, chosen, table is not None)
    return chosen.name


def _say(device: Device, chosen: choice.Choice, checked: bool) -> None:
    if not _quiet.get():
        choice.announce(device, chosen, checked)


def _say_if_wrong(implementation: str, kernel: str) -> None:
    """Says that a kernel which is named failed the check: what is named is taken all the same."""
    table = tables.current()
    if table is not None and kernel in table.failed:
        why = f"it is named, though it failed the check on this device: {table.failed[kernel]}"
        _say(present(), choice.Choice(implementation, why), checked=False)


def _in_one_dtype(inputs: Inputs) -> Inputs:
    """Queries in the dtype of the keys. They are in float32 where an array scaled them, which kernels don't take."""
    same = inputs.query.dtype == inputs.key.dtype
    return inputs if same else inputs._replace(query=inputs.query.astype(inputs.key.dtype))


def _absent(name: str) -> list[str]:
    """Why a kernel can't run on this machine."""
    here = present()
    if here.platform != PLATFORMS[name]:
        return [f"it needs a {PLATFORMS[name].upper()}, JAX computes on the {here.platform.upper()} here"]
    if name == "cudnn" and here.capability is None:
        return ["it needs an NVIDIA GPU"]
    return []
