"""Relative positions of tokens in trees, such as those of a dependency grammar."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine.relative_tiles import Relative
from xformer.attention.engine.trees import Trees
from xformer.attention.position_term import FARTHEST, Position, drawn
from xformer.attention.shape import Shape
from xformer.attention.signature import Params
from xformer.checks import check_integer

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ShawTree(Position):
    """Shaw's relative representations by distance in a tree (Wang et al. 2019, "Self-Attention with Structural Position
    Representations", relative structural positions).

    A call says where the tokens are in their trees, each example its own: `paths`, or `distances` of all pairs. The
    signed distance of a pair is that of `xformer.attention.tree_distances`, clipped to `max_distance`; its vector is
    used as that of `Shaw` is (Shaw et al. 2018, equations 3 and 4). Pairs in different trees, and those of a token
    without one, have a vector of their own.

    Parameters, float32: `key` `[2 * max_distance + 1, head_dim]`, whose row `max_distance + d` belongs to the distance
    `d`, and `apart_key` `[1, head_dim]`, of pairs that no path joins; with `sequence_distance` `sequence_key`
    `[2 * sequence_distance + 1, head_dim]`; with `values` likewise `value`, `apart_value` and `sequence_value`, as deep
    as the values. With `per_head` each is `[num_heads, ...]`.

    Args:
      max_distance: edges that are told apart.
      values: whether values get a term too.
      through_root: pairs of which none is above the other count the edges through the root, as in the paper; False:
        those of the path that joins them.
      per_head: each head has tables of its own; False: heads share them.
      sequence_distance: distances in the sequence count too, told apart up to so many tokens: the vector of a pair is
        the sum of that of the tree and that of `Shaw`. 0: they don't.
    """

    max_distance: int = 8
    values: bool = True
    through_root: bool = False
    per_head: bool = False
    sequence_distance: int = 0

    def __post_init__(self) -> None:
        check_integer("ShawTree.max_distance", self.max_distance, at_most=FARTHEST, at_least=1)
        check_integer("ShawTree.sequence_distance", self.sequence_distance, at_most=FARTHEST, at_least=0)
        for name in ("values", "through_root", "per_head"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise ValueError(f"ShawTree.{name} must be True or False, got {value!r}")

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """The defaults: how deep trees are does not follow from how long texts are."""
        return cls(**overrides)

    @property
    def reads_trees(self) -> bool:
        return True

    @property
    def by_distance(self) -> bool:
        return False

    @property
    def trees(self) -> Trees:
        """Which entries of the tables belong to a pair."""
        return Trees(self.max_distance, self.sequence_distance, self.through_root)

    @property
    def num_embeddings(self) -> int:
        return self.trees.size

    def init(self, rng: Array, shape: Shape) -> Params:
        depths = {"key": shape.head_dim, **({"value": shape.value_depth} if self.values else {})}
        rows = {"": 2 * self.max_distance + 1, "apart_": 1}
        if self.sequence_distance:
            rows["sequence_"] = 2 * self.sequence_distance + 1
        heads = (shape.num_heads,) if self.per_head else ()
        sizes = {
            f"{part}{kind}": (*heads, count, depth) for kind, depth in depths.items() for part, count in rows.items()
        }
        # What is the sum of two vectors starts as one of Shaw's.
        scale = (shape.head_dim * (2 if self.sequence_distance else 1)) ** -0.5
        return drawn(rng, sizes, scale)

    def relative(self, params: Params, *, num_heads: int, causal: bool, kv_len: int) -> Relative:
        value = self._table(params, "value") if self.values else None
        return Relative(key_table=self._table(params, "key"), value_table=value, trees=self.trees)

    def _table(self, params: Params, kind: str) -> Array:
        """The table of `Trees`, `[num_heads or 1, entries, depth]`."""
        parts = ["sequence_", "", "apart_"] if self.sequence_distance else ["", "apart_"]
        table = jnp.concatenate([params[f"{part}{kind}"] for part in parts], axis=-2)
        return table if self.per_head else table[None]
