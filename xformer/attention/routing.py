"""Routing attention: tokens attend to those of the same clusters, found by online k-means (Roy et al. 2021)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.call import Call
from xformer.attention.chosen_pairs import ChosenPairs, Lists, attend_lists, list_flops, list_plan, real_tokens
from xformer.attention.dtypes import exact
from xformer.attention.engine.operands import CodePairs, Controls, Inputs, Settings
from xformer.attention.engine.query_tile import merge_heads
from xformer.attention.engine.tile_plan import TilePlan, ceil_div, round_up
from xformer.attention.engine.tile_policy import even_block, largest_tile
from xformer.attention.interface import CONSTANTS
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.attention.token_rows import take_tokens
from xformer.checks import check_integer

Array = jax.Array
WORD = 31  # clusters whose membership one number holds


class Members(NamedTuple):
    """Which tokens are in which cluster, those of one token after the other, by their closeness to its centre.

    Attributes:
      queries, keys: int32 `[batch, heads, clusters, window]`, positions; the length where there are too few tokens.
    """

    queries: Array
    keys: Array


@dataclasses.dataclass(frozen=True)
class Routing(ChosenPairs):
    """Every cluster takes the `window` queries and the `window` keys nearest to its centre; they attend to each other.

    Nearness is the product with the centre of queries and keys of length 1 (section 4.1, algorithm 1), before rotary
    positions turn them; among real tokens only, queries at the positions of keys that a mask hides are none. Scores are
    those of queries and keys as they are. A query of several clusters attends to the keys of them all in one softmax,
    where the released code takes a mean of several; one that no cluster takes has zeros for output, which in the paper
    is why half of the heads are local: `{"name": "layers", "layers": ({"name": "local"}, {"name": "routing"})}` takes
    turns. Causal attention is refused: whether a token is among the nearest depends on later ones.

    Constants: `centres`, float32 `[num_heads, num_clusters, head_dim]`, of length 1. `update`, which our layers call in
    training, moves each centre towards the mean of the queries and that of the keys nearest to it, `decay` being what
    stays (algorithm 1, with means for sums, so that neither length nor batch counts).

    Attributes:
      num_clusters: k of the paper, about the square root of the length.
      window: tokens of a cluster, w of the paper, about the length / `num_clusters`.
      decay: lambda of algorithm 1.
      seed: of the centres where none are given.
    """

    num_clusters: int = 32
    window: int = 64
    decay: float = 0.999
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_clusters", "window"):
            check_integer(f"Routing.{name}", getattr(self, name))
        check_integer("Routing.seed", self.seed, at_least=0)
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float) or not 0 <= self.decay <= 1:
            raise ValueError(f"Routing.decay must be a number from 0 to 1, got {self.decay!r}")
        if self.causal:
            raise NotImplementedError(
                "Routing.causal must be False: Routing cannot be causal, a cluster takes the nearest of all tokens, "
                "later ones included; Reformer(causal=True) can"
            )

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """As many clusters of so many tokens as hold every position once: near the square root, 8 tokens or more."""
        window = overrides.get("window", max(1 << round(math.log2(max(num_positions, 1)) / 2), 8))
        return cls(**{"window": window, "num_clusters": ceil_div(num_positions, window), **overrides})

    def sees_all(self, num_positions: int) -> bool:
        return self.window >= num_positions

    # The centres.

    def constants(self, rng: Array, shape: Shape) -> Params:
        return {"centres": _unit(jax.random.normal(rng, (shape.num_heads, self.num_clusters, shape.head_dim)))}

    def update(self, constants: Params, query: Array, key: Array, mask: Array | None) -> Params:
        centres = constants["centres"]
        (q_len, heads, _), (kv_len, kv_heads, _) = query.shape[-3:], key.shape[-3:]
        real = jnp.ones((*query.shape[:-3], heads, 1, kv_len), bool)
        if mask is not None:
            real = jnp.broadcast_to(mask > 0, real.shape[:-2] + jnp.broadcast_shapes(mask.shape[-2:], real.shape[-2:]))
        real = real[..., 0, :].reshape(-1, heads, kv_len)
        of_queries = real if q_len == kv_len else jnp.ones((len(real), heads, q_len), bool)
        query, key = (_unit(exact(x)).reshape(-1, *x.shape[-3:]) for x in (query, key))
        key = jnp.repeat(key, heads // kv_heads, axis=2)
        means, counts = zip(_means(centres, query, of_queries), _means(centres, key, real), strict=True)
        parts = sum(jnp.where(count > 0, 1, 0) for count in counts)
        mean = sum(means) / jnp.maximum(parts, 1)
        moved = _unit(self.decay * centres + (1 - self.decay) * mean)
        return {"centres": jnp.where(parts > 0, moved, centres).astype(centres.dtype)}

    # Which tokens are in a cluster.

    def choose(self, call: Call, params: Params) -> Members:
        q_len, (num_heads, head_dim) = call.lengths[0], call.query.shape[2:]
        centres = jax.lax.stop_gradient(params[CONSTANTS]["centres"])
        if centres.shape != (want := (num_heads, self.num_clusters, head_dim)):
            raise ValueError(f"{self} needs constants centres {want}, got {centres.shape}")
        real, at = real_tokens(call), call.offset("Routing") + jnp.arange(q_len)
        of_queries = jnp.take(real, at, axis=2, mode="fill", fill_value=False)
        key = jnp.repeat(_unit(exact(call.key)), num_heads // call.key.shape[2], axis=2)

        def nearest(x: Array, real: Array) -> Array:
            length = x.shape[1]
            near = jnp.einsum("blhd,hcd->bhcl", x, centres.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)
            near, tokens = jax.lax.top_k(jnp.where(real[:, :, None], near, -jnp.inf), min(self.window, length))
            return jnp.where(near == -jnp.inf, length, tokens.astype(jnp.int32))

        return Members(nearest(_unit(exact(call.query)), of_queries), nearest(key, real))

    def choice_flops(self, shape: Shape) -> int:
        products = (shape.q_len + shape.kv_len) * self.num_clusters * shape.head_dim
        return 2 * shape.batch * shape.num_heads * products

    def chosen_pairs(self, chosen: Members, call: Call) -> Array:
        rows, columns = (_held(x, length) for x, length in zip(chosen, call.lengths, strict=True))
        step = lambda pairs, held: (pairs | (held[0][..., None] & held[1][..., None, :]), None)
        start = jnp.zeros((*rows.shape[:2], *call.lengths), bool)
        return jax.lax.scan(step, start, (jnp.moveaxis(rows, 2, 0), jnp.moveaxis(columns, 2, 0)))[0]

    # Attention, cluster by cluster.

    def attend_chosen(
        self, chosen: Members, call: Call, inputs: Inputs, controls: Controls, settings: Settings
    ) -> tuple[Array, Array]:
        q_len, kv_len = call.lengths
        below = jnp.asarray(_below(self.num_clusters))  # [clusters, words], the clusters before each
        codes: list[Array] = []
        for tokens, length, words in ((chosen.queries, q_len, below), (chosen.keys, kv_len, None)):
            member = _words(_held(tokens, length))[:, :, None]  # [batch, heads, 1, words, length]
            member = jnp.broadcast_to(member, (*tokens.shape[:3], *member.shape[3:]))
            of_tokens = jnp.take_along_axis(member, tokens[:, :, :, None], -1, mode="fill", fill_value=0)
            if words is not None:
                of_tokens &= words[:, :, None]
            codes.append(jnp.concatenate([(tokens < length).astype(jnp.int32)[:, :, :, None], of_tokens], 3))
        lists = Lists(
            query=take_tokens(merge_heads(inputs.query), chosen.queries),
            key=take_tokens(inputs.key, chosen.keys),
            value=take_tokens(inputs.value, chosen.keys),
            q_codes=codes[0],
            kv_codes=codes[1],
            q_tokens=jnp.minimum(chosen.queries, q_len - 1),
            kv_tokens=jnp.minimum(chosen.keys, kv_len - 1),
        )
        out, lse = attend_lists(lists, self._plan(q_len, kv_len), FirstCluster(), inputs, controls, settings)
        return _merge_clusters(out, lse, chosen.queries, q_len, inputs.sinks)

    def _plan(self, q_len: int, kv_len: int) -> TilePlan:
        sizes = [min(self.window, length) for length in (q_len, kv_len)]
        q_block, kv_block = (even_block(size, most) for size, most in zip(sizes, largest_tile(), strict=True))
        every = np.arange(ceil_div(sizes[1], kv_block))[None]
        return list_plan(np.broadcast_to(every, (ceil_div(sizes[0], q_block), every.size)), q_block, kv_block)

    def chosen_flops(self, shape: Shape, relative: Any) -> int:
        plan = self._plan(shape.q_len, shape.kv_len)
        queries = round_up(min(self.window, shape.q_len), plan.q_block)
        return self.num_clusters * list_flops(plan, queries, shape, relative)


@dataclasses.dataclass(frozen=True)
class FirstCluster(CodePairs):
    """The pairs of a cluster that no cluster before it has: of a query the codes say in which of those it is too."""

    def allows(self, q_codes: Array, kv_codes: Array) -> Array:
        both = [q_codes[:, index, None] & kv_codes[:, index, None] for index in range(q_codes.shape[1])]
        return (both[0] != 0) & functools.reduce(jnp.logical_and, [x == 0 for x in both[1:]])


def _unit(x: Array) -> Array:
    """Vectors of length 1; zeros stay so."""
    length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    return x / jnp.where(length == 0, jnp.ones_like(length), length)


def _means(centres: Array, x: Array, real: Array) -> tuple[Array, Array]:
    """The mean of the real tokens nearest to each centre `[heads, clusters, depth]`, and their number `[..., 1]`."""
    x = jnp.where(jnp.moveaxis(real, 1, 2)[..., None], x, 0)
    near = jnp.einsum("blhd,hcd->bhlc", x, centres.astype(x.dtype))
    nearest = (near.argmax(-1)[..., None] == jnp.arange(centres.shape[1])) & real[..., None]
    sums = jnp.einsum("bhlc,blhd->hcd", nearest.astype(x.dtype), x)
    count = nearest.sum((0, 2))[..., None]
    return sums / jnp.maximum(count, 1), count


def _held(tokens: Array, length: int) -> Array:
    """Whether each token is in each cluster, bool `[batch, heads, clusters, length]`."""
    flat = tokens.reshape(-1, tokens.shape[-1])
    held = jnp.zeros((len(flat), length), bool).at[jnp.arange(len(flat))[:, None], flat].set(True, mode="drop")
    return held.reshape(*tokens.shape[:3], length)


def _words(held: Array) -> Array:
    """The clusters of every token as bits of numbers, int32 `[batch, heads, words, length]`."""
    clusters = held.shape[2]
    held = jnp.pad(held, [(0, 0), (0, 0), (0, -clusters % WORD), (0, 0)])
    held = held.reshape(*held.shape[:2], -1, WORD, held.shape[3])
    return (held.astype(jnp.int32) << jnp.arange(WORD, dtype=jnp.int32)[:, None]).sum(3, dtype=jnp.int32)


def _below(clusters: int) -> np.ndarray:
    """For each cluster the bits of those before it, int32 `[clusters, words]`."""
    before = np.arange(round_up(clusters, WORD)) < np.arange(clusters)[:, None]
    bits = before.reshape(clusters, -1, WORD).astype(np.int64) << np.arange(WORD)
    return bits.sum(-1).astype(np.int32)


def _merge_clusters(out: Array, lse: Array, tokens: Array, length: int, sinks: Array | None) -> tuple[Array, Array]:
    """Output `[batch, length, heads, depth]` and log-sum-exp of the queries `tokens` of all clusters, and of sinks."""
    batch, heads, clusters, window, depth = out.shape
    out, lse, tokens = (x.reshape(batch * heads, clusters * window, *x.shape[4:]) for x in (out, lse, tokens))
    at = jnp.arange(batch * heads)[:, None], tokens
    top = jnp.full((batch * heads, length), -jnp.inf, lse.dtype).at[at].max(jax.lax.stop_gradient(lse), mode="drop")
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(-1).astype(lse.dtype), batch)[:, None]
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
    shares = jnp.exp(lse - jnp.take_along_axis(top, tokens, 1, mode="clip"))
    total = jnp.zeros_like(top).at[at].add(shares, mode="drop")
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    seen = total != 0
    total = jnp.where(seen, total, jnp.ones_like(total))
    summed = jnp.zeros((batch * heads, length, depth), out.dtype).at[at].add(shares[..., None] * out, mode="drop")
    by_token = lambda x: jnp.moveaxis(x.reshape(batch, heads, *x.shape[1:]), 1, 2)
    lse = jnp.where(seen, top + jnp.log(total), jnp.asarray(-jnp.inf, lse.dtype))
    return by_token(summed / total[..., None]), by_token(lse)
