"""Norms beside Flax's own, and what a layer keeps for the backward pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xformer.attention import Full
from xformer.models import MODELS
from xformer.nn.norm import LayerNorm, RMSNorm

PAIRS = {
    "layer": (LayerNorm, functools.partial(nnx.LayerNorm, use_fast_variance=False)),
    "rms": (RMSNorm, nnx.RMSNorm),
}


def pair(name: str, **options: Any) -> list[Any]:
    """Ours and Flax's, with parameters that are neither zeros nor ones."""
    made = [norm(16, rngs=nnx.Rngs(0), **options) for norm in PAIRS[name]]
    for norm in made:
        if norm.scale is not None:
            norm.scale[...] = jnp.linspace(0.5, 2, 16).astype(norm.scale.dtype)
        if getattr(norm, "bias", None) is not None:
            norm.bias[...] = jnp.linspace(-1, 1, 16).astype(norm.bias.dtype)
    return made


def gradients(norm: nnx.Module, x: jax.Array) -> Any:
    """Of a function of the output that treats no two features alike: the output, and gradients of parameters and x."""
    graph, params = nnx.split(norm)

    def loss(params: Any, x: jax.Array) -> Any:
        out = nnx.merge(graph, params)(x)
        return jnp.sin(out.astype(jnp.float32) + jnp.arange(16)).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    return out, jax.tree.leaves(grads)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("options", [{}, {"use_scale": False}])
def test_as_flax_has_it(name, dtype, options):
    x = jax.random.normal(jax.random.key(1), (3, 7, 16)) * 3 + 2
    x = x if dtype is None else x.astype(dtype)
    (ours, our_grads), (theirs, their_grads) = (gradients(norm, x) for norm in pair(name, dtype=dtype, **options))
    assert ours.dtype == theirs.dtype
    rounding = 1e-5 if dtype is None else 2e-2
    np.testing.assert_allclose(ours.astype(float), theirs.astype(float), atol=rounding, rtol=rounding)
    assert len(our_grads) == len(their_grads)
    for our_grad, their_grad in zip(our_grads, their_grads, strict=True):
        assert our_grad.dtype == their_grad.dtype
        np.testing.assert_allclose(our_grad.astype(float), their_grad.astype(float), atol=3 * rounding, rtol=rounding)


def test_numbers_that_are_not_finite_are_seen():
    """And a row of one number, whose variance is 0, has finite gradients."""
    norm = LayerNorm(16, rngs=nnx.Rngs(0))
    x = jnp.stack([jnp.full(16, 7.0), jnp.arange(16.0).at[3].set(jnp.inf)])
    grad = jax.grad(lambda x: norm(x)[0].sum())(x)
    assert np.isfinite(grad[0]).all() and np.isnan(np.asarray(norm(x)[1])).all()
    poisoned = jax.vjp(norm, x[:1])[1](jnp.full((1, 16), jnp.inf))[0]
    assert not np.isfinite(poisoned).any()


def test_parameters_that_all_devices_share():
    """Within a caller's shard_map their gradient is the sum over the shards."""
    norm, _ = pair("layer")
    graph, params = nnx.split(norm)
    x = jax.random.normal(jax.random.key(2), (8, 5, 16))
    loss = lambda params, x: jnp.sin(nnx.merge(graph, params)(x)).sum()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    shared = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    for ours, whole in zip(
        jax.tree.leaves(jax.jit(shared)(params, x)), jax.tree.leaves(jax.grad(loss)(params, x)), strict=True
    ):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data")], ids=["batch", "features"])
def test_arrays_on_a_mesh_that_is_not_in_scope(kind, spec):
    norm, _ = pair("layer")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    x = jax.random.normal(jax.random.key(2), (8, 5, 16))
    gradient = jax.jit(jax.grad(lambda x: jnp.sin(norm(x)).sum()))
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    np.testing.assert_allclose(gradient(placed), gradient(x), rtol=1e-5, atol=1e-5)


def test_a_batch_that_is_left_open():
    norm, _ = pair("rms")
    (batch,) = jax.export.symbolic_shape("batch")
    gradient = jax.jit(jax.grad(lambda x: jnp.sin(norm(x)).sum()))
    exported = jax.export.export(gradient)(jax.ShapeDtypeStruct((batch, 16), jnp.float32))
    x = jax.random.normal(jax.random.key(2), (3, 16))
    np.testing.assert_allclose(exported.call(x), gradient(x), rtol=1e-5, atol=1e-5)


def test_forward_over_reverse():
    """Products with a Hessian, beside Flax's."""
    x = jax.random.normal(jax.random.key(2), (3, 16))
    ours, theirs = (jax.jvp(jax.grad(lambda x, n=norm: jnp.sin(n(x)).sum()), (x,), (x,))[1] for norm in pair("layer"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_a_block_keeps_for_the_backward_pass():
    """At 512 tokens, 128 wide: what a layer more adds to a step's memory is two arrays of the feed-forward layer's
    width and ten of the model's, with room for one more; nothing of the backward pass waits from the forward pass on.
    """
    length, width, mlp_dim = 512, 128, 256

    def temporary(num_layers: int) -> int:
        model = MODELS["classifier"](
            16, 2, length, width=width, mlp_dim=mlp_dim, num_heads=2, num_layers=num_layers, attention=Full(),
            rngs=nnx.Rngs(0),
        )  # fmt: skip
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params, x: nnx.merge(graph, params, rest)(x).sum()
        program = jax.jit(jax.grad(loss)).lower(params, jnp.ones((1, length), jnp.int32)).compile()
        return program.memory_analysis().temp_size_in_bytes

    added = (temporary(6) - temporary(3)) / 3
    assert added <= 4 * length * (2 * mlp_dim + 11 * width), added / (4 * length * width)
