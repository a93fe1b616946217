"""What the attention of each variant costs at each length: FLOPs counted for all, time and memory measured while short.

Variants are measured in one process and take turns, so that whatever else the machine does slows all of them alike.
Compilation is never timed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import operator
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xformer import cost
from xformer.attention import Attention, Layers, Shape, entries
from xformer.bench.inputs import trees
from xformer.bench.jax_contenders import with_gradients
from xformer.bench.timing import Call, Rounds, in_turn
from xformer.report import CostRow
from xformer.train import workdir as folders

MIN_ROUNDS, MAX_ROUNDS = 3, 15
REFUSED = (ValueError, NotImplementedError)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to count and to measure: batch 1, `num_heads` heads of `head_dim`, lengths in tokens, time in seconds.

    `reference` is the variant that the others are set against.
    """

    ops: Mapping[str, Attention]
    reference: str
    num_heads: int
    head_dim: int
    num_kv_heads: int | None
    dtype: str
    lengths: Sequence[int]
    measure_up_to: int
    seconds: float

    def shape(self, length: int) -> Shape:
        return Shape(1, length, length, self.num_heads, self.head_dim, self.num_kv_heads)

    @property
    def key(self) -> dict[str, Any]:
        """All that the numbers depend on."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {"ops": {name: repr(op) for name, op in self.ops.items()}, "lengths": list(self.lengths)}
        return fields | {"device": device(), "jax": jax.__version__}

    @property
    def _has_stack(self) -> bool:
        return any(len(entries(op)) > 1 for op in self.ops.values())

    @property
    def note(self) -> str:
        """One sentence for readers of the numbers."""
        mean = " A stack's numbers are the mean of its entries." if self._has_stack else ""
        return (
            f"Batch 1, {self.num_heads} heads of {self.head_dim}, {self.dtype}, each variant built for the length; "
            f"times are medians of at least {MIN_ROUNDS} calls on {device()}, compilation left out, "
            f"up to {self.measure_up_to:,} tokens.{mean}"
        )


def device() -> str:
    """The one device that measurements run on."""
    kind = jax.devices()[0].device_kind
    return f"one {kind}" + (f" ({os.cpu_count()} cores)" if jax.default_backend() == "cpu" else "")


def cached(path: Path, plan: Plan, say: Callable[[str], None]) -> list[CostRow]:
    """The rows of the plan: from `path` if they were measured for this very plan, else measured and written there.

    A damaged file is said and measured again.
    """
    key = json.loads(json.dumps(plan.key))
    if path.exists():
        try:
            there = json.loads(path.read_text())
            if there["key"] == key:
                return [_row(row) for row in there["rows"]]
        except (ValueError, TypeError, KeyError, AttributeError):
            say(f"{path} is damaged; the costs are measured again")
    rows = measure(plan, say)
    finite = lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    plain = [{name: finite(value) for name, value in dataclasses.asdict(row).items()} for row in rows]
    folders.write_json(path, {"key": key, "rows": plain})
    return rows


def _row(values: Mapping[str, Any]) -> CostRow:
    """A row as it was written; ValueError or TypeError where it can't be one."""
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in values.items()}
    row = CostRow(**known | {"uncounted": tuple(values.get("uncounted", ()))})
    numbers = (row.length, row.flops, row.train_flops, row.time_ms, row.train_time_ms, row.memory_bytes,
               row.forward_bytes)  # fmt: skip
    if not all(isinstance(value, int | float) for value in numbers) or not isinstance(row.note, str):
        raise ValueError(f"{values} is no row of costs")
    return row


def measure(plan: Plan, say: Callable[[str], None]) -> list[CostRow]:
    """Counts every length, and measures from the shortest on, until `measure_up_to` is reached or the time is over."""
    started = time.perf_counter()
    rows: list[CostRow] = []
    expected = dict.fromkeys(plan.ops, 0.0)  # seconds that each variant will take at the next length
    for length in sorted(plan.lengths):
        counted = {name: count(name, op, plan, length) for name, op in plan.ops.items()}
        if length <= plan.measure_up_to:
            left = plan.seconds - (time.perf_counter() - started)
            fitting = _fitting(
                {name: expected[name] for name, row in counted.items() if math.isfinite(row.flops)}, left
            )
            if fitting:
                say(f"measuring attention at {length:,} tokens")
                measured, expected = time_all([counted[name] for name in plan.ops if name in fitting], plan, length)
                counted |= {row.variant: row for row in measured}
            expected = {name: expected.get(name, math.inf) for name in plan.ops}
            late = f"not measured: beyond the {plan.seconds:g} s for measuring"
            for name in plan.ops.keys() - fitting:
                counted[name] = dataclasses.replace(counted[name], note=counted[name].note or late)
        rows += counted.values()
    return rows


