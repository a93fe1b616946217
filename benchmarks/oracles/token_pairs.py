"""local-attention, and x-transformers' full attention with its position terms."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from local_attention import LocalAttention
from x_transformers.attend import Attend
from x_transformers.x_transformers import (
    AlibiPositionalBias,
    RelativePositionBias,
    RotaryEmbedding,
    apply_rotary_pos_emb,
)

from benchmarks.oracles.comparison import Comparison, Difference, Run, arrays, heads_first, lengths, padding
from xformer.attention import ALiBi, BigBird, Full, Local, Rotary, T5Bias, Window

BATCH, LENGTH, HEADS, DEPTH, BLOCK = 2, 29, 4, 8, 8
SHAPE = (BATCH, LENGTH, HEADS, DEPTH)
QKV = arrays(20, query=SHAPE, key=SHAPE, value=SHAPE)
FLOAT32 = 1e-6  # x-transformers' softmax, and the tables of angles of both, are in float32


def comparisons() -> list[Comparison]:
    return [local(), window(), blocks(), full(), t5(), alibi(), rotary()]


def three(given: dict[str, Any], first: bool = False) -> list[Any]:
    """Query, key and value; with `first`, heads before the length."""
    return [heads_first(given[name]) if first else given[name] for name in ("query", "key", "value")]


def local_attention(given: dict[str, torch.Tensor], real: np.ndarray | None, **options: Any) -> torch.Tensor:
    """LocalAttention over every head, heads after the length again; float64 throughout."""
    layer = LocalAttention(window_size=BLOCK, autopad=True, **options).double()
    mask = None if real is None else torch.tensor(real)
    return heads_first(layer(*three(given, first=True), mask=mask))


def local() -> Comparison:
    real = lengths(LENGTH, 29, 18)
    options: dict[str, Any] = {"look_backward": 0, "look_forward": 0}
    shown = Difference(
        "the zeros that fill its last window are attended where no mask is given; ours never attends to what it adds",
        "Tay et al. 2021, section 3.3, has no padding; a softmax is over the block's tokens",
        "ours",
    )
    op = Local(block_size=BLOCK)
    return Comparison(
        "local", "local-attention", "LocalAttention",
        (
            Run(
                "29 and 18 of 29 tokens real", QKV, lambda given: op(*three(given), mask=padding(real)),
                lambda given: local_attention(given, real, **options), real,
            ),
            Run(
                "causal, all tokens real", QKV, lambda given: op(*three(given), is_causal=True),
                lambda given: local_attention(given, None, causal=True, look_backward=0),
            ),
            Run(
                "29 tokens and no mask", QKV, lambda given: op(*three(given)),
                lambda given: local_attention(given, None, **options), None, (shown,),
            ),
        ),
    )  # fmt: skip


def window() -> Comparison:
    real, exact = lengths(LENGTH, 29, 18), {"exact_windowsize": True}
    turned = Difference(
        "with keys on both sides its queries turn as if they stood in the last of the blocks they look at, a block "
        "too far from every key; ours turns by each token's own position",
        "Su et al. 2021, equation 11: the product depends on m - n, 0 at the token itself",
        "ours",
    )
    causal = Window(left=BLOCK, right=0, causal=True)
    with_rotary = lambda op: lambda given: op(*three(given), mask=padding(real))
    return Comparison(
        "window", "local-attention", "LocalAttention(exact_windowsize=True)",
        (
            Run(
                "8 keys to the left, causal", QKV, with_rotary(causal),
                lambda given: local_attention(given, real, causal=True, **exact), real,
            ),
            Run(
                "8 keys to each side", QKV, with_rotary(Window(BLOCK, BLOCK)),
                lambda given: local_attention(given, real, **exact), real,
            ),
            Run(
                "8 keys to the left, causal, with Rotary", QKV,
                with_rotary(Window(left=BLOCK, right=0, causal=True, position=Rotary())),
                lambda given: local_attention(given, real, causal=True, dim=DEPTH, **exact), real, tolerance=FLOAT32,
            ),
            Run(
                "8 keys to each side, with Rotary", QKV, with_rotary(Window(BLOCK, BLOCK, position=Rotary())),
                lambda given: local_attention(given, real, dim=DEPTH, **exact), real, (turned,),
            ),
        ),
    )  # fmt: skip


def blocks() -> Comparison:
    real = lengths(LENGTH, 29, 18)
    op = BigBird(block_size=BLOCK, num_random_blocks=0, num_window_blocks=3, num_global_blocks=0)
    return Comparison(
        "bigbird", "local-attention", "LocalAttention(look_backward=1, look_forward=1)",
        (
            Run(
                "a window of 3 blocks and nothing else", QKV, lambda given: op(*three(given), mask=padding(real)),
                lambda given: local_attention(given, real), real,
            ),
        ),
    )  # fmt: skip


def attend(given: dict[str, torch.Tensor], real: np.ndarray | None = None, bias: Any = None, **options: Any) -> Any:
    """x-transformers' Attend, heads after the length again."""
    layer = Attend(heads=HEADS, **options).double()
    mask = None if real is None else torch.tensor(real)[:, None, None]
    return heads_first(layer(*three(given, first=True), mask=mask, attn_bias=bias)[0])


