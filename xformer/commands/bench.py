"""Time and memory of attention against length, every variant beside its peers.

  xformer bench --attention=full,linformer,bigbird --lengths=1024,4096 --out=bench.json

A variant is full, window, bigbird, linformer, a position with full attention (shaw, music, t5, alibi, rotary), causal,
or several joined: bigbird+shaw, window+causal. All of a length run in one process and take turns. Peers that compute a
variant are measured beside it: JAX's own always, those of PyTorch and Transformers where both are installed (`make
bench-peers` makes such an environment). Writes the numbers as JSON, a picture beside it and a table to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from xformer import presets
from xformer.attention import Attention, Shape, build
from xformer.bench import benchmark, jax_contenders, machine, memory, peers, timing
from xformer.bench.contender import Case, Contender, Ready
from xformer.commands import cli
from xformer.extras import MissingExtra
from xformer.report import speed
from xformer.schema import ConfigError
from xformer.train import workdir as folders

MODES = ("forward", "forward_backward")
GPU_KERNELS = ("pallas", "cudnn")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure; `memory` in bytes and `call_seconds` bound what a single call may take."""

    variants: Sequence[str]
    lengths: Sequence[int]
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    block_size: int = 64
    rank: int = 256
    memory: float = math.inf
    call_seconds: float = math.inf
    rounds: timing.Rounds = timing.Rounds()  # noqa: RUF009
    peers: Callable[[Case], Sequence[Contender]] = peers.peers

    def op(self, variant: str, length: int) -> Attention:
        """The variant as it is built for this length.

        Raises:
          ValueError, NotImplementedError: there is no such variant, or none at this length.
        """
        parts = [part for part in variant.split("+") if part != "causal"]
        section = presets.attention(
            "+".join(parts) or "full",
            window={"left": self.block_size, "right": self.block_size},
            bigbird={"block_size": self.block_size},
            linformer={"rank": self.rank},
            shaw={"max_distance": self.block_size},
        )
        op = build(section, length)
        return dataclasses.replace(op, causal="causal" in variant.split("+"))

    def contenders(self, case: Case) -> Iterator[Contender]:
        yield jax_contenders.ours()
        if jax.default_backend() == "gpu":
            for kernel in GPU_KERNELS:
                yield jax_contenders.ours(f"{speed.OURS} {kernel}", kernel)
        yield from self.peers(case)


