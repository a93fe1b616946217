"""Base of the variants that choose token pairs by what the tokens hold, and attend in orders made on the device.

A variant gathers queries and keys into lists in which what attends stands side by side, every example and head its
own, and the tiled engine attends list by list. Numbers of the tokens (`CodePairs`) say which pairs of a tile exist, and
that none is in two lists, so that lists merge by log-sum-exp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention import kernels
from xformer.attention import pattern as patterns
from xformer.attention.call import Call
from xformer.attention.cost import Cost, call_cost
from xformer.attention.engine import attend as engine
from xformer.attention.engine import dense as dense_engine
from xformer.attention.engine.operands import CodePairs, Controls, Inputs, Settings
from xformer.attention.engine.query_tile import merge_heads
from xformer.attention.engine.tile_cost import dense_flops, tiled_flops
from xformer.attention.engine.tile_plan import TileGroup, TilePlan, ceil_div
from xformer.attention.pattern_attention import PatternAttention
from xformer.attention.shape import Shape
from xformer.attention.signature import Options, Params
from xformer.attention.split_heads import with_pairs

Array = jax.Array


class Lists(NamedTuple):
    """Queries and keys, gathered into lists `[batch, heads, lists, ...]`.

    Attributes:
      query `[..., queries, head_dim]`; key `[..., keys, head_dim]`; value `[..., keys, value depth]`.
      q_codes, kv_codes: int `[..., codes, queries or keys]`, see `CodePairs`.
      q_tokens, kv_tokens: int `[..., queries or keys]`, which token is at each place.
    """

    query: Array
    key: Array
    value: Array
    q_codes: Array
    kv_codes: Array
    q_tokens: Array
    kv_tokens: Array


@dataclasses.dataclass(frozen=True)
class ChosenPairs(PatternAttention):
    """Attention over pairs that depend on data. Subclasses choose (`choose`), and attend to what is chosen.

    Nothing is differentiated through the choice. Hidden keys must not move it, so masks that depend on the query and
    segments are refused. Positions are those of the keys.
    """

    REFUSES: ClassVar[Mapping[str, str]] = {
        "segment_ids": "its choice of keys mixes all tokens of an example; give each segment a row of the batch",
        "positions": "its tokens stand in order",
        "plan": "its pairs depend on data",
    }

    PAIRS_BY_POSITION: ClassVar[bool] = False

    # What subclasses say.

    def choose(self, call: Call, params: Params) -> Any:
        """What is chosen, without gradient; given to the methods below."""
        raise NotImplementedError

    def chosen_pairs(self, chosen: Any, call: Call) -> Array:
        """The pairs, bool `[batch, num_heads or 1, q_len, kv_len]`: for dense computation. Padding has none."""
        raise NotImplementedError

    def attend_chosen(
        self, chosen: Any, call: Call, inputs: Inputs, controls: Controls, settings: Settings
    ) -> tuple[Array, Array]:
        """Output `[batch, q_len, num_heads, value depth]` and log-sum-exp `[batch, q_len, num_heads]`."""
        raise NotImplementedError

    def chosen_flops(self, shape: Shape, relative: Any) -> int:
        """FLOPs of `attend_chosen`, of one example and head."""
        raise NotImplementedError

    def choice_flops(self, shape: Shape) -> int:
        """FLOPs of `choose`."""
        raise NotImplementedError

    def is_dense(self, q_len: int, kv_len: int) -> bool:
        """Whether all pairs are computed, as for the few queries of decoding."""
        return self.implementation == "reference"

    # The contract.

    def token_pattern(self, kv_len: int, num_heads: int) -> patterns.Pattern:
        return patterns.Full()

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> None:  # type: ignore[override]
        return None

    def num_positions(self, kv_len: int) -> int:
        return kv_len

    def knows_offset(self, q_len: int, kv_len: int) -> bool:
        return q_len == kv_len

    def _attend(self, call: Call, params: Params, *, with_lse: bool) -> tuple[Array, Array | None]:
        if self.implementation not in (None, "xla", "reference"):
            raise NotImplementedError(
                f'implementation="{self.implementation}" cannot do this call: the pairs of {self._name} depend on data'
            )
        if self.implementation is None:
            kernels.only_tiled(f"the pairs of {self._name} depend on data")
        inputs, controls, settings, _ = self._split(call, params)
        if call.distances is not None and not self.is_dense(*call.lengths):
            raise NotImplementedError(f"{self._name} cannot honour distances: its pairs are gathered; give paths")
        chosen = self._chosen(call, params)
        if self.is_dense(*call.lengths):
            out, lse, _ = self._dense(chosen, call, inputs, controls, settings)
            return merge_heads(out), merge_heads(lse)
        return self.attend_chosen(chosen, call, inputs, controls, settings)

    def _chosen(self, call: Call, params: Params) -> Any:
        if call.mask is not None and call.mask.shape[2] != 1:
            raise NotImplementedError(
                f"{self._name} cannot honour a mask with query dimension {call.mask.shape[2]} (only 1, a padding mask, "
                f"works): {self.REFUSES['segment_ids']}; causal=True cuts at the query"
            )
        stop = jax.lax.stop_gradient
        return self.choose(dataclasses.replace(call, query=stop(call.query), key=stop(call.key)), params)

    def _dense(
        self, chosen: Any, call: Call, inputs: Inputs, controls: Controls, settings: Settings
    ) -> dense_engine.Attended:
        controls = with_pairs(controls, self.chosen_pairs(chosen, call), inputs)
        return dense_engine.attend(inputs, controls, settings, patterns.Full())

    def weights(self, call: Call, params: Params) -> Array:
        inputs, controls, settings, _ = self._split(call, params)
        weights = self._dense(self._chosen(call, params), call, inputs, controls, settings).weights
        return weights.reshape(weights.shape[0], -1, *weights.shape[3:])

    def pattern_of(
        self,
        query: Array,
        key: Array,
        *,
        mask: Array | None = None,
        is_causal: bool = False,
        segment_ids: Array | tuple[Array, Array] | None = None,
        params: Params | None = None,
    ) -> Array:
        """Which pairs are chosen, bool `[*batch, num_heads, q_len, kv_len]`; padding has none. `params`: of a call."""
        op, call = self._prepare(query, key, key, Options(mask=mask, is_causal=is_causal, segment_ids=segment_ids))
        assert isinstance(op, ChosenPairs)
        pairs = op.chosen_pairs(op._chosen(call, op.with_constants(params or {}, call)), call)
        pairs = jnp.broadcast_to(pairs, (call.batch, *pairs.shape[1:]))
        return pairs.reshape(*call.batch_shape, *pairs.shape[1:])

    def cost(self, shape: Shape, *, positions: bool = False) -> Cost:
        if positions:
            raise NotImplementedError(f"{self._name} cannot honour positions: {self.REFUSES['positions']}")
        params = jax.eval_shape(lambda: self.init(jax.random.key(0), shape))
        relative = jax.eval_shape(lambda p: self._relative(p, shape.num_heads, shape.kv_len), params)
        if self.is_dense(shape.q_len, shape.kv_len):
            flops = dense_flops(shape.q_len, shape.kv_len, shape.head_dim, shape.value_depth, relative)
        else:
            flops = self.chosen_flops(shape, relative)
        return call_cost(shape, shape.batch * shape.num_heads * flops + self.choice_flops(shape), params)


def real_tokens(call: Call) -> Array:
    """Which keys are no padding, bool `[batch, num_heads, kv_len]`."""
    shape = call.batch, call.query.shape[2], call.lengths[1]
    return jnp.ones(shape, bool) if call.mask is None else jnp.broadcast_to(call.mask[:, :, 0], shape)


def list_plan(key_tiles: np.ndarray, q_block: int, kv_block: int) -> TilePlan:
    """A plan in which query tile i visits the key tiles `key_tiles[i]`, all pairs of each as far as a plan goes."""
    num_query_tiles, num_tiles = key_tiles.shape
    num_chunks = ceil_div(num_tiles * kv_block, max(1024, kv_block))
    while num_tiles % num_chunks:
        num_chunks += 1
    listed = key_tiles.reshape(1, num_query_tiles, num_chunks, -1).astype(np.int32)
    group = TileGroup(np.arange(num_query_tiles, dtype=np.int32), listed, np.zeros_like(listed), 0, num_chunks)
    masks = np.stack([np.full((q_block, kv_block), held) for held in (True, False)])
    return TilePlan((group,), masks, q_block, kv_block)


def list_flops(plan: TilePlan, num_queries: int, shape: Shape, relative: Any) -> int:
    """FLOPs of one list."""
    return tiled_flops(plan, num_queries, shape.head_dim, shape.value_depth, relative, by_position=True)


def attend_lists(
    lists: Lists, plan: TilePlan, pairs: CodePairs, inputs: Inputs, controls: Controls, settings: Settings
) -> tuple[Array, Array]:
    """Attends within each list.

    Args:
      lists: what attends; the position term and the bias are those of `inputs`. Padding has codes that no pair allows.
      plan: the tiles of one list.
      pairs: which pairs of a tile exist.

    Returns:
      Output `[batch, heads, lists, queries, value depth]` and log-sum-exp `[batch, heads, lists, queries]`, without
      sinks.
    """
    batch, heads, orders, num_queries, _ = lists.query.shape
    settings = dataclasses.replace(settings, code_pairs=pairs, pattern=None)
    relative, bias = inputs.relative, _bias_of_lists(inputs.bias, lists)
    of_tokens = _paths_of_lists(controls, lists)
    by_list = lambda x: x.reshape(-1, 1, 1, *x.shape[-2:])

    def attend(relative: Any, lists: Lists, bias: Any, paths: Any, first: Array, rng: Any) -> tuple[Array, Array]:
        flat = lambda x: x.reshape(-1, *x.shape[-2:])  # all lists as so many examples of one head
        query, key, value = flat(lists.query), flat(lists.key), flat(lists.value)
        own = Inputs(query[:, :, None, None], key[:, :, None], value[:, :, None], None, relative)
        if bias is not None:
            own = own._replace(bias=flat(bias)[:, None, None])
        q_codes, kv_codes = flat(lists.q_codes)[:, :, None, :, None], flat(lists.kv_codes)[:, :, None, None]
        own_controls = Controls(plan, dropout_rng=rng, first_example=first, q_codes=q_codes, kv_codes=kv_codes)
        if relative is not None:
            tokens = lambda x: x.reshape(-1, 1, 1, 1, x.shape[-1])
            q_positions = jnp.swapaxes(tokens(lists.q_tokens + controls.offset), 3, 4)
            own_controls = own_controls._replace(q_positions=q_positions, kv_positions=tokens(lists.kv_tokens))
        if paths is not None:
            own_controls = own_controls._replace(q_paths=by_list(paths[0]), kv_paths=by_list(paths[1]))
        out, lse = engine.attend(own, own_controls, settings)
        shape = *lists.query.shape[:-2], -1
        return out[:, :, 0, 0].reshape(*shape[:-1], num_queries, out.shape[-1]), lse[:, :, 0, 0].reshape(shape)

    rng = controls.dropout_rng
    if relative is None or all(x.shape[0] == 1 for x in jax.tree.leaves(relative)):
        return attend(relative, lists, bias, of_tokens, jnp.zeros((), jnp.int32), rng)
    # Terms differ by head.
    first = jnp.arange(heads) * (batch * orders)
    of_heads = jax.tree.map(lambda x: 0 if x.shape[0] > 1 else None, relative)
    split = jax.tree.map(lambda x: x[:, None] if x.shape[0] > 1 else x, relative)
    return jax.vmap(attend, (of_heads, 1, 1, 1, 0, None), 1)(split, lists, bias, of_tokens, first, rng)


def _bias_of_lists(bias: Array | None, lists: Lists) -> Array | None:
    """The bias `[b, kv_heads, groups, q_len or 1, kv_len or 1]` of the pairs of every list."""
    if bias is None:
        return None
    batch, heads, orders = lists.q_tokens.shape[:3]
    bias = merge_bias_heads(bias)
    bias = jnp.broadcast_to(bias[:, :, None], (batch, heads, orders, *bias.shape[2:]))
    if bias.shape[3] > 1:
        bias = jnp.take_along_axis(bias, lists.q_tokens[..., None], axis=3, mode="clip")
    if bias.shape[4] > 1:
        bias = jnp.take_along_axis(bias, lists.kv_tokens[..., None, :], axis=4, mode="clip")
    return bias


def _paths_of_lists(controls: Controls, lists: Lists) -> tuple[Array, Array] | None:
    """The paths of the queries and keys of every list, `[batch, heads, lists, queries, levels]` and the keys last."""
    if controls.q_paths is None or controls.kv_paths is None:
        return None
    pick = jax.vmap(lambda paths, tokens: jnp.take(paths, tokens, axis=0, mode="clip"))
    shape = (lists.q_tokens.shape[0], *controls.q_paths.shape[-2:])
    of_queries = pick(jnp.broadcast_to(controls.q_paths[:, 0, 0], shape), lists.q_tokens)
    by_key = jnp.swapaxes(controls.kv_paths[:, 0, 0], 1, 2)
    of_keys = pick(jnp.broadcast_to(by_key, (len(lists.kv_tokens), *by_key.shape[1:])), lists.kv_tokens)
    return of_queries, jnp.swapaxes(of_keys, -1, -2)


def merge_bias_heads(bias: Array) -> Array:
    """`[b, kv_heads, groups, ...]` -> `[b, heads or 1, ...]`."""
    return bias.reshape(bias.shape[0], -1, *bias.shape[3:])
