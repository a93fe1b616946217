"""The speed and memory that the attention engine is held to on a CPU, each figure measured beside its peers.

    python -m benchmarks.targets                              # all rows; needs the environment of `make bench-peers`
    python -m benchmarks.targets --only=full_forward,shaw     # some
    python -m benchmarks.targets --extra=FILE.py              # with contenders of one's own

Writes benchmarks/results/cpu_targets.json, keeping the rows that are not measured anew. FILE.py defines
`contenders(case)`, which gives a list of `xformer.bench.contender.Contender`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks import train_steps
from xformer.attention import ATTENTIONS, BigBird, Full, Linformer, Shape, Shaw
from xformer.bench import benchmark, machine, timing
from xformer.bench.contender import Case
from xformer.bench.jax_contenders import ours
from xformer.bench.peers import Extra, has_torch, load_extra, peers
from xformer.report import formatting

OUT = Path(__file__).parent / "results" / "cpu_targets.json"
Figures = dict[str, dict[str, Any]]
ROUNDS = timing.Rounds()


@dataclasses.dataclass(frozen=True)
class Target:
    """`quantity` of `ours` as a share of that of `peer`, or as it is where there is none, must be at most `limit`."""

    quantity: Literal["seconds", "extra_bytes", "peak_bytes"]
    ours: str
    peer: str | None
    limit: float

    def check(self, figures: Figures) -> dict[str, Any]:
        value = figures.get(self.ours, {}).get(self.quantity) or math.nan
        if self.peer is not None:
            value /= figures.get(self.peer, {}).get(self.quantity) or math.nan
        reached = None if math.isnan(value) else bool(value <= self.limit)
        return {**dataclasses.asdict(self), "value": None if reached is None else value, "reached": reached}

    def spell(self, value: float) -> str:
        return f"{value:.2f}" if self.peer is not None else formatting.mebibytes(value)


@dataclasses.dataclass(frozen=True)
class Calls:
    """A row of attention calls: (name, case) for ours; peers of the first case take part unless `alone`."""

    cases: Sequence[tuple[str, Case]]
    targets: Sequence[Target]
    alone: bool = False
    rounds: timing.Rounds = ROUNDS

    def measure(self, extra: Extra | None, gemm_rate: float) -> Figures:
        (first, case), *others = self.cases
        found = [benchmark.prepare([ours(first), *([] if self.alone else peers(case, extra))], case)]
        found += [benchmark.prepare([ours(name)], case) for name, case in others]
        for name, reason in [line for _, skipped in found for line in skipped.items()]:
            say(f"  {name}: {reason}")
        ready = {name: one for some, _ in found for name, one in some.items()}
        return benchmark.measure(ready, self.rounds, gemm_rate)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A row of whole training steps: name -> (contender, batch, length)."""

    sizes: dict[str, tuple[str, int, int]]
    targets: Sequence[Target]
    steps: int = 4

    def measure(self, extra: Extra | None, gemm_rate: float) -> Figures:
        figures: Figures = {}
        sizes = {name: size for name, size in self.sizes.items() if has_torch() or not name.startswith("Hugging Face")}
        for name, found in train_steps.side_by_side(sizes, self.steps).items():
            low, middle, high = timing.quartiles(found["seconds"])
            figures[name] = {"seconds": middle, "quartiles": [low, high], "peak_bytes": found["peak_bytes"]}
            figures[name]["losses"] = found["losses"]
        return figures


def case(op: Any, length: int, backward: bool) -> Case:
    return Case(op, Shape(1, length, length, 8, 64), backward=backward)


def beside(ours: str, peer: str, batch: int, length: int, limit: float, most: float | None = None) -> Steps:
    """Steps of a contender and its peer; `most` bytes of memory for ours."""
    first, other = f"xformer {ours}", f"Hugging Face {peer}"
    targets = [Target("seconds", first, other, limit)]
    if most is not None:
        targets.append(Target("peak_bytes", first, None, most))
    return Steps({name: (name, batch, length) for name in (first, other)}, targets)


