"""linformer, nystrom-attention and memory-compressed-attention: keys and values made fewer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from linformer.linformer import LinformerSelfAttention
from memory_compressed_attention import MemoryCompressedAttention
from nystrom_attention import NystromAttention

from benchmarks.oracles.comparison import (
    Comparison,
    Difference,
    Run,
    arrays,
    call,
    heads_first,
    lengths,
    padding,
    projected,
    weights_of,
)
from xformer.attention import Compressed, Linformer, Nystrom

HEADS, WIDTH = 2, 16


def comparisons() -> list[Comparison]:
    return [linformer(), nystrom(), compressed()]


def joined(out: Any, inputs: dict[str, Any], name: str) -> Any:
    """Heads `[batch, length, heads, depth]` through PyTorch's linear layer `name`."""
    out = out.reshape(*out.shape[:2], -1) @ inputs[f"{name}.weight"].T
    return out + inputs[f"{name}.bias"] if f"{name}.bias" in inputs else out


def linformer() -> Comparison:
    longest, length, rank = 48, 37, 6
    x, real = arrays(30, x=(2, length, WIDTH)), lengths(length, 37, 22)
    layers = {shared: LinformerSelfAttention(WIDTH, longest, rank, HEADS, share_kv=shared) for shared in (False, True)}

    def ours(given: dict[str, Any], shared: bool, value: str, real: np.ndarray | None = None) -> Any:
        op = Linformer(rank=rank, max_len=longest, sharing="key_value" if shared else "headwise")
        names = {"shared": "proj_k"} if shared else {"key": "proj_k", "value": "proj_v"}
        params = {name: given[theirs].T[None] for name, theirs in names.items()}
        query, key, value = (projected(given, name, HEADS) for name in ("to_q", "to_k", value))
        mask = None if real is None else padding(real)
        return joined(op(query, key, value, mask=mask, params=params), given, "to_out")

    theirs = lambda shared, **options: lambda given: call(layers[shared].double(), given, given["x"], **options)
    apart, one = (x | weights_of(layers[shared], 31) for shared in (False, True))
    for weights in (apart, one):  # read along the length: as large as layers draw them there
        for name in ("proj_k", "proj_v"):
            if name in weights:
                weights[name] *= (rank / longest) ** 0.5
    with_values = one | {"to_v.weight": weights_of(layers[False], 32)["to_v.weight"]}
    values_too = Difference(
        "with share_kv the values are the keys: W^V goes too; ours shares E = F and nothing else",
        "Wang et al. 2020, section 4, key-value sharing: one E for which E_i = F_i = E in every head",
        "ours",
    )
    no_mask = Difference(
        "a mask is taken and ignored, so padding is projected into every slot; ours zeroes padding first",
        "Wang et al. 2020, equation 7, has no padding",
        "ours",
    )
    return Comparison(
        "linformer", "linformer", "LinformerSelfAttention",
        (
            Run("37 of at most 48 tokens, projections for keys and for values", apart,
                lambda given: ours(given, False, "to_v"), theirs(False)),
            Run("share_kv", with_values, lambda given: ours(given, True, "to_v"), theirs(True), None, (values_too,)),
            Run("share_kv, keys for values in ours", one, lambda given: ours(given, True, "to_k"), theirs(True)),
            Run(
                "37 and 22 of 37 tokens real", apart, lambda given: ours(given, False, "to_v", real),
                theirs(False, mask=torch.tensor(real)), real, (no_mask,),
            ),
        ),
    )  # fmt: skip


def nystrom() -> Comparison:
    landmarks, width = 6, 5
    op = Nystrom(num_landmarks=landmarks, conv_size=width)

    def run(what: str, batch: int, length: int, heads: int, real: np.ndarray | None, *differences: Difference) -> Run:
        layer = NystromAttention(
            WIDTH, WIDTH // heads, heads, landmarks, residual_conv_kernel=width, pinv_iterations=6
        ).double()
        inputs = arrays(33, x=(batch, length, WIDTH)) | weights_of(layer, 34)

        def ours(given: dict[str, Any]) -> Any:
            query, key, value = jnp.split(projected(given, "to_qkv", 3 * heads), 3, axis=2)
            mask = None if real is None else padding(real)
            params = {"conv": given["res_conv.weight"][:, 0, :, 0]}
            return joined(op(query, key, value, mask=mask, params=params), given, "to_out.0")

        mask = None if real is None else torch.tensor(real)
        return Run(what, inputs, ours, lambda given: call(layer, given, given["x"], mask=mask), real, differences)

    start = Difference(
        "the pseudo-inverse starts from the largest sums of the whole batch and all heads; ours from those of each "
        "example and head",
        "Xiong et al. 2021, algorithm 1: Z_0 = A^T / (|A|_1 |A|_inf), of the matrix that is inverted",
        "ours",
    )
    before = Difference(
        "lengths that the landmarks don't divide get zeros in front, which stand in the first mean as tokens; ours "
        "shares out the real tokens, with segments that differ by one at most",
        "Xiong et al. 2021, section 3: inputs are padded where m does not divide n",
        "theirs",
        "zeros in a mean pull the first landmark to 0, and more padding would change what real tokens get",
    )
    by_place = Difference(
        "segments are cut by place, so padding leaves some of them short or empty; ours shares out each example's real "
        "tokens",
        "Xiong et al. 2021, section 3: segments of the n tokens of the input; no line on padding",
        "ours",
    )
    return Comparison(
        "nystrom", "nystrom-attention", "NystromAttention",
        (
            run("48 tokens, one example, one head", 1, 48, 1, None),
            run("48 tokens, two examples, two heads", 2, 48, 2, None, start),
            run("45 tokens, one example, one head", 1, 45, 1, None, before),
            run("31 of 48 tokens real, one example, one head", 1, 48, 1, lengths(48, 31), by_place),
        ),
    )  # fmt: skip


