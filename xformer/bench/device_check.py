"""Checks kernels against the reference on the device at hand, or in Pallas's interpreter where there is none.

Cases together cover: forward and backward, dtypes, odd lengths, padding up to examples without a real token, causal
cuts, windows, block patterns, grouped heads, position terms, segments, soft caps, and queries at an offset.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention import ALiBi, Attention, BigBird, Full, Linear, Longformer, Performer, Retention, Rotary, Window
from xformer.attention.device import present
from xformer.attention.kernels import interpreted, tables
from xformer.attention.kernels.pallas import MAX_HEAD_DIM
from xformer.attention.kernels.tables import Table
from xformer.bench.jax_contenders import with_gradients

NAMES = ("output", "gradient of query", "gradient of key", "gradient of value")
# Of the largest entry. Products of float32 run in TF32 on GPUs and in passes of bfloat16 on TPUs.
TOLERANCE = {"bfloat16": 3e-2, "float16": 1e-2}
FLOAT32 = {"cpu": 1e-4, "gpu": 5e-3, "tpu": 3e-2}
SECONDS = 900.0  # for the checks of all kernels; a case takes seconds on a device


@dataclasses.dataclass(frozen=True)
class Case:
    """One check.

    Attributes:
      name: what it is of.
      op: computes it, by the kernel and by the reference.
      length, head_dim, heads, kv_heads, dtype: of the call.
      real: how many tokens of each of the two examples are no padding; None: no mask.
      segments: whether tokens are in three segments.
      queries: how many queries there are, the last ones; None: as many as keys.
      options: (name, value) of other arguments of the call.
    """

    name: str
    op: Attention
    length: int
    dtype: str = "bfloat16"
    head_dim: int = 64
    heads: int = 4
    kv_heads: int = 4
    real: tuple[int, int] | None = None
    segments: bool = False
    queries: int | None = None
    options: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found: the largest error, as a share of the largest entry, and in words what is wrong, if it is."""

    case: str
    error: float
    wrong: str | None
    seconds: float