FULL = Full()
BIGBIRD = BigBird(block_size=64, num_random_blocks=3, num_window_blocks=3, num_global_blocks=2)
GB, GIB = 1e9, 2**30
LONG = [
    (name, ATTENTIONS[name].for_length(16384))
    for name in ("window", "bigbird", "longformer", "local", "sparse", "linear", "performer", "retention", "reformer",
                 "nystrom", "topk_blocks")
]  # fmt: skip
LRA = "Long Range Arena"  # its code is not ours to ship; see --extra
ROWS: dict[str, Calls | Steps] = {
    "full_forward": Calls(
        [("xformer", case(FULL, 4096, False))],
        [Target("seconds", "xformer", "torch SDPA", 1.1), Target("seconds", "xformer", "jax.nn", 0.35)],
    ),
    "full_both": Calls(
        [("xformer", case(FULL, 4096, True))],
        [
            Target("seconds", "xformer", "torch SDPA", 1.2),
            Target("seconds", "xformer", "jax.nn", 0.3),
            Target("extra_bytes", "xformer", "jax.nn", 1 / 8),
        ],
        rounds=timing.Rounds(least=4, most=8),
    ),
    "bigbird_forward": Calls(
        [("xformer", case(BIGBIRD, 4096, False)), ("xformer full", case(FULL, 4096, False))],
        [Target("seconds", "xformer", "torch FlexAttention", 1.0)],
    ),
    "bigbird_both": Calls(
        [("xformer", case(BIGBIRD, 4096, True)), ("xformer full", case(FULL, 4096, True))],
        [Target("seconds", "xformer", LRA, 0.5), Target("seconds", "xformer", "Hugging Face BigBird", 1.0)],
    ),
    "bigbird_growth": Calls(
        [
            (f"{length:,} {'both' if backward else 'forward'}", case(BIGBIRD, length, backward))
            for length in (4096, 8192)
            for backward in (False, True)
        ],
        [
            Target(quantity, f"8,192 {mode}", f"4,096 {mode}", 2.2)
            for mode in ("forward", "both")
            for quantity in ("seconds", "extra_bytes")
        ],
        alone=True,
    ),
    "train_full": Steps(
        {name: (name, 1, 4096) for name in ("xformer full", "Hugging Face BERT")},
        [
            Target("seconds", "xformer full", "Hugging Face BERT", 1.0),
            Target("peak_bytes", "xformer full", None, 1.3 * GB),
        ],
    ),
    "train_bigbird": Steps(
        {name: (name, 1, 4096) for name in ("xformer bigbird", "Hugging Face BigBird", "xformer full")},
        [
            Target("seconds", "xformer bigbird", "Hugging Face BigBird", 0.6),
            Target("peak_bytes", "xformer bigbird", None, 1.3 * GB),
        ],
    ),
    "train_short": Steps(
        {name: (name, 4, 1024) for name in ("xformer bigbird", "xformer full", "Hugging Face BigBird")},
        [Target("seconds", "xformer bigbird", "xformer full", 1.0)],
    ),
    "train_longformer": beside("longformer", "Longformer", 1, 4096, 0.4, 1.3 * GIB),
    "train_nystrom": beside("nystrom", "Nystromformer", 1, 4096, 0.9, 1.2 * GIB),
    "train_reformer": beside("reformer", "Reformer", 1, 4096, 0.8),
    "train_decoder": beside("decoder", "GPT-2", 1, 4096, 0.8, 1.3 * GIB),
    "train_decoder_short": beside("decoder", "GPT-2", 4, 1024, 0.9),
    "train_translation": beside("translation", "Marian", 32, 64, 0.8),
    "train_vision": beside("vision", "ViT", 16, 64, 0.8),  # images of 64 x 64
    "train_linear": Steps(
        {f"xformer {name}": (f"xformer {name}", 1, 4096) for name in ("linear", "performer", "full")},
        [
            Target("seconds", "xformer linear", "xformer full", 0.52),
            Target("seconds", "xformer performer", "xformer full", 0.65),
        ],
    ),
    "train_linear_growth": Steps(
        {
            f"{name}, {length:,}": (f"xformer {name}", 1, length)
            for name in ("linear", "performer")
            for length in (4096, 8192)
        },
        [Target("seconds", f"{name}, 8,192", f"{name}, 4,096", 2.1) for name in ("linear", "performer")],
    ),
    "long": Calls(
        [("xformer full", case(FULL, 16384, True)), *((f"xformer {name}", case(op, 16384, True)) for name, op in LONG)],
        [
            target
            for name, _ in LONG
            for target in (
                Target("seconds", f"xformer {name}", "xformer full", 0.35),
                Target("extra_bytes", f"xformer {name}", None, GIB),
            )
        ],
        alone=True,
        rounds=timing.Rounds(least=2, most=3),
    ),
    "bigbird_65536": Calls(
        [("xformer", case(BIGBIRD, 65536, True))],
        [Target("extra_bytes", "xformer", None, 8 * GB)],
        alone=True,
        rounds=timing.Rounds(least=2, most=3),
    ),
    "shaw": Calls(
        [
            ("xformer full+shaw", case(Full(position=Shaw(max_distance=128)), 2048, True)),
            ("xformer full", case(FULL, 2048, True)),
        ],
        [Target("seconds", "xformer full+shaw", "xformer full", 1.3)],
        alone=True,
    ),
    "linformer": Calls(
        [
            ("xformer linformer", case(Linformer(rank=256, max_len=4096), 4096, True)),
            ("xformer full", case(FULL, 4096, True)),
        ],
        [Target("seconds", "xformer linformer", "xformer full", 1.0)],
        alone=True,
    ),
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(name: str, row: dict[str, Any]) -> str:
    """A measured row as text: every contender, then every target."""
    lines = [f"{name} (GEMM: {formatting.si(row['gemm_flops_per_second'], 'FLOP/s')})"]
    for who, figures in row["figures"].items():
        low, high = (formatting.milliseconds(1e3 * value) for value in figures["quartiles"])
        memory = figures.get("extra_bytes", figures.get("peak_bytes")) or math.nan
        kind = "extra" if "extra_bytes" in figures else "peak"
        lines.append(
            f"  {who:24}{formatting.milliseconds(1e3 * figures['seconds']):>10}  ({low} - {high})".ljust(64)
            + f"{formatting.mebibytes(memory):>10} {kind}"
        )
    for one in row["targets"]:
        target = Target(*(one[field.name] for field in dataclasses.fields(Target)))
        verdict = {True: "reached", False: "MISSED", None: "not measured"}[one["reached"]]
        value = formatting.MISSING if one["value"] is None else target.spell(one["value"])
        what = f"{target.quantity}: {target.ours}" + (f" / {target.peer}" if target.peer else "")
        lines.append(f"    {what:60}{value:>10}  <= {target.spell(target.limit)}  {verdict}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", default=",".join(ROWS), help="rows to measure, of " + ", ".join(ROWS))
    parser.add_argument("--extra", type=Path, help="a Python file with more contenders")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON; rows of it that are not measured stay")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--only: got {', '.join(unknown)}, takes {', '.join(ROWS)}")
    try:
        extra = load_extra(options.extra) if options.extra else None
    except ValueError as error:
        parser.error(f"--extra: {error}")
    if not has_torch():
        say("PyTorch or Transformers is not installed, so their figures are left out; see `make bench-peers`")
    rows = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in names:
        say(f"measuring {name}")
        rate = machine.gemm_rate()
        figures = ROWS[name].measure(extra, rate)
        targets = [target.check(figures) for target in ROWS[name].targets]
        rows[name] = {
            "figures": figures, "targets": targets, "gemm_flops_per_second": rate, "dtype": "float32",
            "machine": machine.describe(),
        }  # fmt: skip
        print(table(name, rows[name]), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
