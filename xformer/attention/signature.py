"""The arguments of an attention call, in one place: an op and both Flax adapters share this signature.

A new keyword is added to `Options` and to `AttentionCallable.__call__` here, and read where it acts. A variant that
cannot honour it says so with one line in its `REFUSES`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

Array = jax.Array
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Every argument of a call but query, key and value, as the caller gave it; see `AttentionCallable.__call__`."""

    bias: Array | None = None
    mask: Array | None = None
    is_causal: bool = False
    segment_ids: Array | tuple[Array, Array] | None = None
    query_offset: int | Array | None = None
    positions: Array | tuple[Array, Array] | None = None
    scale: float | Array | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout_rng: Array | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    deterministic: bool = True
    dtype: Any = None
    precision: Any = None
    module: Any = None
    params: Params | None = None
    plan: Any = None
    global_tokens: Array | None = None
    paths: Array | tuple[Array, Array] | None = None
    distances: Array | None = None


class AttentionCallable:
    """What is called like Flax's `attention_fn`. Subclasses say what happens in `attend_with`."""

    # Every keyword is spelt out, and there is no **kwargs: Linen reads the signature and passes only what it names.
    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        *,
        is_causal: bool = False,
        segment_ids: Array | tuple[Array, Array] | None = None,
        query_offset: int | Array | None = None,
        positions: Array | tuple[Array, Array] | None = None,
        scale: float | Array | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        params: Params | None = None,
        plan: Any = None,
        global_tokens: Array | None = None,
        paths: Array | tuple[Array, Array] | None = None,
        distances: Array | None = None,
    ) -> Array:
        """Attends. The arguments are those of Flax's `attention_fn`, and a few more.

        What a mask, a segment, the variant's pattern or the causal cut hides moves no output and no gradient, not even
        if it is NaN or infinite; a query that sees such a key or value has NaN for output. The accelerator kernels
        (`implementation`) promise this for padding masks only.

        Args:
          query: `[*batch, q_len, num_heads, head_dim]`, not scaled.
          key, value: `[*batch, kv_len, num_kv_heads, head_dim]`; `num_heads` is a multiple of `num_kv_heads`. Values
            may have another depth than keys.
          bias: a number added to each scaled score; broadcastable to `[*batch, num_heads, q_len, kv_len]`.
          mask: any dtype, pairs with `mask > 0` attend; broadcastable likewise. A padding mask `[batch, 1, 1, kv_len]`
            costs O(kv_len).
          is_causal: the same as `causal=True` on the op.
          segment_ids: int `[*batch, length]`, or a tuple of two such arrays, for queries and for keys; pairs of
            different segments do not attend.
          query_offset: position of the first query, an int or an int array `[]` or `[*batch]`. Where positions have an
            end (BigBird's are those of the keys, MusicRelative's are below its `max_len`), an int beyond it raises
            ValueError, and an array, known only at run time, gives NaN for the queries beyond.
          positions: int `[*batch, length]`, or a tuple of two such arrays, for queries and for keys: where each token
            stands, for tokens that are packed, shuffled or sorted. Causal cuts, windows and position terms go by them.
            Every tile is visited then (`op.cost(shape, positions=True)`). Any integers below 2**29 in size; where a
            term has an end (MusicRelative), what lies beyond raises ValueError, or gives NaN for the queries there and
            those that see such a key, if it is known only at run time.
          scale: multiplies the scores: a number, or an array `[]` or `[num_heads]`, which is applied in float32.
            1 / sqrt(head_dim) by default.
          softcap: a number above 0; a scaled score becomes `softcap * tanh(score / softcap)` before biases, masks and
            linear or bucketed position terms (ALiBi, T5Bias) act on it (Gemma Team 2024, "Gemma 2", section 2).
          sinks: float `[num_heads]`, one more logit for every query of a head, which takes part in the softmax and
            carries no value: the weights of the keys then sum to less than 1 (Xiao et al. 2023, "Efficient Streaming
            Language Models with Attention Sinks"; OpenAI 2025, "gpt-oss").
          dropout_rng, dropout_rate, broadcast_dropout, deterministic: dropout on the weights, as in Flax;
            `broadcast_dropout` shares a mask between batch entries and heads.
          dtype: inputs are cast to it and the output has it; query's dtype by default.
          precision: passed to the matrix products.
          module: Flax's request to sow the weights, which `xformer.nn.AttentionFn` grants and a bare op refuses.
          params: what the op's `init` gave, and under "constants" what its `constants` did (drawn from the op's seed
            where they are missing). An AttentionFn has its own.
          plan: one layer's entry of what the op's `plans` gave. The call then attends as the op of that layer does
            (`at_layer`), and calls for all layers share one trace.
          global_tokens: bool `[*batch, kv_len]`, the tokens of each example that attend to all and are attended by all,
            for `Longformer`, in the place of its `num_global_tokens`; other variants refuse it.
          paths: int `[*batch, length, levels]`, or a tuple of two such arrays, for queries and for keys: the nodes from
            the root of each token's tree down to the token, for the position term `ShawTree`; see
            `xformer.attention.tree_distances`. Memory grows with the length, not with its square.
          distances: int `[*batch, q_len, kv_len]`, for the same term in place of `paths`: a signed distance of every
            pair, or `xformer.attention.NO_PATH`.

        Returns:
          `[*batch, q_len, num_heads, head_dim]`, as deep as the values. A query with nothing to attend to gets zeros
          and gives no gradient.

        Raises:
          ValueError: shapes that do not fit, missing params, a plan that was made for something else, or a missing
            `query_offset` where positions matter and the lengths differ; `positions` with one or with a plan.
          NotImplementedError: an argument that the variant cannot honour; `paths` or `distances` where no position
            term reads them.
        """
        options = Options(
            bias, mask, is_causal, segment_ids, query_offset, positions, scale, softcap, sinks, dropout_rng,
            dropout_rate, broadcast_dropout, deterministic, dtype, precision, module, params, plan, global_tokens,
            paths, distances,
        )  # fmt: skip
        return self.attend_with(query, key, value, options)

    def attend_with(self, query: Array, key: Array, value: Array, options: Options) -> Array:
        """`__call__` with the arguments gathered."""
        raise NotImplementedError
