"""Tile lists made on the device, of every example its own: sparsity that depends on data.

They take the place of a host's `TilePlan`. Only listed tiles are visited; what a list is long is static, what is on it
is not. Each example runs the engine with a plan of its own, mapped over the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.engine import attend as engine
from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.engine.tile_plan import TileGroup, TilePlan, ceil_div

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["key_tiles", "valid"], meta_fields=["q_block", "kv_block"]
)
@dataclasses.dataclass(frozen=True)
class ListedTiles:
    """The key tiles that every query tile visits.

    Attributes:
      key_tiles: int `[batch, num_heads or 1, num_query_tiles, num_tiles]`, indices of key tiles; each at most once in a
        list, where it is valid.
      valid: bool likewise; entries that are not, or whose index does not exist, are computed and attend to nothing.
      q_block, kv_block: tile sizes in tokens; the last tiles may reach past the lengths.
    """

    key_tiles: Array
    valid: Array
    q_block: int
    kv_block: int

    def pairs(self, q_len: int, kv_len: int) -> Array:
        """The pairs in listed tiles, bool `[batch, num_heads or 1, q_len, kv_len]`: for dense computation."""
        num_key_tiles = ceil_div(kv_len, self.kv_block)
        key_tiles, valid = _existing(self, num_key_tiles)
        batch, heads, queries, _ = jnp.ix_(*(jnp.arange(size) for size in key_tiles.shape))
        found = jnp.zeros((*key_tiles.shape[:3], num_key_tiles), jnp.uint8)
        found = found.at[batch, heads, queries, key_tiles].max(valid.astype(jnp.uint8)) > 0
        return jnp.repeat(jnp.repeat(found, self.q_block, 2), self.kv_block, 3)[:, :, :q_len, :kv_len]

    def plan(self, q_len: int, kv_len: int, num_heads: int) -> TilePlan:
        """The plan of one example, whose arrays here have no batch axis; see `TilePlan`."""
        wanted, got = ceil_div(q_len, self.q_block), self.key_tiles.shape[1]
        if got != wanted:
            raise ValueError(f"key_tiles must be for {wanted} query tiles of {self.q_block}, got {got}")
        key_tiles, valid = _existing(self, ceil_div(kv_len, self.kv_block))
        num_tiles = key_tiles.shape[2]
        # As for plans of the host: small tiles are attended several at a time.
        together = max(min(max(engine.STEP_SCORES // (num_heads * self.q_block), 512), 2048) // self.kv_block, 1)
        num_chunks = ceil_div(num_tiles, together)
        chunk = ceil_div(num_tiles, num_chunks)
        fill = [(0, 0), (0, 0), (0, num_chunks * chunk - num_tiles)]
        cut = lambda x: jnp.pad(x, fill).reshape(*x.shape[:2], num_chunks, chunk)
        numbers: Any = np.arange(key_tiles.shape[1], dtype=np.int32)
        listed: Any = cut(key_tiles).astype(jnp.int32)
        mask_ids: Any = jnp.where(cut(valid), 0, 1).astype(jnp.int32)
        masks = np.stack([np.full((self.q_block, self.kv_block), held) for held in (True, False)])
        return TilePlan((TileGroup(numbers, listed, mask_ids, 0, 0),), masks, self.q_block, self.kv_block)


def _existing(listed: ListedTiles, num_key_tiles: int) -> tuple[Array, Array]:
    valid = listed.valid & (listed.key_tiles >= 0) & (listed.key_tiles < num_key_tiles)
    return jnp.where(valid, listed.key_tiles, 0), valid


def attend(inputs: Inputs, controls: Controls, settings: Settings, listed: ListedTiles) -> tuple[Array, Array]:
    """`engine.attend.attend` over listed tiles. Single pairs are tested by `settings.pattern`, and by the controls."""
    batch, q_len, kv_heads, groups, _ = inputs.query.shape
    kv_len = inputs.key.shape[1]
    if listed.key_tiles.shape[0] != batch or listed.key_tiles.shape[1] not in (1, kv_heads * groups):
        raise ValueError(
            f"key_tiles must be [batch, num_heads or 1, ...] = [{batch}, {kv_heads * groups} or 1, ...], got "
            f"{listed.key_tiles.shape}"
        )
    offset = jnp.asarray(controls.offset, jnp.int32)
    controls = controls._replace(plan=None, offset=offset, first_example=jnp.arange(batch))
    shared = {"relative", "sinks", "offset", "dropout_rng", "first_query_tile", "first_key_tile"}

    def axes(arrays: Any) -> Any:
        """0 where examples have their own, None for what they share."""
        own = lambda name, x: x is not None and name not in shared and x.shape[0] == batch
        return type(arrays)(*(0 if own(name, x) else None for name, x in arrays._asdict().items()))

    in_axes = axes(inputs), axes(controls)

    def one(inputs: Inputs, controls: Controls, listed: ListedTiles) -> tuple[Array, Array]:
        with_batch = lambda x, axis: x if axis is None else x[None]
        inputs, controls = (
            Inputs(*map(with_batch, inputs, in_axes[0])),
            Controls(*map(with_batch, controls, in_axes[1])),
        )
        example: Any = controls.first_example
        controls = controls._replace(plan=listed.plan(q_len, kv_len, kv_heads * groups), first_example=example[0])
        out, lse = engine.attend(inputs, controls, settings)
        return out[0], lse[0]

    return jax.vmap(one, in_axes=(*in_axes, 0))(inputs, controls, listed)
