"""How an adapter makes an op's parameters: shared by the NNX and the Linen AttentionFn."""

from __future__ import annotations

import jax

from xformer.attention import Attention, Shape


def own_max_len(op: Attention) -> int | None:
    """The longest length that the parameters of the op or its position term are made for; None: any length goes."""
    lengths = [getattr(part, "max_len", None) for part in (op, getattr(op, "position", None))]
    return min((length for length in lengths if length is not None), default=None)


def init_shape(
    op: Attention,
    max_len: int | None,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None,
    value_dim: int | None = None,
) -> Shape:
    """The shape to make the op's parameters for. ValueError if `max_len` differs from the op's own."""
    own = own_max_len(op)
    if own is not None and max_len is not None and own != max_len:
        raise ValueError(f"max_len must be None or the op's own, got max_len={max_len} for {op}")
    length = own or max_len or 1
    return Shape(1, length, length, num_heads, head_dim, num_kv_heads, value_dim)


def has_params(op: Attention) -> bool:
    """Whether the op has parameters: a question of its hyperparameters, so any shape answers it."""
    shape = init_shape(op, None, 1, 1, None)
    return bool(jax.eval_shape(lambda: op.init(jax.random.key(0), shape)))
