"""Times implementations and their tiles on the device at hand, by pattern, length and head_dim, within a budget."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from xformer.attention import Attention, BigBird, Full, Linear, Shape, Window
from xformer.attention.kernels import KERNELS, tables
from xformer.attention.kernels.tables import Table, Timing
from xformer.bench import benchmark, timing
from xformer.bench.contender import Case, Contender, Ready
from xformer.bench.jax_contenders import ours

OPS: dict[str, Callable[[int], Attention]] = {
    "causal": lambda length: Full(causal=True),
    "full": lambda length: Full(),
    "blocks": lambda length: BigBird(block_size=min(128, length // 8)),
    "state": lambda length: Linear(causal=True),
    "window": lambda length: Window(left=length // 8, right=length // 8),
}
LENGTHS, HEAD_DIMS, HEADS, TOKENS = (4096, 1024, 16384), (64, 128), 8, 16384
ROUNDS = timing.Rounds(least=3, most=9, seconds=3.0, turn_seconds=0.02)
NO_TIME = "no time is left"
# Implementations as a table of times names them, with their tiles where they have some.
Candidate = tuple[str, tuple[int, int] | None]


@dataclasses.dataclass(frozen=True)
class Place:
    """One case to time: see `Timing`."""

    pattern: str
    dtype: str
    length: int
    head_dim: int


def places(lengths: Sequence[int] = LENGTHS, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Place]:
    """What is timed, what matters most first: what a short budget leaves out is chosen like what is nearest to it."""
    for dtype, some in (("bfloat16", head_dims), ("float32", head_dims[:1])):
        for head_dim in some:
            for length in lengths:
                for pattern in OPS:
                    yield Place(pattern, dtype, length, head_dim)


def candidates(passed: Sequence[str], pattern: str = "full") -> list[Candidate]:
    """What is XLA's, and each kernel that passed the check, with its own choice of tiles and with others if it has."""
    found: list[Candidate] = [("xla", None)]
    if pattern == "state":
        return found + [(name, None) for name in passed if name == tables.STATE]
    for name in (name for name in passed if name in KERNELS):
        found += [(name, None), *((name, tiles) for tiles in KERNELS[name].TILES)]
    return found


def contender(place: Place, name: str, tiles: tuple[int, int] | None) -> Contender:
    """The op with an implementation, compiled with the given tiles."""

    def prepare(case: Case) -> Ready:
        given = () if tiles is None else (Timing(**dataclasses.asdict(place), seconds={}, tiles={name: tiles}),)
        with tables.using(Table({}, timings=given)):
            return ours(name, "pallas" if name == tables.STATE else name).prepare(case)

    return Contender(label(name, tiles), prepare)


def label(name: str, tiles: tuple[int, int] | None) -> str:
    """How a candidate is called in messages."""
    return name if tiles is None else f"{name} {tiles[0]} x {tiles[1]}"


def measure(
    passed: Sequence[str],
    seconds: float,
    say: Callable[[str], None],
    done: Callable[[tuple[Timing, ...]], None] = lambda timings: None,
    todo: Sequence[Place] | None = None,
) -> tuple[Timing, ...]:
    """Times every place that the budget has room for, forward and backward.

    Args:
      passed: kernels that passed the check; others are not timed.
      seconds: after which no place, and no candidate of a place, is begun. A place in which an implementation had no
        turn is left out.
      say: gets progress, a line each.
      done: gets all timings after each place.
      todo: the places; all of them by default.
    """
    started, found = time.perf_counter(), []
    left = lambda: seconds - (time.perf_counter() - started)
    todo = list(places()) if todo is None else todo
    for number, place in enumerate(todo):
        if left() <= 0:
            say(f"  {seconds:g} s are over: {len(todo) - number} of {len(todo)} cases are left out")
            break
        one = _measure(place, passed, left, say)
        if one is not None:
            found.append(one)
            done(tuple(found))
    return tuple(found)


def _measure(
    place: Place, passed: Sequence[str], left: Callable[[], float], say: Callable[[str], None]
) -> Timing | None:
    op = OPS[place.pattern](place.length)
    batch = max(TOKENS // place.length, 1)
    shape = Shape(batch, place.length, place.length, HEADS, place.head_dim)
    case = Case(op, shape, place.dtype, backward=True)
    which = f"{place.pattern}, {place.dtype}, {place.length:,} x {place.head_dim}"
    named = {label(*one): one for one in candidates(passed, place.pattern)}

    def in_time(name: str, ready: Ready) -> None:
        if left() <= 0:
            raise NotImplementedError(NO_TIME)

    found = [contender(place, *one) for one in named.values()]
    ready, skipped = benchmark.prepare(_while(found, left), case, in_time)
    for name, reason in skipped.items():
        say(f"  {which}, {name}: left out, {reason}")
    if not ready:
        return None
    # Calls get the fastest of a case: one that had no turn would lose to what is slower.
    turned = {named[name][0] for name in (*ready, *skipped) if skipped.get(name) != NO_TIME}
    if missing := {name for name, _ in named.values()} - turned:
        say(f"  {which}: left out, {NO_TIME} for {', '.join(sorted(missing))}")
        return None
    calls = {name: one.call for name, one in ready.items()}
    medians = {name: timing.quartiles(x)[1] for name, x in timing.in_turn(calls, ROUNDS).items()}
    best: dict[str, float] = {}
    tiles: dict[str, tuple[int, int]] = {}
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        implementation, sizes = named[name]
        if implementation not in best:
            best[implementation] = median
            if sizes is not None:
                tiles[implementation] = sizes
    times = ", ".join(f"{label(name, tiles.get(name))} {1e3 * x:,.3g} ms" for name, x in best.items())
    say(f"  {which}: {times}")
    return Timing(**dataclasses.asdict(place), seconds=best, tiles=tiles)


def _while(found: Sequence[Contender], left: Callable[[], float]) -> Iterator[Contender]:
    """The contenders for which there is time; the first always. Tiles come last, so that they are what is left out."""
    for number, one in enumerate(found):
        if number and left() <= 0:
            return
        yield one


def rows(timings: Sequence[Timing], failed: Container[str] = ()) -> list[dict[str, Any]]:
    """The timings without those of kernels that failed the check, each with the implementation that is chosen."""
    found = []
    for one in timings:
        seconds = {name: x for name, x in one.seconds.items() if name not in failed}
        if seconds:
            row = {**dataclasses.asdict(one), "seconds": seconds}
            found.append({**row, "chosen": min(seconds, key=lambda name: seconds[name])})
    return found
