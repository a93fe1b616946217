"""Dropout and its masks beside JAX's and Flax's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xformer.attention.bernoulli import bernoulli, threefry
from xformer.nn.dropout import Dropout


@pytest.mark.parametrize("shape", [(), (5,), (3, 33), (2, 3, 17), (0, 4)])
@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(7), jax.random.key(3, impl="rbg")])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9999])
def test_masks_are_those_that_jax_draws(shape, key, p):
    ours = jax.jit(bernoulli, static_argnums=(1, 2))(key, p, shape)
    np.testing.assert_array_equal(ours, jax.random.bernoulli(key, p, shape))


def test_masks_of_many_keys():
    keys = jax.random.split(jax.random.key(1), 12).reshape(3, 4)
    draw = lambda of: jax.vmap(jax.vmap(lambda key: of(key, 0.3, (5, 6))))(keys)
    np.testing.assert_array_equal(draw(bernoulli), draw(jax.random.bernoulli))


def test_threefry_with_high_counts():
    """JAX's own function takes both halves of its counts in one array."""
    key, high, low = jnp.uint32([7, 2**31]), jnp.arange(9, dtype=jnp.uint32), jnp.uint32(2**32 - 1) - jnp.arange(9)
    ours = jnp.concatenate(threefry(key, high, low.astype(jnp.uint32)))
    theirs = jax.extend.random.threefry_2x32(key, jnp.concatenate([high, low.astype(jnp.uint32)]))
    np.testing.assert_array_equal(ours, theirs)


def test_on_other_devices_jax_draws():
    draw = jax.jit(lambda key: bernoulli(key, 0.3, (8, 8)))
    key = jax.random.key(0)
    programs = {
        platform: export.export(draw, platforms=[platform])(key).mlir_module() for platform in ("cpu", "cuda", "tpu")
    }
    plain = export.export(jax.jit(lambda key: jax.random.bernoulli(key, 0.3, (8, 8))), platforms=["cpu"])(key)
    assert "while" in plain.mlir_module() and "while" not in programs["cpu"]
    assert ["threefry2x32" in programs[platform] for platform in ("cpu", "cuda", "tpu")] == [False, True, True]


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_dropout_is_that_of_flax(rate):
    x = jax.random.normal(jax.random.key(0), (4, 6, 8))
    ours, theirs = (
        jax.jit(lambda x, layer=layer: layer(x, rngs=jax.random.key(5))) for layer in (Dropout(rate), nnx.Dropout(rate))
    )
    np.testing.assert_array_equal(ours(x), theirs(x))
    for given in (nnx.Rngs(dropout=3), nnx.Rngs(dropout=3).dropout):
        again = nnx.Rngs(dropout=3)
        np.testing.assert_array_equal(Dropout(rate)(x, rngs=given), nnx.Dropout(rate)(x, rngs=again))
    assert Dropout(rate)(x, deterministic=True) is x
    half = Dropout(rate)(x.astype(jnp.bfloat16), rngs=jax.random.key(5))
    assert half.dtype == jnp.bfloat16


def test_dropout_of_a_batch_that_is_left_open():
    (batch,) = export.symbolic_shape("batch")
    spec = jax.ShapeDtypeStruct((batch, 3), jnp.float32)
    apply = jax.jit(lambda x, key: Dropout(0.3)(x, rngs=key))
    key, x = jax.random.key(5), jnp.ones((4, 3))
    np.testing.assert_array_equal(export.export(apply)(spec, key).call(x, key), apply(x, key))


def test_dropout_without_a_key_says_so():
    with pytest.raises(ValueError, match="rngs"):
        Dropout(0.5)(jnp.ones(3))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_dropout_on_a_mesh(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    x = jax.random.normal(jax.random.key(0), (8, 6))
    apply = jax.jit(lambda x: Dropout(0.3)(x, rngs=jax.random.key(5)))
    placed = jax.device_put(x, NamedSharding(mesh, P("data")))
    np.testing.assert_array_equal(apply(placed), apply(x))
