"""Which ops can attend from one sequence to another."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xformer.attention import Attention, Shape, entries
from xformer.checks import ArgumentError
from xformer.nn.params import has_params

SLOT = "cross_attention"


def check(attention: Attention, context_len: int, num_heads: int, head_dim: int, num_kv_heads: int | None) -> None:
    """Raises ArgumentError where an op, or one of a stack, can't read another sequence of up to `context_len` tokens.

    A position of the one sequence means none of the other. So an op that depends on positions is refused, by its own
    words: with as many queries as keys it would take position i of both for the same. What is left takes each query
    alike, so that no later token of the target moves an earlier one.
    """
    ops = entries(attention)
    for index, op in enumerate(ops):
        path = f"{SLOT}.layers[{index}]" if len(ops) > 1 else SLOT
        if op.causal:
            raise ArgumentError(
                f"{path}.causal", f"{path}.causal must be False: a target sees its whole source, got {op}"
            )
        if (longest := getattr(op, "max_len", None)) is not None and longest < context_len:
            what = f"{path}.max_len must be at least {context_len}, the positions of the source, got {longest}"
            raise ArgumentError(f"{path}.max_len", what)
        try:
            jax.eval_shape(lambda op=op: _call(op, context_len, num_heads, head_dim, num_kv_heads or num_heads))
        except (ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split()).partition(": with q_len ")[0]  # nobody can give a query_offset here
            raise ArgumentError(
                f"{path}.name",
                f"{path} takes an op to which positions mean nothing, such as full or linformer without a position "
                f"term, as those of a target are none of its source; {reason}",
            ) from error


def _call(op: Attention, context_len: int, num_heads: int, head_dim: int, num_kv_heads: int) -> jax.Array:
    """The op with another number of queries than of keys, and padding."""
    q_len = context_len + 1
    query = jnp.zeros((1, q_len, num_heads, head_dim))
    key = jnp.zeros((1, context_len, num_kv_heads, head_dim))
    params = None
    if has_params(op):
        params = op.init(jax.random.key(0), Shape(1, q_len, context_len, num_heads, head_dim, num_kv_heads))
    return op(query, key, key, mask=jnp.ones((1, 1, 1, context_len), bool), params=params)
