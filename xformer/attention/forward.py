"""The forward pass of one row of tiles: an online softmax over its key tiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xformer.attention.layout import Group
from xformer.attention.meshes import varying
from xformer.attention.rows import LOWEST, Place, Rows
from xformer.attention.terms import Term

Array = jax.Array


def forward(rows: Rows, group: Group, operands: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Output `[batch, q_block, kv_heads, groups, head_dim]` and log-sum-exp `[batch, q_block, kv_heads, groups]`."""
    query, tables = rows.query(operands[0]), rows.tables
    key_term, value_term = (None if table is None else Term(rows, table, query) for table in (tables.key, tables.value))
    products = key_term.products() if key_term else []

    def step(carry: Any, place: Place) -> Any:
        top, norm, out, sums = carry
        key, value = rows.keys(rows.key, place), rows.keys(rows.value, place)
        scores = rows.scores(query, key, place, key_term.pairs(products, place) if key_term else None)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        norm = norm * shrink + weights.sum(-1)
        weights = weights * rows.kept(place, key.shape[1])
        out = out * shrink[..., None] + rows.einsum("nms,nsd->nmd", weights, value)
        if value_term:
            sums = value_term.add(sums.scaled(rows.full(shrink), place.far), weights, place)
            out = out + value_term.apply_tile(weights, place)
        return new_top, norm, out, sums

    per_query = query.shape[:-1]
    # Above LOWEST by far, so that the weight of a masked pair is zero even before any other pair is seen.
    top = jnp.full(per_query, LOWEST / 2, rows.dtype)
    sums = value_term.zeros() if value_term else None
    start = (top, jnp.zeros(per_query, rows.dtype), jnp.zeros_like(query), sums)
    top, norm, out, sums = rows.chunks(step, varying(start, rows.axes), group, operands)
    if value_term:
        out = out + value_term.apply(sums)
    attended = norm > 0
    norm = jnp.where(attended, norm, 1.0)
    # -LOWEST makes every weight of a row with nothing to attend to zero in the backward pass too.
    lse = jnp.where(attended, top + jnp.log(norm), -LOWEST)
    return rows.by_token(out / norm[..., None]), rows.by_token(lse)
