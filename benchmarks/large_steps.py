"""Times the tiled engine with steps of several sizes on the accelerator at hand, to refute those it takes.

    python -m benchmarks.large_steps                     # full, causal and BigBird, 8 heads of 64, forward and backward

`benchmarks/README.md` reasons what steps an accelerator should get. Prints a row for each op, length, tile and number
of scores in a step, with the median of a call in milliseconds; the sizes that are taken come first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator

import jax

from xformer.attention import Attention, BigBird, Full, Shape
from xformer.attention.device import aimed_at, present
from xformer.attention.engine import attend as engine
from xformer.attention.engine import tile_policy
from xformer.bench import benchmark, contender, timing
from xformer.bench.jax_contenders import ours

TILES = (tile_policy.LARGE_TILE, (512, 256), (2048, 1024), (2048, 2048))
STEPS = (engine.LARGE_STEP_SCORES, 0, 2**22, 2**26)
OPS: tuple[tuple[Attention, tuple[int, ...]], ...] = (
    (Full(implementation="xla"), (2048, 8192)),
    (Full(causal=True, implementation="xla"), (2048, 8192)),
    (BigBird(block_size=64, implementation="xla"), (4096, 16384)),
)


@contextlib.contextmanager
def sizes(tile: tuple[int, int], step: int) -> Iterator[None]:
    """Within it the engine takes these."""
    before = tile_policy.LARGE_TILE, engine.LARGE_STEP_SCORES
    tile_policy.LARGE_TILE, engine.LARGE_STEP_SCORES = tile, step
    try:
        yield
    finally:
        tile_policy.LARGE_TILE, engine.LARGE_STEP_SCORES = before


def rows(length: int | None) -> Iterator[str]:
    """A line of text for each case; `length` instead of those of `OPS`, for a trial."""
    for op, lengths in OPS:
        for each in lengths if length is None else (length,):
            # What blocks decide has one tile, what large tiles fill has one query tile a step.
            blocks = isinstance(op, BigBird)
            for tile, step in [(TILES[0], x) for x in STEPS] if blocks else [(x, STEPS[0]) for x in TILES]:
                case = contender.Case(op, Shape(1, each, each, 8, 64), "bfloat16", backward=True)
                with sizes(tile, step):
                    ready, skipped = benchmark.prepare([ours()], case)
                name = f"{type(op).__name__}{' causal' if op.causal else ''}, {each:,}, {tile[0]} x {tile[1]}, {step:,}"
                for reason in skipped.values():
                    yield f"{name}: {reason}"
                for seconds in timing.in_turn({key: x.call for key, x in ready.items()}, timing.Rounds()).values():
                    yield f"{name}: {1e3 * timing.quartiles(seconds)[1]:.3g} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, help="one length instead of several")
    options = parser.parse_args()
    device = present()
    if device.platform == "cpu":
        print("a CPU: it is made to take such steps too, and its times say nothing of accelerators", file=sys.stderr)
        device = dataclasses.replace(device, platform="gpu")
    with aimed_at(device):
        for row in rows(options.length):
            print(f"{jax.devices()[0].device_kind}: {row}", flush=True)


if __name__ == "__main__":
    main()