def _fitting(expected: Mapping[str, float], seconds: float) -> set[str]:
    """The variants, in their order, that take no more than `seconds` together."""
    ends = itertools.accumulate(expected.values())
    return {name for name, end in zip(expected, ends, strict=True) if end <= seconds}


def at_length(op: Attention, length: int) -> Attention:
    """The op as it would be built for inputs of this length: whatever has a `max_len` gets it, if it can."""
    if isinstance(op, Layers):
        return Layers(tuple(at_length(entry, length) for entry in op.ops))
    changes: dict[str, Any] = {}
    position: Any = getattr(op, "position", None)
    if hasattr(position, "max_len"):
        changes["position"] = dataclasses.replace(position, max_len=length)
    if hasattr(op, "max_len"):
        changes["max_len"] = length
    try:
        return dataclasses.replace(op, **changes)
    except ValueError:  # a rank above the length: it stays as it is
        return op


def count(name: str, op: Attention, plan: Plan, length: int) -> CostRow:
    """FLOPs at one length, forward and with backward; NaN with the reason where the variant can't do it.

    Those of a stack are the mean of its entries.
    """
    op = at_length(op, length)
    try:
        forward = sum(entry.cost(plan.shape(length)).flops for entry in entries(op))
        both = cost.count(gradient(op), *jax.eval_shape(lambda: arguments(op, plan, length)))
    except REFUSED as error:
        return CostRow(name, length, math.nan, note=" ".join(str(error).split()))
    number = len(entries(op))
    return CostRow(name, length, round(forward / number), round(both.flops / number), uncounted=tuple(both.uncounted))


def arguments(op: Attention, plan: Plan, length: int) -> tuple[Any, Any]:
    """(parameters of each entry of a stack; query, key and value): random, reproducible."""
    shape = plan.shape(length)
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = [(1, length, heads, plan.head_dim) for heads in (shape.num_heads, shape.kv_heads, shape.kv_heads)]
    qkv = tuple(jax.random.normal(key, size, plan.dtype) for key, size in zip(keys[:3], sizes, strict=True))
    return [entry.init(keys[3], shape) for entry in entries(op)], qkv


def forward(op: Attention) -> Callable[[Any, Any], Any]:
    """What all entries of a stack give, one after the other: the sum, so that none is left out."""

    def run(params: Any, qkv: Any) -> Any:
        length = qkv[0].shape[1]
        outputs = (
            entry(*qkv, params=own, **trees(entry, length)) for entry, own in zip(entries(op), params, strict=True)
        )
        return functools.reduce(operator.add, outputs)

    return run


def gradient(op: Attention) -> Callable[[Any, Any], Any]:
    """Output and gradients to everything, for a gradient of ones."""
    return lambda params, qkv: with_gradients(forward(op))(params, qkv, jnp.ones_like(qkv[0]))


def time_all(rows: Sequence[CostRow], plan: Plan, length: int) -> tuple[list[CostRow], dict[str, float]]:
    """The rows with median times and temporary memory, and the seconds that each variant needs at twice the length.

    Calls take turns; more than the fewest rounds are taken while that costs little of the plan's time.
    """
    calls: dict[tuple[str, str], Call] = {}
    found: dict[str, dict[str, Any]] = {row.variant: {} for row in rows}
    expected = dict.fromkeys(found, 0.0)
    for name in found:
        started = time.perf_counter()
        op = at_length(plan.ops[name], length)
        try:
            args = jax.block_until_ready(arguments(op, plan, length))
            calls_of = (("time_ms", "forward_bytes", forward(op)), ("train_time_ms", "memory_bytes", gradient(op)))
            for key, memory_key, fn in calls_of:
                compiled = jax.jit(fn).lower(*args).compile()
                jax.block_until_ready(compiled(*args))
                calls[name, key] = Call(functools.partial(compiled, *args))
                memory = compiled.memory_analysis()
                found[name][memory_key] = math.nan if memory is None else memory.temp_size_in_bytes
        except jax.errors.JaxRuntimeError as error:  # out of memory, most likely
            found[name]["note"] = f"not measured: {str(error).splitlines()[0][:120]}"
        expected[name] = time.perf_counter() - started  # compiling takes about as long again
    rounds = Rounds(MIN_ROUNDS, MAX_ROUNDS, 0.1 * plan.seconds, turn_seconds=0.0, pause_seconds=0.0)
    times = in_turn(calls, rounds)
    for (name, key), measured in times.items():
        seconds = statistics.median(measured)
        found[name][key] = seconds * 1e3 / len(entries(plan.ops[name]))
        expected[name] += 4 * (MIN_ROUNDS + 2) * seconds  # at most; two calls come before the rounds
    return [dataclasses.replace(row, **found[row.variant]) for row in rows], expected
