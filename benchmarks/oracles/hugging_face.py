"""Transformers: its Longformer, BigBird and Nystromformer self-attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import BigBirdConfig, LongformerConfig, NystromformerConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from benchmarks.oracles.comparison import (
    Comparison,
    Difference,
    Run,
    arrays,
    call,
    lengths,
    padding,
    projected,
    weights_of,
)
from xformer.attention import BigBird, Longformer, Nystrom
from xformer.nn import MultiHeadAttention

HEADS, WIDTH = 2, 16
PACKAGE = "transformers"
FLOAT32 = 1e-6  # the softmax of its Longformer is in float32 whatever it is given
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "attention_probs_dropout_prob": 0.0}


def comparisons() -> list[Comparison]:
    return [longformer(), bigbird(), nystrom()]


def three(inputs: Mapping[str, Any], *names: str) -> list[Any]:
    """Query, key and value."""
    return [projected(inputs, name, HEADS) for name in (names or ("query", "key", "value"))]


def longformer() -> Comparison:
    length, window = 24, 8
    layer = LongformerSelfAttention(LongformerConfig(**SIZES, attention_window=[window]), 0).double().eval()
    real = lengths(length, 21, 22)  # every window has a real token: without one its softmax, in float32, is NaN
    chosen = np.zeros((2, length), bool)
    chosen[0, [0, 9]] = chosen[1, [5, 17]] = True
    inputs = arrays(0, x=(2, length, WIDTH)) | weights_of(layer, 1, "query_global", "key_global", "value_global")

    def theirs(given: dict[str, torch.Tensor], chosen: np.ndarray, shared: bool = True) -> torch.Tensor:
        kind = torch.tensor(np.where(chosen, 1e4, np.where(real, 0.0, -1e4)))
        if shared:
            given = given | {f"{name}_global{end}": x for name, end, x in _split_names(given)}
        options = {"is_index_masked": kind < 0, "is_index_global_attn": kind > 0, "is_global_attn": bool(chosen.any())}
        return call(layer, given, given["x"], kind, **options)[0]

    def ours(given: dict[str, Any], chosen: np.ndarray | None = None, cut: int = length) -> Any:
        op = Longformer(window=window, num_global_tokens=0)
        query, key, value = (x[:, :cut] for x in three(given))
        tokens = None if chosen is None else jnp.asarray(chosen[:, :cut])
        out = op(query, key, value, mask=padding(real[:, :cut]), global_tokens=tokens)
        return jnp.pad(out, [(0, 0), (0, length - cut), (0, 0), (0, 0)])

    def layer_of_ours(given: dict[str, Any], chosen: np.ndarray) -> Any:
        """Our layer with its weights; behind attention stands the identity, as it has nothing there."""
        made = MultiHeadAttention(
            HEADS, WIDTH, attention_fn=Longformer(window=window, num_global_tokens=0), global_projections=True,
            dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0),
        )  # fmt: skip
        for name in ("query", "key", "value"):
            for one, its in ((getattr(made, name), name), (getattr(made.of_global, name), f"{name}_global")):
                one.kernel[...] = given[f"{its}.weight"].T.reshape(WIDTH, HEADS, -1)
                one.bias[...] = given[f"{its}.bias"].reshape(HEADS, -1)
        made.out.kernel[...] = jnp.eye(WIDTH).reshape(HEADS, -1, WIDTH)
        return made(given["x"], jnp.asarray(real), global_tokens=jnp.asarray(chosen))

    none = np.zeros_like(chosen)
    own = arrays(0, x=(2, length, WIDTH)) | weights_of(layer, 1)
    return Comparison(
        "longformer", PACKAGE, "LongformerSelfAttention",
        (
            Run(
                "a window, 21 and 22 real tokens; theirs padded to 24, a multiple of the window; ours to 22",
                inputs, lambda given: ours(given, cut=22), lambda given: theirs(given, none), real,
                tolerance=FLOAT32,
            ),
            Run(
                "global tokens that differ by example, their projections those of the other tokens",
                inputs, lambda given: ours(given, chosen), lambda given: theirs(given, chosen), real,
                tolerance=FLOAT32,
            ),
            Run(
                "global tokens with projections of their own; our layer's global_projections=True",
                own, lambda given: layer_of_ours(given, chosen), lambda given: theirs(given, chosen, shared=False),
                real, tolerance=FLOAT32,
            ),
        ),
        (
            Difference(
                "a length must be a multiple of the window, and there is no dilation; ours takes any length, and a "
                "dilation for each head",
                "Beltagy et al. 2020, section 3.1, dilated sliding window",
                "ours",
            ),
        ),
    )  # fmt: skip


def _split_names(given: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    names = [(name, *name.split(".")) for name in given if "." in name]
    return [(first, f".{end}", given[name]) for name, first, end in names]


def bigbird() -> Comparison:
    length, size, drawn = 64, 4, 3
    real = lengths(length, 61, 46)
    config = BigBirdConfig(**SIZES, block_size=size, num_random_blocks=drawn, max_position_embeddings=length)
    layer = BigBirdBlockSparseAttention(config, seed=0).double()
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.tensor(real, dtype=torch.float64), size)
    blocked, band, rows, columns = masks
    op = BigBird(block_size=size, num_random_blocks=drawn, num_window_blocks=3, num_global_blocks=2)
    blocks = np.asarray(dataclasses.replace(op, block_size=1).pattern(length // size, length // size, HEADS))
    seen = np.asarray(dataclasses.replace(op, block_size=1, num_random_blocks=0).pattern(*blocks.shape[1:], HEADS))
    table = [[np.flatnonzero(row) for row in head[1:-1]] for head in blocks & ~seen]
    inputs = arrays(2, x=(2, length, WIDTH)) | weights_of(layer, 3)

    def theirs(given: dict[str, torch.Tensor], training: bool) -> torch.Tensor:
        layer.train(training)
        return call(layer, given, given["x"], band, rows, columns, blocked, blocked)[0]

    def with_our_blocks(given: dict[str, torch.Tensor]) -> torch.Tensor:
        draw, layer._bigbird_block_rand_mask_with_head = (
            layer._bigbird_block_rand_mask_with_head, lambda **sizes: np.array(table),
        )  # fmt: skip
        try:
            return theirs(given, training=True)
        finally:
            layer._bigbird_block_rand_mask_with_head = draw

    def first_block_counted_again(given: dict[str, Any]) -> Any:
        again = np.zeros((1, 1, length, length))
        again[:, :, size:-size, :size] = np.log(1 + drawn)
        window = dataclasses.replace(op, num_random_blocks=0)
        return window(*three(given), jnp.asarray(again), padding(real))

    ours = lambda given: op(*three(given), mask=padding(real))
    not_random = Difference(
        "in evaluation every random block is the first block, which so counts four times in the softmax; ours are the "
        "same in training and evaluation",
        "Zaheer et al. 2020, section 2: each query attends over r random keys; a set of keys, each once",
        "ours",
    )
    return Comparison(
        "bigbird", PACKAGE, "BigBirdBlockSparseAttention",
        (
            Run("our random blocks given to it; 61 and 46 of 64 tokens real", inputs, ours, with_our_blocks, real),
            Run(
                "in evaluation, as it ships", inputs, ours, lambda given: theirs(given, False), real, (not_random,)
            ),
            Run(
                "in evaluation; ours without random blocks and the first one counted four times",
                inputs, first_block_counted_again, lambda given: theirs(given, False), real,
            ),
        ),
        (
            Difference(
                "at 1,024, 3,072 and 4,096 tokens random blocks are drawn from the first 1,024 tokens; ours from all",
                "Zaheer et al. 2020, section 2: random keys of the whole sequence",
                "ours",
            ),
            Difference(
                "lengths are multiples of the block; ours takes any, and pads inside", "the paper is silent", "open"
            ),
        ),
    )  # fmt: skip


def nystrom() -> Comparison:
    length, landmarks, width = 48, 8, 5
    config = NystromformerConfig(**SIZES, num_landmarks=landmarks, segment_means_seq_len=length, conv_kernel_size=width)
    layer = NystromformerSelfAttention(config).double().eval()
    inputs = arrays(4, x=(2, length, WIDTH)) | weights_of(layer, 5)
    real = lengths(length, 48, 29)
    op = Nystrom(num_landmarks=landmarks, conv_size=width)

    def theirs(given: dict[str, torch.Tensor], start: str, masked: bool = False) -> torch.Tensor:
        layer.init_option = start
        mask = torch.tensor(np.where(real, 0.0, np.finfo(np.float64).min))[:, None, None] if masked else None
        return call(layer, given, given["x"], mask)[0]

    def ours(given: dict[str, Any], masked: bool = False) -> Any:
        kernel = given["conv.weight"][:, 0, :, 0]
        return op(*three(given), mask=padding(real) if masked else None, params={"conv": kernel})

    shared_start = Difference(
        "the pseudo-inverse starts from one number for the whole batch; ours from one for each example and head, so "
        "that no example depends on its neighbours",
        "Xiong et al. 2021, section 3 and algorithm 1: Z_0 = A^T / (|A|_1 |A|_inf), of the matrix that is inverted",
        "ours",
    )
    padded = Difference(
        "padding takes part in the landmarks, its keys' and queries' means, and in the convolution; only what the "
        "landmarks see is masked. Ours shares out the real tokens",
        "Xiong et al. 2021, section 3: landmarks are means of segments of the n tokens of the input; none on padding",
        "ours",
    )
    return Comparison(
        "nystrom", PACKAGE, "NystromformerSelfAttention",
        (
            Run("as it ships, a batch of 2", inputs, ours, lambda given: theirs(given, "original"), None,
                (shared_start,)),
            Run("start of each example and head (its init_option)", inputs, ours, lambda given: theirs(given, "exact")),
            Run(
                "48 and 29 of 48 tokens real, start of each example",
                inputs, lambda given: ours(given, True), lambda given: theirs(given, "exact", True), real, (padded,),
            ),
        ),
        (
            Difference(
                "one length, a multiple of the landmarks, fixed when the layer is made; ours takes any",
                "Xiong et al. 2021, section 3: n is a multiple of m, with padding if it is not", "ours",
            ),
        ),
    )  # fmt: skip
