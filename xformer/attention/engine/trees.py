"""Tokens that are nodes of trees, and which entries of a table belong to a pair of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

Array = jax.Array
NO_PATH = 2**20
"""The distance of a pair that no path joins."""


def tree_distances(q_paths: Array, kv_paths: Array, *, through_root: bool = False) -> Array:
    """The signed distance of every query and key, int32 `[..., q_len, kv_len]`.

    A path is the nodes from the root of a token's tree down to the token itself. What two paths have alike at their
    beginning ends at the lowest common ancestor: `up` edges lead from the query to it and `down` edges on to the key.

    - Where one token is an ancestor of the other, or both are the same: `down - up`, below 0 where the key is above.
    - Elsewhere the length of the path, `up + down`, below 0 where the key has the smaller number. With `through_root`
      it is the sum of both depths, the root's being 0: as if all paths led through the root.
    - `NO_PATH` in different trees, and for tokens without a path, such as padding.

    With `through_root` that is the relative structural position of Wang et al. 2019 ("Self-Attention with Structural
    Position Representations").

    Args:
      q_paths: int `[..., q_len, levels]`: numbers of nodes, above 0, and zeros after the token's own. Each node of a
        row has a number of its own, and they increase from a token to the next.
      kv_paths: int `[..., kv_len, levels]`.
      through_root: see above.
    """
    return pair_distances(q_paths, jnp.swapaxes(kv_paths, -1, -2), through_root)


def tree_paths(parents: Array, levels: int, mask: Array | None = None) -> Array:
    """The paths of tokens whose parents are known, int32 `[..., length, levels]`, for `tree_distances`.

    Node `i + 1` is the token at place `i`. What is deeper than `levels` has the path of its ancestor at that depth.

    Args:
      parents: int `[..., length]`, the place of each token's parent; negative at the root of a tree. No token is its
        own ancestor.
      levels: longest path, in nodes.
      mask: `[..., length]`, above 0 at real tokens; the others have no path. None: all are real.
    """
    length = parents.shape[-1]
    # Place `length` stands for what is above a root, and is its own parent.
    above = jnp.where(parents < 0, length, parents).astype(jnp.int32)
    above = jnp.concatenate([above, jnp.full_like(above[..., :1], length)], axis=-1)
    at = lambda table, places: jnp.take_along_axis(table, places, axis=-1, mode="clip")
    jumps, depth = [above], (above < length).astype(jnp.int32)  # of each token its 1st, 2nd, 4th, ... ancestor
    for _ in range(max(length - 1, 1).bit_length()):
        depth = depth + at(depth, jumps[-1])
        jumps.append(at(jumps[-1], jumps[-1]))
    place = jnp.broadcast_to(jnp.arange(length + 1, dtype=jnp.int32), above.shape)
    depth, excess = jnp.minimum(depth + 1, levels), jnp.maximum(depth + 1 - levels, 0)
    for bit, jump in enumerate(jumps):
        place = jnp.where(excess >> bit & 1 > 0, at(jump, place), place)
    nodes = []  # of each token itself, its parent, and so on; 0 above the root
    for _ in range(levels):
        nodes.append((place + 1) % (length + 1))
        place = at(above, place)
    upwards, depth = jnp.stack(nodes, axis=-1)[..., :length, :], depth[..., :length, None]
    index = depth - 1 - jnp.arange(levels, dtype=jnp.int32)
    paths = jnp.where(index >= 0, jnp.take_along_axis(upwards, jnp.maximum(index, 0), axis=-1), 0)
    return paths if mask is None else jnp.where((mask > 0)[..., None], paths, 0)


def pair_distances(q_paths: Array, kv_paths: Array, through_root: bool) -> Array:
    """`tree_distances` of paths `[..., queries, levels]` and `[..., levels, keys]`."""
    levels = q_paths.shape[-1]
    level = jnp.arange(levels, dtype=jnp.int32)[:, None]
    of_queries, of_keys = q_paths[..., None], kv_paths[..., None, :, :]  # [..., queries, levels, keys], or 1 for some
    alike = (of_queries == of_keys) & (of_queries > 0)
    shared = jnp.where(alike, levels, level).min(-2)  # the first level where they differ
    q_depth, kv_depth = _depth(q_paths, -1)[..., None], _depth(kv_paths, -2)[..., None, :]
    up, down = q_depth - shared, kv_depth - shared
    around = q_depth + kv_depth - 2 if through_root else up + down
    ahead = _node(kv_paths, -2)[..., None, :] > _node(q_paths, -1)[..., None]
    on_one_path = (up == 0) | (down == 0)
    distances = jnp.where(on_one_path, down - up, jnp.where(ahead, around, -around))
    return jnp.where(shared > 0, distances, NO_PATH)


def _depth(paths: Array, axis: int) -> Array:
    """Nodes of each path."""
    return (paths > 0).sum(axis, dtype=jnp.int32)


def _node(paths: Array, axis: int) -> Array:
    """The last node of each path, 0 where there is none."""
    levels = jnp.arange(1, paths.shape[axis] + 1, dtype=jnp.int32)
    last = (levels if axis == -1 else levels[:, None]) == jnp.expand_dims(_depth(paths, axis), axis)
    return jnp.where(last, paths, 0).sum(axis, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Trees:
    """A table has entries of, in this order, distances in the sequence (`2 * sequence_distance + 1`, none where that is
    0), distances in the tree (`2 * max_distance + 1`), both from negative to positive, and one of pairs without a path.

    Attributes:
      max_distance: pairs farther apart in the tree count as so far apart.
      sequence_distance: likewise in the sequence; 0: a pair has one entry, that of the tree.
      through_root: see `tree_distances`.
    """

    max_distance: int
    sequence_distance: int
    through_root: bool

    @property
    def before(self) -> int:
        """Entries of distances in the sequence."""
        return 2 * self.sequence_distance + 1 if self.sequence_distance else 0

    @property
    def size(self) -> int:
        """Entries of a table."""
        return self.before + 2 * self.max_distance + 2

    def entries(self, distances: Array, q_positions: Array, kv_positions: Array) -> tuple[Array, ...]:
        """The one or two entries of pairs, int: of their distances in the tree, and of where the tokens stand."""
        clipped = jnp.clip(distances, -self.max_distance, self.max_distance) + self.max_distance
        in_tree = self.before + jnp.where(distances >= NO_PATH, 2 * self.max_distance + 1, clipped)
        if not self.sequence_distance:
            return (in_tree,)
        reach = self.sequence_distance
        return in_tree, jnp.clip(kv_positions - q_positions, -reach, reach) + reach
