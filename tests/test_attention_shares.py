"""On a CPU a batch is computed in shares that fit the caches: nothing but the order of the work may show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xformer.attention import BigBird, Full, Shape, Shaw, T5Bias, Window
from xformer.attention.engine import attend as engine

SHAPE = Shape(6, 40, 40, 4, 8, 2)
OPS = [Full(causal=True, position=Shaw(3)), Window(left=5, right=3, position=T5Bias()), BigBird(block_size=8)]


def outcome(op, bias_batch, broadcast_dropout):
    """Output and gradients of everything, with a padding mask and dropout."""
    keys = jax.random.split(jax.random.key(0), 6)
    heads = (SHAPE.num_heads, SHAPE.kv_heads, SHAPE.kv_heads)
    qkv = [jax.random.normal(key, (6, 40, count, 8)) for key, count in zip(keys, heads, strict=False)]
    bias = jax.random.normal(keys[3], (bias_batch, 4, 40, 40))
    mask = jnp.arange(40) < jnp.arange(35, 41)[:, None, None, None]
    dropout = {"dropout_rng": keys[4], "dropout_rate": 0.2, "broadcast_dropout": broadcast_dropout}

    def run(qkv, bias, params):
        return op(*qkv, bias=bias, mask=mask, params=params, deterministic=False, **dropout)

    out, pull = jax.vjp(run, qkv, bias, op.init(keys[5], SHAPE))
    return jax.tree.leaves((out, pull(jnp.cos(out))))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("broadcast_dropout", [True, False])
@pytest.mark.parametrize("bias_batch", [1, 6])
@pytest.mark.parametrize("op", OPS, ids=["full", "window", "bigbird"])
def test_shares_of_a_batch_are_the_batch(op, bias_batch, broadcast_dropout, monkeypatch):
    whole = outcome(op, bias_batch, broadcast_dropout)
    plan = op.tile_plan(40, 40, 4)
    assert engine._batch_step(6, 4, plan) is None
    tile = max(group.key_tiles.shape[3] for group in plan.groups) * plan.kv_block * plan.q_block
    monkeypatch.setattr(engine, "STEP_SCORES", 2 * 4 * tile)
    assert engine._batch_step(6, 4, plan) == 2
    for share, expected in zip(outcome(op, bias_batch, broadcast_dropout), whole, strict=True):
        np.testing.assert_allclose(share, expected, rtol=2e-5, atol=2e-5)
