"""Plans of layers as data: a plan serves the calls that it was made for and no others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import refuses

from xformer.attention import BigBird, Full, Options, Shape, Shaw, Window

SHAPE = Shape(1, 64, 64, 2, 4)
OP = BigBird(block_size=4, num_random_blocks=2, num_global_blocks=1)


def inputs(length=64, heads=2):
    return (jax.random.normal(key, (1, length, heads, 4)) for key in jax.random.split(jax.random.key(0), 3))


def plan_of(op, layer=1, shape=SHAPE):
    return jax.tree.map(lambda x: x[layer], op.plans(shape, 3))


def test_a_plan_attends_as_its_layer():
    q, k, v = inputs()
    for layer in range(3):
        np.testing.assert_allclose(
            OP(q, k, v, plan=plan_of(OP, layer)), OP.at_layer(layer)(q, k, v), rtol=1e-5, atol=1e-6
        )


def test_a_causal_call_takes_causal_plans_only():
    q, k, v = inputs()
    for call in (lambda: dataclasses.replace(OP, causal=True)(q, k, v, plan=plan_of(OP)),
                 lambda: OP(q, k, v, is_causal=True, plan=plan_of(OP)),
                 lambda: OP(q, k, v, plan=plan_of(dataclasses.replace(OP, causal=True)))):  # fmt: skip
        with refuses(ValueError, "BigBird", "causal=True", "causal=False"):
            call()
    causal = dataclasses.replace(OP, causal=True)
    np.testing.assert_array_equal(
        OP(q, k, v, is_causal=True, plan=plan_of(causal)), causal(q, k, v, plan=plan_of(causal))
    )


@pytest.mark.parametrize(
    "op", [Window(), Full(), BigBird(block_size=8), dataclasses.replace(OP, position=Shaw(4))], ids=str
)
def test_the_plan_of_another_op_is_refused(op):
    q, k, v = inputs()
    with refuses(ValueError, "the plan was made for BigBird"):
        op(q, k, v, plan=plan_of(OP), params=op.init(jax.random.key(0), SHAPE))


def test_a_plan_of_other_sizes_is_refused():
    plan = plan_of(OP)
    for length, heads, word in ((32, 2, "q_len 64"), (64, 4, "num_heads 2")):
        q, k, v = inputs(length, heads)
        with refuses(ValueError, word):
            OP(q, k, v, plan=plan)
    q, k, v = inputs()
    with refuses(ValueError, "one layer's slice"):
        OP(q, k, v, plan=OP.plans(SHAPE, 3))
    with refuses(ValueError, "one layer's slice", "TilePlan"):
        OP(q, k, v, plan=OP.tile_plan(64, 64, 2))


@pytest.mark.parametrize("causal", [False, True])
def test_weights_honour_the_plan(causal):
    op = dataclasses.replace(OP, causal=causal)
    q, k, v = inputs()
    mask = jnp.arange(64)[None, None, None] < 50
    weights = op.attention_weights(q, k, v, Options(mask=mask, plan=plan_of(op, 2)))
    want = op.at_layer(2).attention_weights(q, k, v, Options(mask=mask))
    np.testing.assert_allclose(weights, want, rtol=1e-6, atol=1e-7)
    assert np.abs(weights - op.attention_weights(q, k, v, Options(mask=mask))).max() > 1e-2
    out = op(q, k, v, mask=mask, plan=plan_of(op, 2))
    np.testing.assert_allclose(jnp.einsum("bhqk,bkhd->bqhd", weights, v), out, rtol=1e-5, atol=1e-6)


def test_all_layers_have_one_structure():
    structures = {jax.tree.structure(plan_of(OP, layer)) for layer in range(3)}
    assert len(structures) == 1
