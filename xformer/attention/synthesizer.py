"""Synthesizer: scores that do not come from keys (Tay et al. 2021)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

import jax
import jax.numpy as jnp

from xformer.attention import pattern
from xformer.attention.call import Call
from xformer.attention.cost import Cost, call_cost
from xformer.attention.dtypes import compute_dtype, exact
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.query_tile import soft_cap
from xformer.attention.engine.tile_plan import ceil_div
from xformer.attention.interface import Attention
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.shape import Shape
from xformer.attention.signature import Options, Params
from xformer.checks import check_integer

Array = jax.Array
Kind = Literal["dense", "random", "factorized_dense", "factorized_random"]
CHUNK_SCORES = 2**22  # scores of a chunk of queries: 16 MiB in float32
IN_ORDER = "its scores belong to the positions 0, 1, 2, ... themselves"


@dataclasses.dataclass(frozen=True)
class Synthesizer(PatternAttention):
    """Softmax over scores that are made from a token alone or learned as they are; keys are not looked at (section 3).

    With x = relu(query) and a constant 1 after it, the score of query i and key j of a head is

    - "dense": `x_i . key_j`, a learned vector for each position. The two layers of the paper read the layer's input; an
      attention op is given a projection of it, the query, so the query projection is the first of the two.
    - "random": `scores_ij`, learned.
    - "factorized_dense": `(x_i . first_r) (x_i . second_s)`, for j = r b + s with b = ceil(max_len / rank).
    - "factorized_random": `query_i . key_j`, two learned vectors of `rank` numbers for each position.

    Values are weighed by pairs, so masks, segments, biases, sinks, dropout and the causal cut work as in full
    attention. So does memory: "dense" and "factorized_random" are full attention over learned keys, "random" reads its
    table tile by tile, and "factorized_dense" takes queries in chunks of about 4 million scores, which the gradient
    makes anew. As in the paper, scores are not divided by sqrt(head_dim): `scale` is 1 if not given. Position terms
    have no place, since every score belongs to positions. Keys are at most `max_len`.

    Parameters, float32: dense `key [num_kv_heads, max_len, head_dim + 1]`; random `scores [num_heads, max_len,
    max_len]`; factorized_dense `first [num_heads, head_dim + 1, rank]` and `second [num_heads, head_dim + 1, b]`;
    factorized_random `query [num_heads, max_len, rank]` and `key [num_kv_heads, max_len, rank]`.

    Attributes:
      kind: where the scores come from.
      max_len: the longest input, in tokens.
      rank: of the factorized kinds, k of the random one and a of the dense one, for which a b is `max_len` at least.
    """

    REFUSES: ClassVar[Mapping[str, str]] = {"positions": IN_ORDER, "plan": "there is none: its layers do not differ"}

    PAIRS_BY_POSITION: ClassVar[bool] = False

    kind: Kind = "dense"
    max_len: int = 1024
    rank: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in get_args(Kind):
            raise ValueError(f"Synthesizer.kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        for name in ("max_len", "rank"):
            check_integer(f"Synthesizer.{name}", getattr(self, name))
        if self.position is not None:
            raise NotImplementedError(f"Synthesizer.position must be None, got {self.position}: {IN_ORDER}")

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """`max_len` is the number of positions; `rank` is 8, or about its square root for "factorized_dense"."""
        max_len = overrides.get("max_len", num_positions)
        square = overrides.get("kind") == "factorized_dense" and isinstance(max_len, int) and max_len > 0
        return cls(**{"max_len": max_len, "rank": math.isqrt(max_len) if square else 8, **overrides})

    def init(self, rng: Array, shape: Shape) -> Params:
        heads, kv_heads, depth = shape.num_heads, shape.kv_heads, shape.head_dim + 1
        sizes: dict[str, tuple[int, int, int]] = {
            "dense": {"key": (kv_heads, self.max_len, depth)},
            "random": {"scores": (heads, self.max_len, self.max_len)},
            "factorized_dense": {"first": (heads, depth, self.rank), "second": (heads, depth, self._width)},
            "factorized_random": {
                name: (n, self.max_len, self.rank) for name, n in (("query", heads), ("key", kv_heads))
            },
        }[self.kind]
        # Scores of about size 1.
        scale = {"random": 1.0, "factorized_random": self.rank**-0.25}.get(self.kind, depth**-0.5)
        rngs = jax.random.split(rng, len(sizes))
        return {
            name: scale * jax.random.normal(rng, size) for rng, (name, size) in zip(rngs, sizes.items(), strict=True)
        }

    def token_pattern(self, kv_len: int, num_heads: int) -> pattern.Pattern:
        return pattern.Full()

    def num_positions(self, kv_len: int) -> int | None:
        return self.max_len if "random" in self.kind else None

    def _prepare(self, query: Array, key: Array, value: Array, options: Options) -> tuple[Attention, Call]:
        scale = 1.0 if options.scale is None else options.scale
        return super()._prepare(query, key, value, dataclasses.replace(options, scale=scale))

    def _split(self, call: Call, params: Params) -> tuple[Inputs, Controls, Settings, pattern.Pattern]:
        kv_len = call.lengths[1]
        if kv_len > self.max_len:
            raise ValueError(f"Synthesizer(max_len={self.max_len}) takes at most that many keys, got {kv_len}")
        unscaled = dataclasses.replace(call, head_scale=None)
        inputs, controls, settings, pairs = super()._split(unscaled, params)
        batch, q_len, kv_heads, groups, _ = inputs.query.shape
        dtype = compute_dtype(inputs.query.dtype)
        learned = {name: exact(x).astype(dtype) for name, x in params.items()}
        by_head = lambda x: x.reshape(1, kv_heads, groups, *x.shape[1:])
        head_scale = jnp.ones((), dtype) if call.head_scale is None else call.head_scale
        head_scale = jnp.broadcast_to(head_scale, kv_heads * groups).reshape(kv_heads, groups)
        scale_query = lambda x: x * head_scale[None, None, :, :, None]
        # Nothing of the query but its NaN, which shows that it stands beyond the last position.
        query, scores = inputs.query.astype(dtype)[..., :1] * 0, None
        key = jnp.zeros((batch, kv_len, kv_heads, 1), dtype)
        if self.kind in ("dense", "factorized_random"):
            of_keys = jnp.moveaxis(learned["key"][:, :kv_len], 0, 1)
            key = jnp.broadcast_to(of_keys[None], (batch, *of_keys.shape))
        if self.kind == "dense":
            query = scale_query(self._hidden(inputs.query, dtype))
        elif self.kind == "factorized_random":
            of_queries = by_head(self._rows(learned["query"], controls.offset, q_len))
            query = scale_query(jnp.moveaxis(of_queries, 3, 1) + query)
        elif self.kind == "random":
            scores = by_head(self._rows(learned["scores"], controls.offset, q_len)[:, :, :kv_len])
        else:
            hidden = self._hidden(inputs.query, dtype)
            times = lambda x: jnp.einsum("bqkgd,kgdr->bkgqr", hidden, by_head(x)[0], precision=call.precision)
            first, second = times(learned["first"]), times(learned["second"])
            scores = (first[..., :, None] * second[..., None, :]).reshape(*first.shape[:4], -1)[..., :kv_len]
        bias = inputs.bias
        if scores is not None:
            scores = soft_cap(scores * (head_scale[None, :, :, None, None] * settings.scale), settings.softcap)[0]
            bias = scores if bias is None else scores + exact(bias).astype(dtype)
        return inputs._replace(query=query, key=key, bias=bias), controls, settings, pairs

    def _hidden(self, query: Array, dtype: Any) -> Array:
        ones = jnp.ones((*query.shape[:-1], 1), dtype)
        return jnp.concatenate([jax.nn.relu(query.astype(dtype)), ones], -1)

    def _rows(self, table: Array, offset: Any, q_len: int) -> Array:
        """Those of `table [heads, max_len, ...]` where the queries stand."""
        if isinstance(offset, int):
            return table[:, offset : offset + q_len]
        return jnp.take(table, offset + jnp.arange(q_len), axis=1, mode="clip")

    @property
    def _width(self) -> int:
        return ceil_div(self.max_len, self.rank)

    def _chunk(self, batch: Any, num_heads: int, q_len: int, kv_len: int) -> int:
        """Queries of a chunk."""
        if self.kind != "factorized_dense" or self.implementation not in (None, "xla"):
            return q_len
        most = max(CHUNK_SCORES // (num_heads * kv_len * (batch if isinstance(batch, int) else 1)), 8)
        return ceil_div(q_len, ceil_div(q_len, most))

    def _attend(self, call: Call, params: Params, *, with_lse: bool) -> tuple[Array, Array | None]:
        (q_len, kv_len), num_heads = call.lengths, call.query.shape[2]
        size = self._chunk(call.batch, num_heads, q_len, kv_len)
        if size == q_len:
            return super()._attend(call, params, with_lse=with_lse)
        offset, num_chunks = call.offset("Synthesizer"), ceil_div(q_len, size)

        def cut(x: Array, axis: int) -> Array:
            fill = [(0, num_chunks * size - q_len if at == axis else 0) for at in range(x.ndim)]
            x = jnp.pad(x, fill).reshape(*x.shape[:axis], num_chunks, size, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        arrays: dict[str, Any] = {}
        for name, axis in (("query", 1), ("mask", 2), ("bias", 2), ("q_segments", 1), ("q_paths", 1), ("distances", 1)):
            x = getattr(call, name)
            if x is not None and x.shape[axis] > 1:
                arrays[name] = cut(x, axis)
        attend = super()._attend

        def one(operands: tuple[Array, dict[str, Any]]) -> tuple[Array, Array | None]:
            index, arrays = operands
            rng = None if call.dropout_rng is None else jax.random.fold_in(call.dropout_rng, index)
            part = dataclasses.replace(call, query_offset=offset + index * size, dropout_rng=rng, **arrays)
            return attend(part, params, with_lse=with_lse)

        parts = jax.lax.map(jax.checkpoint(one), (jnp.arange(num_chunks), arrays))
        whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :q_len]
        out, lse = jax.tree.map(whole, parts)
        return out, lse

    def cost(self, shape: Shape, *, positions: bool = False) -> Cost:
        if shape.kv_len > self.max_len:
            raise ValueError(f"Synthesizer(max_len={self.max_len}) takes at most that many keys, got {shape.kv_len}")
        depth = {"dense": shape.head_dim + 1, "factorized_random": self.rank}.get(self.kind, 1)
        size = self._chunk(shape.batch, shape.num_heads, shape.q_len, shape.kv_len)
        chunks = ceil_div(shape.q_len, size)
        op = self if chunks == 1 else dataclasses.replace(self, causal=False)  # a chunk visits every tile
        of_chunk = dataclasses.replace(shape, q_len=size, head_dim=depth, value_dim=shape.value_depth)
        flops = chunks * super(Synthesizer, op).cost(of_chunk, positions=positions).flops
        if self.kind == "factorized_dense":
            hidden = shape.batch * shape.num_heads * chunks * size * (shape.head_dim + 1)
            flops += 2 * hidden * (self.rank + self._width)
        return call_cost(shape, flops, jax.eval_shape(lambda: self.init(jax.random.key(0), shape)))
