"""A training step piece by piece, each set against the time of its own matrix products.

    python -m benchmarks.step                                  # all pieces at the size `small`
    python -m benchmarks.step --size=wide --only=step,block    # some: names, or how they begin
    python -m benchmarks.step --against=../other_checkout      # and those of another commit, in turn
    python -m benchmarks.step --devices=1,2                    # on one and on two virtual CPU devices, in turn

A piece's product time is its counted FLOPs at the rate of one large matrix product measured in the same run. Pieces
are forward and backward together; `step` is the runner's whole step. Contenders are processes that take turns, call by
call. With --out the figures are written as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.step_pieces import PIECES, SIZES
from xformer.bench import timing
from xformer.report import formatting

SERVER = Path(__file__).parent / "step_pieces.py"
HERE = Path(__file__).parent.parent
DEVICES = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A checkout of this repository and the number of CPU devices that JAX is to see."""

    name: str
    checkout: Path
    devices: int


class Server:
    """A process that has the pieces of a contender set up."""

    def __init__(self, contender: Contender, size: str, pieces: Sequence[str]) -> None:
        flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICES)]
        environment = {
            "PYTHONPATH": str(contender.checkout.resolve()),
            "XLA_FLAGS": " ".join([*flags, f"{DEVICES}={contender.devices}"]),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), size, ",".join(pieces)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment,
        )  # fmt: skip
        try:
            self.known = json.loads(self._answer())
        except BaseException:
            self.close()
            raise

    def run(self, piece: str) -> float:
        """One call of a piece, its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{piece}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the pieces ended with exit code {self._process.wait()}")
        return line

    def close(self) -> None:
        with self._process:  # closes its pipes and waits
            self._process.kill()


def measure(
    contenders: Sequence[Contender], size: str, pieces: Sequence[str], rounds: timing.Rounds
) -> dict[str, dict[str, Any]]:
    """Figures of each contender: `pieces`, `startup` in seconds, `machine`."""
    servers: dict[str, Server] = {}
    try:
        for one in contenders:
            servers[one.name] = Server(one, size, pieces)
        calls = {
            (name, piece): timing.Call(lambda server=server, piece=piece: server.run(piece), wait=lambda out: out)
            for piece in pieces
            for name, server in servers.items()
        }
        times = timing.in_turn(calls, rounds)
        return {name: figures(server.known, {p: times[name, p] for p in pieces}) for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.close()


def figures(known: dict[str, Any], times: dict[str, list[float]]) -> dict[str, Any]:
    """What is written of a contender: of each piece its seconds, product time and their ratio."""
    rate = known["flops"]["gemm"] / min(times["gemm"])
    found: dict[str, Any] = {}
    for piece, seconds in times.items():
        low, middle, high = timing.quartiles(seconds)
        products = known["flops"][piece] / rate
        found[piece] = {
            "seconds": middle, "quartiles": [low, high], "least": min(seconds), "flops": known["flops"][piece],
            "product_seconds": products, "ratio": middle / products if products else None,
            "planned_bytes": known["planned_bytes"].get(piece),
        }  # fmt: skip
    return {
        "pieces": found,
        "gemm_flops_per_second": rate,
        "startup": known["startup"],
        "machine": known["machine"],
    }


def table(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The figures as lines of text; ratios of a piece are to its product time and to the first contender's time."""
    first = next(iter(found.values()))
    for name, one in found.items():
        spelt = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in one["startup"].items())
        yield f"{name}: GEMM {formatting.si(one['gemm_flops_per_second'], 'FLOP/s')}; start-up: {spelt}"
        yield f"  {'piece':<22}{'median':>10}{'least':>10}{'products':>10}{'ratio':>7}{'of first':>9}{'planned':>10}"
        for piece, row in one["pieces"].items():
            ratio = formatting.MISSING if row["ratio"] is None else f"{row['ratio']:.1f}"
            against = row["seconds"] / first["pieces"][piece]["seconds"]
            spans = [formatting.milliseconds(1e3 * row[key]) for key in ("seconds", "least", "product_seconds")]
            memory = formatting.mebibytes(row["planned_bytes"]) if row["planned_bytes"] else ""
            yield f"  {piece:<22}" + "".join(f"{x:>10}" for x in spans) + f"{ratio:>7}{against:>9.2f}{memory:>10}"


def chosen(only: str) -> list[str]:
    """The pieces whose names begin with one of the given; `gemm`, the measure of the others, always. ValueError."""
    starts = [start.strip() for start in only.split(",") if start.strip()]
    for start in starts:
        if not any(piece.startswith(start) for piece in PIECES):
            raise ValueError(f"no piece begins with {start!r}; there are {', '.join(PIECES)}")
    return [piece for piece in PIECES if piece == "gemm" or not starts or piece.startswith(tuple(starts))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--only", default="", help="pieces, or how their names begin, of " + ", ".join(PIECES))
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--devices", default="1", help="virtual CPU devices to try, as 1,2")
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long to measure")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    try:
        pieces = chosen(options.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    checkouts = {"here": HERE} | ({"against": options.against} if options.against else {})
    contenders = [
        Contender(f"{name}, devices: {number}", checkout, int(number))
        for number in options.devices.split(",")
        for name, checkout in checkouts.items()
    ]
    rounds = timing.Rounds(least=5, most=40, seconds=options.seconds, turn_seconds=0.01)
    found = measure(contenders, options.size, pieces, rounds)
    print("\n".join(table(found)))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"size": options.size, "contenders": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
