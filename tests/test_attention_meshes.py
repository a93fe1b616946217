"""Attention in a caller's own `jax.shard_map`, and with arrays that lie on a mesh of explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xformer.attention import BigBird, Full, Reformer, Routing, Shape, Sinkhorn, T5Bias, Window

OPS = [Full(position=T5Bias()), Window(left=9, right=4), BigBird(block_size=8, num_random_blocks=1)]
IDS = ["full-t5", "window", "bigbird"]
CHOSEN = [Reformer(2, 8, 8), Reformer(2, 8, 8, causal=True), Routing(4, 24), Sinkhorn(16), Sinkhorn(16, causal=True)]
CHOSEN_IDS = ["reformer", "reformer-causal", "routing", "sinkhorn", "sinkhorn-causal"]


def case(op):
    """A loss by the query, a bias that all examples share and the op's parameters; and their values."""
    shape = Shape(4, 64, 64, 4, 8)
    keys = jax.random.split(jax.random.key(0), 3)
    params = op.init(keys[0], shape)
    return jax.random.normal(keys[1], (4, 64, 4, 8)), 0.1 * jax.random.normal(keys[2], (1, 4, 64, 64)), params


def gradients(attend, x, bias, params):
    loss = lambda x, bias, params: (attend(x, bias, params) ** 2).sum()
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, bias, params)


def same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op", OPS, ids=IDS)
@pytest.mark.parametrize("check", [True, False])
def test_within_shard_map_gradients_of_what_devices_share_are_summed(op, check):
    x, bias, params = case(op)
    attend = lambda x, bias, params: op(x, x, x, bias=bias, params=params)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = (P("data"), P(), P())
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check)
    same(gradients(sharded, x, bias, params), gradients(attend, x, bias, params))


@pytest.mark.parametrize("op", OPS, ids=IDS)
def test_arrays_on_a_mesh_of_explicit_axes(op):
    x, bias, params = case(op)
    attend = lambda x, bias, params: op(x, x, x, bias=bias, params=params)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    placed = jax.device_put(x, NamedSharding(mesh, P("data")))
    rest = jax.device_put((bias, params), NamedSharding(mesh, P()))
    out = jax.jit(attend)(placed, *rest)
    assert out.sharding.spec[0] == "data"
    same(gradients(attend, placed, *rest), gradients(attend, x, bias, params))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", CHOSEN, ids=CHOSEN_IDS)
@pytest.mark.parametrize("way", ["checked", "unchecked", "explicit"])
def test_what_data_choose_is_chosen_alike_on_a_mesh(op, way):
    """Every example for itself: the same pairs, mixtures and gradients, those of a weight that devices share too."""
    x, weight = case(op)[0], 1 + 0.1 * jax.random.normal(jax.random.key(1), (1, 1, 4, 8))
    constants = op.constants(jax.random.key(2), Shape(4, 64, 64, 4, 8))
    params = {"constants": constants} if constants else {}
    mask = jnp.arange(64) < jnp.array([64, 37, 61, 9])[:, None, None, None]

    def attend(x, weight, params, mask):
        return op(x * weight, x * weight, x, mask=mask, params=params or None)

    def run(attend, x, mask):
        loss = lambda x, weight: (attend(x, weight, params, mask) ** 2).sum()
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, weight)

    want, batch = run(attend, x, mask), P("data")
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    if way == "explicit":
        x, mask = jax.device_put((x, mask), NamedSharding(mesh, batch))
        weight, params = jax.device_put((weight, params), NamedSharding(mesh, P()))
        same(run(attend, x, mask), want)
        return
    options = {"mesh": mesh, "in_specs": (batch, P(), P(), batch), "out_specs": batch, "check_vma": way == "checked"}
    same(run(jax.shard_map(attend, **options), x, mask), want)