def measure(plan: Plan, say: Callable[[str], None], done: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures the shortest length first; `done` gets all that there is after each length.

    Returns what the JSON holds: the machine, the sizes, and a row for each (variant, contender, length, mode), which
    has either figures or `skipped`, the reason.
    """
    rate = machine.gemm_rate(plan.dtype)
    rows: list[Row] = []
    sizes = {name: getattr(plan, name) for name in ("batch", "heads", "head_dim", "dtype", "block_size", "rank")}
    result = {"machine": machine.describe(), **sizes, "gemm_flops_per_second": rate, "rows": rows}
    for length in sorted(plan.lengths):
        for mode in MODES:
            say(f"{length:,} tokens, {mode.replace('_', ' + ')}")
            rows += _in_turn(plan, length, mode, rows, rate, say)
        done(result)
    return result


def _in_turn(
    plan: Plan, length: int, mode: str, before: Sequence[Row], rate: float, say: Callable[[str], None]
) -> list[Row]:
    rows: dict[tuple[str, str], Row] = {}
    ready: dict[tuple[str, str], Ready] = {}
    shape = Shape(plan.batch, length, length, plan.heads, plan.head_dim)
    for variant in plan.variants:
        try:
            case = Case(plan.op(variant, length), shape, plan.dtype, backward=mode == "forward_backward")
            check = functools.partial(_check, plan, [row for row in before if _is(row, variant, mode)])
            found, skipped = benchmark.prepare(plan.contenders(case), case, check)
        except (ValueError, NotImplementedError) as error:
            found, skipped = {}, {speed.OURS: str(error)}
        ready |= {(variant, name): one for name, one in found.items()}
        for name in [*found, *skipped]:
            rows[variant, name] = {"variant": variant, "contender": name, "length": length, "mode": mode}
        for name, reason in skipped.items():
            rows[variant, name] |= {"skipped": reason}
            say(f"  {variant}, {name}: skipped, {reason}")
    for key, figures in benchmark.measure(ready, plan.rounds, rate).items():
        rows[key] |= figures
    return list(rows.values())


def _is(row: Row, variant: str, mode: str) -> bool:
    return row["variant"] == variant and row["mode"] == mode and "seconds" in row


def _check(plan: Plan, shorter: Sequence[Row], name: str, ready: Ready) -> None:
    """NotImplementedError where a call would take more memory or time than the plan allows."""
    if ready.needs > plan.memory:
        raise NotImplementedError(
            f"would take {ready.needs / 1e9:,.3g} GB, above the {plan.memory / 1e9:,.3g} GB of --memory_gb"
        )
    same = [row for row in shorter if row["contender"] == name]
    if same and same[-1]["flops"]:
        seconds = same[-1]["seconds"] * ready.flops / same[-1]["flops"]
        if seconds > plan.call_seconds:
            raise NotImplementedError(
                f"would take about {seconds:,.0f} s a call, above the {plan.call_seconds:g} s of --call_seconds"
            )


def parse(argv: Sequence[str]) -> tuple[Plan, Path]:
    """The plan and the file to write. ConfigError for a flag that can't be used."""
    parser = cli.Parser(__doc__ or "")
    parser.add_argument("--attention", default="full,window,linformer,bigbird", help="variants, comma-separated")
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="tokens, comma-separated; 65536 is possible")
    parser.add_argument("--out", default="bench.json", help="the JSON file; the picture is written beside it")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--heads", default="8")
    parser.add_argument("--head_dim", default="64")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--block_size", default="64", help="of BigBird; also the window's reach to each side")
    parser.add_argument("--rank", default="256", help="of Linformer")
    parser.add_argument("--peers", default="auto", choices=("auto", "none"), help="auto: every peer that is installed")
    parser.add_argument("--extra", help="a Python file with more peers: contenders(case) -> list of Contender")
    parser.add_argument("--rounds", default="9", help="turns that each contender takes")
    parser.add_argument("--memory_gb", help="skip calls that need more; default: three quarters of what is free")
    parser.add_argument("--call_seconds", default="30", help="skip calls that are expected to take longer")
    args, overrides = parser.parse(argv)
    if overrides:
        raise ConfigError(f"--config.{overrides[0]}: bench takes no config")
    rounds = _number("--rounds", args.rounds, int)
    free = 0.75 * memory.available_memory()
    plan = Plan(
        variants=_listed("--attention", args.attention),
        lengths=[_number("--lengths", length, int) for length in _listed("--lengths", args.lengths)],
        **{name: _number(f"--{name}", getattr(args, name), int) for name in ("batch", "heads", "head_dim")},
        **{name: _number(f"--{name}", getattr(args, name), int) for name in ("block_size", "rank")},
        dtype=args.dtype,
        memory=free if args.memory_gb is None else 1e9 * _number("--memory_gb", args.memory_gb, float),
        call_seconds=_number("--call_seconds", args.call_seconds, float),
        rounds=timing.Rounds(min(3, rounds), rounds, seconds=30.0),
        peers=_peers(args),
    )
    for variant in plan.variants:
        try:
            plan.op(variant, max(plan.lengths))
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"--attention: got {variant!r}: {error}") from None
    out = Path(args.out)
    parser.folder("--out", str(out.parent))
    if out.suffix != ".json" or out.is_dir():
        raise ConfigError(f"--out: got {args.out!r}, takes a file that ends in .json")
    return plan, out


def _peers(args: argparse.Namespace) -> Callable[[Case], Sequence[Contender]]:
    try:
        extra = peers.load_extra(Path(args.extra)) if args.extra is not None else None
    except ValueError as error:
        raise ConfigError(f"--extra: {error}") from None
    if args.peers == "none":
        return lambda case: list(extra(case)) if extra else []
    return lambda case: peers.peers(case, extra)


def _listed(flag: str, value: str) -> list[str]:
    found = list(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not found:
        raise ConfigError(f"{flag}: got {value!r}, takes names or numbers separated by commas")
    return found


def _number(flag: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        number = kind(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{flag}: got {value!r}, takes a positive {'integer' if kind is int else 'number'}")
    return number


def command(argv: Sequence[str]) -> None:
    """The command."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # on a GPU, PyTorch needs room too
    plan, out = parse(argv)
    out.parent.mkdir(parents=True, exist_ok=True)
    say = lambda line: print(line, file=sys.stderr, flush=True)
    if not peers.has_torch():
        say("PyTorch or Transformers is not installed: their peers are left out")
    try:
        result = measure(plan, say, lambda result: folders.write_json(out, result))
    except KeyboardInterrupt:
        raise cli.CommandFailed(f"interrupted; the lengths that were finished are in {out}") from None
    try:
        picture = speed.picture(result)
    except MissingExtra as error:
        picture = None
        say(f"no picture: {error}")
    if picture is not None:
        folders.write_bytes(out.with_suffix(".png"), picture)
    print(speed.table(result))
