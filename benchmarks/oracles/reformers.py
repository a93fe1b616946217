"""Reformer beside Transformers and reformer-pytorch, with our hashes given to both."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from reformer_pytorch import LSHAttention
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

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
from xformer.attention import Full, Reformer

BATCH, LENGTH, HEADS, DEPTH = 2, 48, 2, 8
WIDTH, SIZE = HEADS * DEPTH, 8
EPSILON = 1e-5  # Transformers adds 1e-6 to the squared length of a key

ACROSS_BUCKETS = Difference(
    "in a chunk and the one before, tokens of other buckets are attended too; ours attends within the bucket",
    "Kitaev et al. 2020, equations 4 to 6: P_i holds the j with h(q_i) = h(k_j), and chunks only cut it",
    "ours",
)
COUNTED_TWICE = Difference(
    "a pair that shares a chunk in both rounds counts twice; ours counts it once",
    "Kitaev et al. 2020, appendix A, multi-round LSH attention: log N_ij is subtracted, so that the rounds' union is "
    "attended",
    "ours",
)
ROUNDS_IN_A_RING = Difference(
    "before the first chunk of a round stands the last chunk of the round before; ours has that round's own last chunk",
    "Kitaev et al. 2020, appendix A: P_i is the union of rounds, each hashed and sorted for itself",
    "ours",
)
UNSCALED = Difference(
    "scores are q k / |k|; ours divides them by sqrt(head_dim), as every op, unless `scale=1.0` is given",
    "Kitaev et al. 2020, section 2: k_j = q_j / |q_j|, and equations leave the scaling by sqrt(d_k) out for clarity",
    "ours",
)


def hashes(op: Reformer, query: Any) -> np.ndarray:
    """The bucket of every token in every round, int64 `[batch, heads, rounds, length]`."""
    query = np.asarray(jax.lax.stop_gradient(query))
    turned = np.einsum("blhd,rdn->bhrln", query, op.rotations(query.shape[-1]))
    return np.concatenate([turned, -turned], -1).argmax(-1)


def pairs_by_chunk(buckets: np.ndarray) -> np.ndarray:
    """How often each pair shares a chunk or has it before, in a ring of all rounds, itself left out.

    int64 `[batch, heads, length, length]`, for buckets `[batch, heads, rounds, length]`.
    """
    length, rounds = buckets.shape[-1], buckets.shape[2]
    order = np.argsort(buckets, axis=-1, kind="stable")
    count = np.zeros((*buckets.shape[:2], length, length), np.int64)
    num_chunks = length // SIZE
    for index in np.ndindex(buckets.shape[:2]):
        chunks = [order[index][turn, at * SIZE : (at + 1) * SIZE] for turn in range(rounds) for at in range(num_chunks)]
        for at, queries in enumerate(chunks):
            for keys in {0: chunks[at], 1: chunks[at - 1]}.values():
                count[index][np.ix_(queries, keys)] += 1
        np.fill_diagonal(count[index], 0)
    return count


def balanced(op: Reformer) -> np.ndarray:
    """Queries of which every bucket holds `length / num_buckets`, `[batch, length, heads * depth]`."""
    rng, each = np.random.default_rng(11), LENGTH // op.num_buckets
    drawn = rng.standard_normal((1, 4096, 1, DEPTH))
    bucket = hashes(op, jnp.asarray(drawn))[0, 0, 0]
    left = [list(np.flatnonzero(bucket == number)) for number in range(op.num_buckets)]
    out = np.zeros((BATCH, LENGTH, HEADS, DEPTH))
    for example, head in np.ndindex(BATCH, HEADS):
        taken = [tokens.pop() for tokens in left for _ in range(each)]
        out[example, :, head] = drawn[0, rng.permutation(taken), 0]
    return out.reshape(BATCH, LENGTH, WIDTH)


def comparisons() -> list[Comparison]:
    return [hugging_face(), reformer_pytorch()]


def hugging_face() -> Comparison:
    rounds, buckets = 2, 6
    op = Reformer(num_hashes=rounds, num_buckets=buckets, bucket_size=SIZE)

    def layer_of(rounds: int, before: int) -> LSHSelfAttention:
        config = ReformerConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, attention_head_size=DEPTH, lsh_attn_chunk_length=SIZE,
            num_hashes=rounds, num_buckets=buckets, lsh_num_chunks_before=before, is_decoder=False,
            lsh_attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return LSHSelfAttention(config).double().eval()

    shipped, alone = layer_of(rounds, 1), layer_of(1, 0)
    inputs = arrays(6, x=(BATCH, LENGTH, WIDTH)) | weights_of(shipped, 7)
    one_round = dataclasses.replace(op, num_hashes=1)
    even = {"x": balanced(one_round)} | {
        "query_key.weight": np.eye(WIDTH), "value.weight": inputs["value.weight"]
    }  # fmt: skip

    def theirs(layer: LSHSelfAttention, op: Reformer, given: dict[str, torch.Tensor]) -> torch.Tensor:
        found = hashes(op, projected(given, "query_key", HEADS).detach().numpy())
        numbered = torch.tensor(found + np.arange(op.num_hashes)[:, None] * buckets)
        return call(layer, given, given["x"], buckets=numbered).hidden_states

    def ours(op: Reformer, given: dict[str, Any]) -> Any:
        query = projected(given, "query_key", HEADS)
        return op(query, query, projected(given, "value", HEADS), scale=1.0)

    def same_pairs(given: dict[str, Any]) -> Any:
        """Full attention over the pairs that it has, as often as it has them."""
        query = projected(given, "query_key", HEADS)
        key = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
        count = jnp.asarray(pairs_by_chunk(hashes(op, query)))
        bias = jnp.log(jnp.maximum(count, 1))
        return Full()(query, key, projected(given, "value", HEADS), bias, count > 0, scale=1.0)

    return Comparison(
        "reformer", "transformers", "LSHSelfAttention",
        (
            Run(
                "our hashes given to it, two rounds; ours with scale=1.0",
                inputs, lambda given: ours(op, given), lambda given: theirs(shipped, op, given), None,
                (ACROSS_BUCKETS, COUNTED_TWICE, ROUNDS_IN_A_RING),
            ),
            Run(
                "our full attention over its pairs, each counted as often as it counts it",
                inputs, same_pairs, lambda given: theirs(shipped, op, given), tolerance=EPSILON,
            ),
            Run(
                "one round, every bucket a chunk, no chunk before; ours with scale=1.0",
                even, lambda given: ours(one_round, given), lambda given: theirs(alone, one_round, given),
                tolerance=EPSILON,
            ),
        ),
        (
            UNSCALED,
            Difference(
                "up to one chunk of tokens it attends to all of them; ours hashes at any length",
                "Kitaev et al. 2020, section 2, is silent", "open",
            ),
        ),
    )  # fmt: skip


def reformer_pytorch() -> Comparison:
    inputs = arrays(40, query=(BATCH, LENGTH, HEADS, DEPTH), value=(BATCH, LENGTH, HEADS, DEPTH))
    real = lengths(LENGTH, 48, 31)
    op = Reformer(num_hashes=2, num_buckets=LENGTH // SIZE, bucket_size=SIZE)

    def theirs(given: dict[str, torch.Tensor], op: Reformer, real: np.ndarray | None = None, **options: Any) -> Any:
        found = hashes(op, given["query"].detach().numpy()) + np.arange(2)[:, None] * op.num_buckets
        flat = lambda x: heads_first(x).reshape(BATCH * HEADS, LENGTH, DEPTH)
        layer = LSHAttention(bucket_size=op.bucket_size, n_hashes=op.num_hashes, **options).double().eval()
        buckets = torch.tensor(found.reshape(BATCH * HEADS, -1))
        mask = None if real is None else torch.tensor(real).repeat_interleave(HEADS, 0)
        with mock.patch.object(layer, "hash_vectors", lambda *given, **options: buckets):
            out = layer(flat(given["query"]), flat(given["value"]), input_mask=mask)[0]
        return heads_first(out.reshape(BATCH, HEADS, LENGTH, DEPTH))

    def ours(given: dict[str, Any], op: Reformer = op, real: np.ndarray | None = None) -> Any:
        return op(given["query"], given["query"], given["value"], mask=None if real is None else padding(real))

    strict = {"attend_across_buckets": False, "allow_duplicate_attention": False}
    causal = dataclasses.replace(op, causal=True)
    wide = dataclasses.replace(causal, num_buckets=2, bucket_size=LENGTH // 2)
    by_chunk = Difference(
        "causal attention is cut into chunks of all tokens, later ones too, so what a token sees changes with them; "
        "ours sees the `bucket_size` tokens before it in its bucket, whatever comes after",
        "Kitaev et al. 2020, section 2, causal masking for shared-QK attention: attention to the future is not "
        "allowed; but equation 5 cuts chunks out of the sorted sequence",
        "open",
        "an earlier output must not move with later tokens: decoding could not repeat it",
    )
    hashed_padding = Difference(
        "padding is hashed and takes places in chunks; ours sorts it behind the real tokens",
        "Kitaev et al. 2020 has no padding", "open", "real outputs must not move with the amount of padding",
    )  # fmt: skip
    return Comparison(
        "reformer", "reformer-pytorch", "LSHAttention",
        (
            Run(
                "our hashes given to it, two rounds, as it ships", inputs, ours, lambda given: theirs(given, op), None,
                (ACROSS_BUCKETS, COUNTED_TWICE, ROUNDS_IN_A_RING),
            ),
            Run(
                "the same with its attend_across_buckets=False and allow_duplicate_attention=False", inputs, ours,
                lambda given: theirs(given, op, **strict), tolerance=1e-7,  # it adds 1e-9 to counts
            ),
            Run(
                "with these, 48 and 31 of 48 tokens real", inputs, lambda given: ours(given, real=real),
                lambda given: theirs(given, op, real, **strict), real, (hashed_padding,),
            ),
            Run(
                "with these, causal", inputs, lambda given: ours(given, causal),
                lambda given: theirs(given, causal, causal=True, **strict), None, (by_chunk,),
            ),
            Run(
                "with these, causal, chunks of half the length: no bucket is cut", inputs,
                lambda given: ours(given, dataclasses.replace(wide, bucket_size=LENGTH)),
                lambda given: theirs(given, wide, causal=True, **strict), tolerance=1e-7,
            ),
        ),
    )  # fmt: skip