def full() -> Comparison:
    real, shared = lengths(LENGTH, 29, 18), (BATCH, LENGTH, 2, DEPTH)
    grouped = arrays(21, query=SHAPE, key=shared, value=shared)
    sinks = QKV | arrays(22, sinks=(HEADS,))

    def with_sink(given: dict[str, torch.Tensor]) -> torch.Tensor:
        layer = Attend(heads=HEADS, head_learned_sink=True).double()
        params = {"head_attn_sink": given["sinks"]}
        return heads_first(torch.func.functional_call(layer, params, tuple(three(given, first=True)))[0])

    def interleaved(given: dict[str, Any]) -> Any:
        """Ours with query heads in its order: head h reads key head h modulo 2."""
        order = np.array([0, 2, 1, 3])
        return Full()(given["query"][:, :, order], given["key"], given["value"])[:, :, np.argsort(order)]

    spread = Difference(
        "query head h reads key head h modulo their number; ours reads h // group, so that a group stands side by side",
        "Ainslie et al. 2023, section 2.2: query heads are divided into groups, each sharing a key head; no line on "
        "order",
        "open",
        "Flax's, JAX's and Transformers' own attention have groups side by side",
    )
    plain = lambda given: Full()(*three(given))
    return Comparison(
        "full", "x-transformers", "Attend",
        (
            Run(
                "29 and 18 of 29 tokens real", QKV, lambda given: Full()(*three(given), mask=padding(real)),
                lambda given: attend(given, real), real, tolerance=FLOAT32,
            ),
            Run("causal", QKV, lambda given: Full()(*three(given), is_causal=True),
                lambda given: attend(given, causal=True), tolerance=FLOAT32),
            Run(
                "soft cap of 2", QKV, lambda given: Full()(*three(given), softcap=2.0),
                lambda given: attend(given, softclamp_logits=True, logit_softclamp_value=2.0),
                tolerance=FLOAT32,
            ),
            Run("a sink for each head", sinks, lambda given: Full()(*three(given), sinks=given["sinks"]), with_sink,
                tolerance=FLOAT32),
            Run("4 query heads, 2 key heads", grouped, plain, attend, None, (spread,)),
            Run("the same, our query heads in its order", grouped, interleaved, attend, tolerance=FLOAT32),
        ),
    )  # fmt: skip


def t5() -> Comparison:
    buckets, farthest = 8, 20
    inputs = QKV | arrays(23, table=(buckets, HEADS))

    def ours(given: dict[str, Any], causal: bool) -> Any:
        op = Full(causal=causal, position=T5Bias(num_buckets=buckets, max_distance=farthest))
        return op(*three(given), params={"position": {"bias": given["table"].T}})

    def theirs(given: dict[str, torch.Tensor], causal: bool) -> torch.Tensor:
        term = RelativePositionBias(1.0, causal=causal, num_buckets=buckets, max_distance=farthest, heads=HEADS)
        params = {"relative_attention_bias.weight": given["table"]}
        bias = torch.func.functional_call(term, params, (LENGTH, LENGTH))
        return attend(given, bias=bias, causal=causal)

    return Comparison(
        "t5", "x-transformers", "RelativePositionBias",
        tuple(
            Run("causal" if causal else "bidirectional", inputs, lambda given, causal=causal: ours(given, causal),
                lambda given, causal=causal: theirs(given, causal), tolerance=FLOAT32)
            for causal in (False, True)
        ),
    )  # fmt: skip


def alibi() -> Comparison:
    term = AlibiPositionalBias(HEADS)
    return Comparison(
        "alibi", "x-transformers", "AlibiPositionalBias",
        tuple(
            Run("causal" if causal else "bidirectional", QKV,
                lambda given, causal=causal: Full(causal=causal, position=ALiBi())(*three(given)),
                lambda given, causal=causal: attend(given, bias=term(LENGTH, LENGTH), causal=causal),
                tolerance=FLOAT32)
            for causal in (False, True)
        ),
    )  # fmt: skip


def rotary() -> Comparison:
    angles = RotaryEmbedding(DEPTH).forward_from_seq_len(LENGTH)[0]
    # Its pairs are neighbours, ours stand half a head apart: the same rotations of dimensions in another order.
    halves = np.concatenate([np.arange(0, DEPTH, 2), np.arange(1, DEPTH, 2)])

    def theirs(given: dict[str, torch.Tensor]) -> torch.Tensor:
        query, key = (heads_first(apply_rotary_pos_emb(heads_first(given[x]), angles)) for x in ("query", "key"))
        return attend(given | {"query": query, "key": key})

    def ours(given: dict[str, Any], order: np.ndarray) -> Any:
        query, key, value = three(given)
        return Full(position=Rotary())(query[..., order], key[..., order], jnp.asarray(value))

    pairs = Difference(
        "dimensions 2i and 2i + 1 turn together; in ours i and i + head_dim / 2",
        "Su et al. 2021, equation 15: neighbouring dimensions",
        "theirs",
        "the order of GPT-NeoX and LLaMA, whose weights are loaded; the same family of functions, since the "
        "projections before it are learned",
    )
    return Comparison(
        "rotary", "x-transformers", "RotaryEmbedding",
        (
            Run("as they are", QKV, lambda given: ours(given, np.arange(DEPTH)), theirs, None, (pairs,)),
            Run("dimensions of ours reordered", QKV, lambda given: ours(given, halves), theirs, tolerance=FLOAT32),
        ),
    )  # fmt: skip
