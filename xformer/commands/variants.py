"""What every attention variant can do and what it costs, found by asking the code; and what pairs each one sees.

  xformer variants [--length=4096] [--out=variants.png]

Nothing is written without --out, and nothing is computed but shapes, FLOP counts and, for the picture, patterns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention import ATTENTIONS, POSITIONS, Attention, Full, Shape, build
from xformer.commands import cli, pictures
from xformer.report import patterns, style
from xformer.schema import ConfigError

HEADS, HEAD_DIM = 8, 64
LONGEST = 2**20  # positions of a call whose FLOPs are counted; patterns are listed on the host
PROBED = 64  # positions of the calls that are tried
PICTURED = 128  # positions of the picture
CELLS = 64  # cells on a side of a panel: with fewer, scattered pairs would fill it
COLUMNS = ("variant", "FLOPs", "at twice the length", "causal", "positions", "takes", "decoding keeps")
REFUSED = (ValueError, NotImplementedError)


@dataclasses.dataclass(frozen=True)
class Facts:
    """One variant, with the hyperparameters that `for_length` gives it.

    Attributes:
      name: its name in the table.
      flops: FLOPs of a forward call, as a share of full attention's.
      growth: FLOPs of a call twice as long, with the hyperparameters for that length, as a multiple.
      causal: whether it can be causal.
      positions: the names of the position terms that it takes.
      takes: what a call may give beside a padding mask.
      keeps: what decoding keeps of the tokens so far; empty where it cannot be causal.
    """

    name: str
    flops: float
    growth: float
    causal: bool
    positions: tuple[str, ...]
    takes: tuple[str, ...]
    keeps: str


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--length", type=int, default=4096, help="positions of the call whose FLOPs are counted")
    parser.add_argument("--out", help="a PNG file to draw every variant's pattern in")
    args = parser.parse_args(argv)
    if not 1 <= args.length <= LONGEST:
        raise ConfigError(f"--length: got {args.length}, takes an integer from 1 to {LONGEST}")
    out = parser.picture(args.out)
    print(f"forward call: 1 x {args.length:,} positions, {HEADS} heads of {HEAD_DIM}; FLOPs as a share of full's\n")
    print(table([facts(name, args.length) for name in ATTENTIONS]))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(picture())
        print(f"\npatterns of {PICTURED} positions: {out}")


def facts(name: str, length: int) -> Facts:
    """What the code says of the variant of this name; no array is computed."""
    flops, longer = (_flops(build({"name": name}, size), size) for size in (length, 2 * length))
    small = build({"name": name}, PROBED)
    as_causal = lambda: dataclasses.replace(small, causal=True)
    with_term = lambda term: lambda: build({"name": name, "position": term}, PROBED)
    causal = _can(as_causal)
    return Facts(
        name,
        flops / _flops(Full(), length),
        longer / flops,
        causal,
        tuple(term for term in POSITIONS if term != "none" and _can(with_term(term))),
        tuple(what for what, given in _given().items() if _can(lambda: small, **given)),
        _kept(dataclasses.replace(build({"name": name}, length), causal=True)) if causal else "",
    )


def table(rows: Sequence[Facts]) -> str:
    """The facts as a Markdown table whose columns are aligned."""
    every = len(POSITIONS) - 1
    cells = [COLUMNS, ("---", "---:", "---:", *["---"] * 4)]
    for row in rows:
        positions = "every term" if len(row.positions) == every else ", ".join(row.positions) or "none"
        cells.append(
            (f"`{row.name}`", f"{row.flops:.3f}", f"{row.growth:.2f}×", "yes" if row.causal else "no", positions,
             ", ".join(row.takes) or "padding alone", row.keeps or "–")
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    )


def picture() -> bytes:
    """PNG: the pairs that each variant of the table sees, for random inputs where they depend on these."""
    ops = {name: build({"name": name}, PICTURED) for name in ATTENTIONS}
    image = patterns.picture(
        {name: pictures.pattern(op, PICTURED, 1) for name, op in ops.items()},
        style.LIGHT,
        parts=False,
        most_cells=CELLS,
    )
    assert image is not None  # the table has variants
    return image


def _shape(length: int) -> Shape:
    return Shape(1, length, length, HEADS, HEAD_DIM)


def _flops(op: Attention, length: int) -> int:
    return op.cost(_shape(length)).flops


def _given() -> dict[str, dict[str, Any]]:
    """What a call may give, by the name it has in the table."""
    pairs = jnp.tri(PROBED, dtype=bool)[None, None]
    return {
        "masks by query": {"mask": pairs},
        "bias": {"bias": jnp.zeros(pairs.shape)},
        "segments": {"segment_ids": jnp.arange(PROBED)[None] // 8},
        "dropout": {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0), "deterministic": False},
    }


def _can(make: Callable[[], Attention], new: int = PROBED, **given: Any) -> bool:
    """Whether an op can be made, and a call of so many queries with what is given is not refused."""
    try:
        op = make()
        params = jax.eval_shape(lambda: op.init(jax.random.key(0), _shape(PROBED)))
        x = jax.ShapeDtypeStruct((1, PROBED, HEADS, HEAD_DIM), jnp.float32)
        if op.reads_trees:
            given |= {"paths": (jnp.ones((1, new, 1), jnp.int32), jnp.ones((1, PROBED, 1), jnp.int32))}
        jax.eval_shape(lambda x, params: op(x[:, :new], x, x, params=params, **given), x, params)
    except REFUSED:
        return False
    return True


def _kept(op: Attention) -> str:
    state = jax.eval_shape(lambda: op.decode_state(_shape(1), jnp.float32))
    if state is not None:
        size = sum(leaf.size for leaf in jax.tree.leaves(state))
        return f"a state of {size // HEADS:,} numbers a head"
    if (block := op.own_block()) is not None:
        return f"{block:,} keys"
    if (back := op.lookback()) is not None:
        return f"{back:,} keys"
    return "every key" if _can(lambda: op, new=1, query_offset=PROBED - 1) else "cannot"