def cases(kernel: str, tiny: bool) -> list[Case]:
    """The checks of a kernel; `tiny` ones are for the interpreter."""
    n, block = (75, 16) if tiny else (1999, 128)
    bigbird = BigBird(block_size=block, num_random_blocks=1 if tiny else 2, num_window_blocks=1, num_global_blocks=1)
    window = Window(left=n // 6, right=3)
    past = Window(left=n // 6, right=0, causal=True)
    if kernel == "pallas":
        small = 16 if tiny else 64
        return [
            Case("full, padded, grouped heads", Full(), n, head_dim=small, kv_heads=2, real=(n - 9, 0)),
            Case("causal, ALiBi, float32", Full(causal=True, position=ALiBi()), n, "float32", 24 if tiny else 80),
            # Both ways: behind a causal cut distances that are all off by one give the same weights.
            Case("window, segments, ALiBi", dataclasses.replace(window, position=ALiBi()), n, head_dim=small,
                 segments=True),
            Case("BigBird, padded", bigbird, n, head_dim=small, real=(n, n // 2)),
            Case("BigBird, causal, rotary, float32", dataclasses.replace(bigbird, causal=True, position=Rotary()), n,
                 "float32", small, kv_heads=2),
            Case("queries at an offset", past, n, "float32", small, queries=7),
            Case("Longformer, float16", Longformer(2 * (n // 12), 1, 2), n, "float16", small, real=(n, n - 3)),
            *([] if tiny else [Case("full, wide heads", Full(), n, head_dim=128),
                               Case("full, the widest heads", Full(), n, head_dim=MAX_HEAD_DIM)]),
        ]  # fmt: skip
    if kernel == tables.STATE:
        small = 16 if tiny else 64
        return [
            Case("linear, causal, padded, grouped heads", Linear(causal=True), n, head_dim=small, kv_heads=2,
                 real=(n - 9, 0)),
            Case("retention, causal, rotary, float32", Retention(causal=True, position=Rotary()), n, "float32", small),
            Case("retention, both ways, segments", Retention(), n, head_dim=24 if tiny else 80, segments=True),
            Case("performer with relu, causal, float32", Performer(num_features=24 if tiny else 256, kernel="relu",
                 causal=True), n, "float32", small, segments=True),
        ]  # fmt: skip
    if kernel == "splash":
        n, block = (151, 64) if tiny else (1999, 128)
        bigbird, window, past = (
            dataclasses.replace(bigbird, block_size=block), Window(left=n // 6, right=3),
            Window(left=n // 6, right=0, causal=True),
        )  # fmt: skip
        return [
            Case("window, padded, grouped heads, float32", window, n, "float32", kv_heads=2, real=(n - 9, 0)),
            Case("causal, segments", Full(causal=True), n, segments=True),
            Case("BigBird, padded", bigbird, n, real=(n, n // 2)),
            Case("full, soft cap, rotary", Full(position=Rotary()), n, options=(("softcap", 2.0),)),
            Case("queries at an offset", past, n, "float32", queries=7),
            *([] if tiny else [Case("full, wide heads", Full(), n, head_dim=128)]),
        ]
    n = n - n % 2  # the usual length; an odd one is a check of its own
    return [
        Case("full, grouped heads", Full(), n, kv_heads=2),
        Case("full, wide heads, float16", Full(), n, "float16", 128),
        Case("full, padded", Full(), n, real=(n, n // 3)),
        Case("full, an example of padding", Full(), n, real=(n, 0)),
        Case("causal, rotary", Full(causal=True, position=Rotary()), n),
        Case("causal window", past, n),
        Case("full, odd length", Full(), n + 1),
    ]


def arrays(case: Case) -> list[jax.Array]:
    """Query, key, value and a gradient of the output."""
    q_len = case.length if case.queries is None else case.queries
    sizes = (q_len, case.heads), (case.length, case.kv_heads), (case.length, case.kv_heads), (q_len, case.heads)
    rngs = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(rng, (2, length, heads, case.head_dim), case.dtype)
        for rng, (length, heads) in zip(rngs, sizes, strict=True)
    ]


def call_options(case: Case) -> dict[str, Any]:
    """The other arguments of the call."""
    options: dict[str, Any] = dict(case.options)
    if case.real is not None:
        options["mask"] = (jnp.arange(case.length) < jnp.asarray(case.real)[:, None])[:, None, None]
    if case.segments:
        options["segment_ids"] = jnp.arange(case.length)[None] * 3 // case.length
    if case.queries is not None:
        options["query_offset"] = case.length - case.queries
    return options


def check(kernel: str, case: Case, platform: str) -> Outcome:
    """One check; whatever goes wrong is its outcome."""
    started = time.perf_counter()
    operands, options = arrays(case), call_options(case)
    named = lambda name: dataclasses.replace(case.op, implementation="pallas" if name == tables.STATE else name)
    quick = {"xla_backend_optimization_level": 0} if platform == "cpu" else None  # the interpreter is mostly compiling
    run = lambda op: jax.jit(with_gradients(lambda q, k, v: op(q, k, v, **options)), compiler_options=quick)
    try:
        with interpreted():
            got = jax.block_until_ready(run(named(kernel))(*operands))
        with jax.default_matmul_precision("highest"):
            want = run(named("reference"))(*(x.astype(jnp.float32) for x in operands))
    except Exception as error:  # whatever a compiler or a driver raises: the kernel does not work here
        line = " ".join(str(error).split())[:300] or type(error).__name__
        return Outcome(case.name, float("inf"), line, time.perf_counter() - started)
    tolerance = FLOAT32.get(platform, 5e-3) if case.dtype == "float32" else TOLERANCE[case.dtype]
    errors = {name: _error(x, y) for name, x, y in zip(NAMES, got, want, strict=True)}
    worst = max(errors, key=lambda name: errors[name])
    wrong = None
    if not errors[worst] <= tolerance:
        wrong = f"{worst} is off by {errors[worst]:.1e} of the largest entry, above {tolerance:g}"
    elif case.real is not None and 0 in case.real:
        empty = case.real.index(0)
        if any(np.asarray(x, np.float32)[empty].any() for x in got):
            wrong = "an example without a real token does not give zeros"
    return Outcome(case.name, errors[worst], wrong, time.perf_counter() - started)


def _error(got: Any, want: Any) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-9))


def check_all(
    kernels: Iterable[str],
    say: Callable[[str], None],
    *,
    tiny: bool = False,
    seconds: float = SECONDS,
    cases: Callable[[str, bool], Sequence[Case]] = cases,
) -> Table:
    """Checks kernels, in default tiles, and gives a table without times.

    Args:
      kernels: their names.
      say: gets a line for each check.
      tiny: small shapes, for the interpreter.
      seconds: after which no check is begun; a kernel whose checks did not all run neither passed nor failed.
      cases: the checks of a kernel.
    """
    device, started = present(), time.perf_counter()
    blank = Table(device.key)
    passed, failed = set(), {}
    for kernel in kernels:
        done, wrong = 0, []
        todo = cases(kernel, tiny)
        for case in todo:
            if time.perf_counter() - started > seconds:
                say(f"  {kernel}: {len(todo) - done} of {len(todo)} checks left out, {seconds:g} s are over")
                break
            with tables.using(blank):
                outcome = check(kernel, case, device.platform)
            done += 1
            verdict = f"error {outcome.error:.1e}" if outcome.wrong is None else f"WRONG: {outcome.wrong}"
            say(f"  {kernel}, {case.name}: {verdict} ({outcome.seconds:.1f} s)")
            if outcome.wrong is not None:
                wrong.append(f"{case.name}: {outcome.wrong}")
        if wrong:
            failed[kernel] = f"{len(wrong)} of {done} checks, first {wrong[0]}"
        elif done == len(todo):
            passed.add(kernel)
    return Table(device.key, frozenset(passed), failed)
