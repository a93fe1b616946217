"""The forward pass of one row of tiles: an online softmax over its key tiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.layout import Group
from xformer.attention.meshes import varying
from xformer.attention.rows import LOWEST, Place, Rows

Array = jax.Array


def forward(rows: Rows, group: Group, operands: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Output `[batch, q_block, kv_heads, groups, head_dim]` and log-sum-exp `[batch, q_block, kv_heads, groups]`."""
    query, value_table = rows.query(operands[0]), rows.tables.value
    table_row = rows.table_row(query)
    by_row = value_table is not None and rows.relative.by_row

    def step(carry: Any, place: Place, tested: bool) -> Any:
        top, norm, out, by_distance = carry
        key, value = rows.keys(rows.key, place), rows.keys(rows.value, place)
        scores = rows.scores(query, table_row, key, place, tested)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        norm = norm * shrink + weights.sum(-1)
        weights = weights * rows.kept(place, key.shape[1])
        out = out * shrink[..., None] + rows.einsum("nms,nsd->nmd", weights, value)
        if by_row:
            by_distance = by_distance * rows.full(shrink)[..., None]
            by_distance = by_distance + rows.relative.collapse(rows.full(weights), rows.starts(place))
        elif value_table is not None:
            near, spread = rows.relative.near(value_table, rows.starts(place)), rows.relative.spread(rows.full(weights))
            out = out + rows.flat(rows.einsum("bkgcqw,kgcwd->bkgqd", spread, near))
        return new_top, norm, out, by_distance

    per_query = query.shape[:-1]
    # Above LOWEST by far, so that the weight of a masked pair is zero even before any other pair is seen.
    top = jnp.full(per_query, LOWEST / 2, rows.dtype)
    by_distance = jnp.zeros((*rows.full(top).shape, rows.relative.size), rows.dtype) if by_row else None
    start = (top, jnp.zeros(per_query, rows.dtype), jnp.zeros_like(query), by_distance)
    top, norm, out, by_distance = rows.chunks(step, varying(start, rows.axes), group, operands)
    if by_row:
        out = out + rows.flat(rows.einsum("bkgqn,kgnd->bkgqd", by_distance, value_table))
    attended = norm > 0
    norm = jnp.where(attended, norm, 1.0)
    # -LOWEST makes every weight of a row with nothing to attend to zero in the backward pass too.
    lse = jnp.where(attended, top + jnp.log(norm), -LOWEST)
    return rows.by_token(out / norm[..., None]), rows.by_token(lse)