def compressed() -> Comparison:
    stride, depth = 3, WIDTH // HEADS

    def run(
        what: str, length: int, causal: bool, real: np.ndarray | None, slots_only: bool, *differences: Difference
    ) -> Run:
        layer = MemoryCompressedAttention(WIDTH, HEADS, causal=causal, compression_factor=stride).double()
        torch.nn.init.zeros_(layer.compress_fn.conv.bias)
        leave = ("compress_fn.conv.bias", "null", *(["to_out"] if slots_only else []))
        inputs = arrays(35, x=(2, length, WIDTH)) | weights_of(layer, 36, *leave)

        def ours(given: dict[str, Any]) -> Any:
            query, key, value = jnp.split(projected(given, "to_qkv", 3 * HEADS), 3, axis=2)
            # [heads * out, in, stride] of its grouped convolution
            kernel = given["compress_fn.conv.weight"].reshape(HEADS, depth, depth, stride).transpose(0, 3, 2, 1)
            op = Compressed(stride=stride, causal=causal)
            out = op(query, key, value, params={"key": kernel, "value": kernel})
            return out if slots_only else joined(out, given, "to_out")

        def its_slots(given: dict[str, torch.Tensor]) -> torch.Tensor:
            """Its convolution, and PyTorch's attention to its slots alone."""
            conv = {"conv.weight": given["compress_fn.conv.weight"], "conv.bias": torch.zeros(WIDTH)}
            shorten = lambda x: torch.func.functional_call(layer.compress_fn, conv, (x,))
            query, key, value = projected(given, "to_qkv", 3).unbind(2)
            split = lambda x: heads_first(x.reshape(*x.shape[:2], HEADS, depth))
            ends = torch.arange(length).reshape(-1, stride)[:, -1]
            seen = ends <= torch.arange(length)[:, None] if causal else None
            attend = torch.nn.functional.scaled_dot_product_attention
            return heads_first(attend(split(query), split(shorten(key)), split(shorten(value)), attn_mask=seen))

        theirs = its_slots if slots_only else lambda given: call(layer, given, given["x"])
        return Run(what, inputs, ours, theirs, real, differences)

    scale = Difference(
        "scores are divided by the root of the model's width; ours by that of a head's",
        "Liu et al. 2018, section 4.2.2 takes Vaswani et al. 2017's attention: 1 / sqrt(d_k), d_k of a head",
        "ours",
    )
    null = Difference(
        "a learned slot that stands for no token is attended too; ours has none, and the first queries of a causal "
        "call have zeros",
        "Liu et al. 2018, section 4.2.4: the compressed keys and values, nothing else",
        "ours",
    )
    front = Difference(
        "lengths that the stride doesn't divide get zeros in front, so that slots begin elsewhere; ours begin at 0",
        "Liu et al. 2018, section 4.2.4: a strided convolution; no line on its ends",
        "open",
        "with zeros in front the slots of a token change with the length, and padding then moves real outputs",
    )
    after_first = np.broadcast_to(np.arange(36) >= stride - 1, (2, 36))
    return Comparison(
        "compressed", "memory-compressed-attention", "MemoryCompressedAttention",
        (
            run("36 tokens, as it ships", 36, False, None, False, scale, null),
            run("37 tokens, as it ships", 37, False, None, False, scale, null, front),
            run("its convolution, without the two", 36, False, None, True),
            run("causal, its convolution, without the two; queries that see a slot", 36, True, after_first, True),
        ),
        (
            Difference(
                "keys and values share one kernel, and kernels have a bias; ours has a kernel each and no bias",
                "Liu et al. 2018, section 4.2.4: no line on it", "open",
            ),
        ),
    )  # fmt: skip
