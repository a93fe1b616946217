"""One attention call in the engine's terms: arrays with split heads, what attends to what, static choices."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.pattern import Pattern

Array = jax.Array


class Inputs(NamedTuple):
    """What the result is differentiated by.

    query `[batch, q_len, kv_heads, groups, head_dim]`; key `[batch, kv_len, kv_heads, head_dim]`; value likewise, of
    any depth; bias `[batch, kv_heads, groups, q_len, kv_len]` with axes of size 1 where it broadcasts; sinks
    `[kv_heads, groups]`, a logit without a value for every query of a head.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    relative: Relative | None = None
    sinks: Array | None = None

    def examples(self, first: Array, size: int) -> Inputs:
        """Those of `size` examples of the batch."""
        query, key, value, bias = (_examples(x, first, size) for x in self[:4])
        return self._replace(query=query, key=key, value=value, bias=bias)


class Controls(NamedTuple):
    """What decides which pairs attend. Axes of size 1 broadcast.

    Attributes:
      plan: the tiles to visit; the dense implementation needs none.
      first_query_tile, first_key_tile: int scalars, indices of the first query and key tile that this device holds.
      first_example: int scalar, index of the first example of the batch that this device holds.
      mask: bool `[b, k, g, q_len or 1, kv_len or 1]`.
      q_segments, kv_segments: int `[b, 1, 1, length, 1]` and `[b, 1, 1, 1, length]`.
      offset: int scalar, the position of the first query.
      q_positions, kv_positions: int `[b, 1, 1, length, 1]` and `[b, 1, 1, 1, length]`, where tokens stand; None: in
        order, from `offset` and from 0 on.
      dropout_rng: a key, with `Settings.dropout_rate` above 0.
      q_codes, kv_codes: int `[b, codes, 1, length, 1]` and `[b, codes, 1, 1, length]`, numbers of each token that
        `Settings.code_pairs` tests pairs by; with one list of key tiles for all heads.
      q_paths, kv_paths: int `[b, 1, 1, length, levels]` and `[b, 1, 1, levels, length]`, the way to each token from the
        root of its tree, see `trees.tree_distances`.
      distances: int `[b, 1, 1, q_len, kv_len]`, of pairs in their trees, in place of paths.
    """

    plan: Any  # a TilePlan, or the Shares of one
    mask: Array | None = None
    q_segments: Array | None = None
    kv_segments: Array | None = None
    offset: Array | int = 0
    dropout_rng: Array | None = None
    first_query_tile: Array | int = 0
    first_key_tile: Array | int = 0
    first_example: Array | int = 0
    q_positions: Array | None = None
    kv_positions: Array | None = None
    q_codes: Array | None = None
    kv_codes: Array | None = None
    q_paths: Array | None = None
    kv_paths: Array | None = None
    distances: Array | None = None

    def examples(self, first: Array, size: int) -> Controls:
        """Those of `size` examples of the batch."""
        by_example = [
            "mask", "q_segments", "kv_segments", "q_positions", "kv_positions", "q_codes", "kv_codes", "q_paths",
            "kv_paths", "distances",
        ]  # fmt: skip
        arrays = {name: _examples(getattr(self, name), first, size) for name in by_example}
        return self._replace(**arrays, first_example=self.first_example + first)


class CodePairs:
    """Which pairs attend, by numbers of the tokens that depend on data. Subclasses are frozen dataclasses."""

    def allows(self, q_codes: Array, kv_codes: Array) -> Array:
        """`[b, codes, 1, queries, 1]` and `[b, codes, 1, 1, keys]` -> bool `[b, 1, 1, queries, keys]`."""
        raise NotImplementedError


def _examples(x: Any, first: Array, size: int) -> Any:
    return x if x is None or x.shape[0] == 1 else jax.lax.dynamic_slice_in_dim(x, first, size)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static choices of a call.

    Attributes:
      softcap: scaled scores become `softcap * tanh(score / softcap)`; None: they stay.
      pattern: tested pair by pair, where positions are known only at run time.
      code_pairs: tested pair by pair, where there are `Controls.q_codes`.
      delta_given: the backward pass is given minus `Given.delta` as the gradient of the log-sum-exp, by a caller who
        merges the output with others and knows the delta of the whole; it then needs no output.
      batch_step: examples computed at a time, one such share of the batch after the other; None for all.
      step_scores: query tiles of the forward pass are computed together as long as a step has no more scores than that,
        over all examples and heads; 0: one after the other.
    """

    scale: float
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    pattern: Pattern | None = None
    precision: Any = None
    batch_step: int | None = None
    step_scores: int = 0
    softcap: float | None = None
    code_pairs: CodePairs | None = None
    delta_given: bool = False
