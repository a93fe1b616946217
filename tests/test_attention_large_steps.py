"""The tiled engine as accelerators run it: larger tiles, query tiles together, the same numbers."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xformer import cost
from xformer.attention import BigBird, Full, Longformer, Shape, Shaw, T5Bias, Window
from xformer.attention.engine import attend as engine
from xformer.attention.engine import tile_policy
from xformer.attention.kernels import Device, aimed_at

CARD = Device("gpu", "NVIDIA H100 80GB HBM3", "cuda", (9, 0))
HEADS, KV_HEADS, DEPTH = 2, 1, 8
OPS = {
    "full, T5": (Full(causal=True, position=T5Bias()), 1100),
    "full, segments": (Full(), 1100),
    "window, Shaw": (Window(left=9, right=3, position=Shaw(max_distance=4)), 300),
    "bigbird": (BigBird(block_size=8, num_random_blocks=1), 203),
    "longformer": (Longformer(window=8, dilation=2, num_global_tokens=2), 131),
}


def arrays(length, batch=2):
    keys = jax.random.split(jax.random.key(0), 3)
    heads = HEADS, KV_HEADS, KV_HEADS
    return [jax.random.normal(key, (batch, length, n, DEPTH)) for key, n in zip(keys, heads, strict=True)]


def run(op, call, **options):
    params = op.init(jax.random.key(1), Shape(2, *[call[0].shape[1]] * 2, HEADS, DEPTH, KV_HEADS))
    loss = lambda q, k, v, p: (op(q, k, v, params=p, **options) ** 2).sum()
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)), compiler_options=quick)(*call, params)


def same(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * max(np.abs(y).max(), 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("together", [2**24, 5000], ids=["all", "some"])
@pytest.mark.parametrize("name", OPS)
def test_the_numbers_of_the_reference(name, together, monkeypatch):
    """With all query tiles in a step, and with some, the last step having fewer."""
    monkeypatch.setattr(engine, "LARGE_STEP_SCORES", together)
    monkeypatch.setattr(tile_policy, "LARGE_TILE", (512, 512) if together == 2**24 else (64, 128))
    op, length = OPS[name]
    options = {"segment_ids": jnp.arange(length)[None] // 150} if "segments" in name else {}
    call = arrays(length)
    want = run(dataclasses.replace(op, implementation="reference"), call, **options)
    with aimed_at(CARD):
        same(run(dataclasses.replace(op, implementation="xla"), call, **options), want)


def test_dropout_is_that_of_steps_one_by_one():
    op, call = BigBird(block_size=8, num_random_blocks=1, implementation="xla"), arrays(100)
    dropout = {"dropout_rng": jax.random.key(2), "dropout_rate": 0.4, "deterministic": False}
    want = run(op, call, **dropout)
    with aimed_at(CARD):
        same(run(op, call, **dropout), want)


def longest_loop(op, length, batch=1):
    """Trips of the longest loop of a forward pass."""
    spec = jax.ShapeDtypeStruct((batch, length, HEADS, DEPTH), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x: op(x, x, x))(spec)
    found = [1]

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                found.append(eqn.params["length"])
            for param in eqn.params.values():
                inner = getattr(param, "jaxpr", param)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jaxpr.jaxpr)
    return max(found)


def test_few_large_steps():
    """Of BigBird's 512 query tiles all at once; of full attention tiles four times as large."""
    bigbird, full = BigBird(block_size=16, implementation="xla"), Full(implementation="xla")
    assert longest_loop(bigbird, 8192) > 200 and longest_loop(full, 8192) == 32
    with aimed_at(CARD):
        assert longest_loop(bigbird, 8192) < 20 and longest_loop(full, 8192) == 8


def test_steps_are_bounded(monkeypatch):
    """A large batch is computed in shares, so that no step has more scores than memory bears."""
    plan = Full().tile_plan(2048, 2048, 64)
    with aimed_at(CARD):
        large = Full().tile_plan(2048, 2048, 64)
        assert large.q_block * large.kv_block == 2**20
        assert engine._batch_step(12, 64, large) == 1 and engine._batch_step(12, 16, large) == 4
        assert engine._batch_step(12, 1, large) is None
    assert engine._batch_step(12, 64, plan) == 1


@pytest.mark.parametrize("device", [None, CARD], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", OPS)
def test_the_cost_is_that_of_what_runs(name, device):
    op, length = OPS[name]
    op = dataclasses.replace(op, implementation="xla")
    shape = Shape(2, length, length, HEADS, DEPTH, KV_HEADS)
    call = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(length)]
    params = jax.eval_shape(lambda: op.init(jax.random.key(0), shape))
    with contextlib.nullcontext() if device is None else aimed_at(device):
        counted = cost.count(lambda p, *x: op(*x, params=p), params, *call)
        assert counted.flops == op.cost(shape).flops and not counted.uncounted
