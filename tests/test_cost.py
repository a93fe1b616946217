"""The FLOP counter: every number below is derived by hand, none from another counter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xformer.attention import Cost
from xformer.cost import count


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = array(8, 8), array(8, 8)
MATMUL = 2 * 8 * 8 * 8


def test_a_product_and_its_bytes():
    assert count(jnp.matmul, array(3, 5), array(5, 7)) == Cost(flops=2 * 3 * 5 * 7, bytes=4 * (15 + 35 + 21))
    assert count(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), array(2, 6, 3, 4), array(2, 5, 3, 4)).flops == (
        2 * 2 * 3 * 6 * 5 * 4
    )
    assert count(jnp.matmul, array(3, 5, dtype=jnp.bfloat16), array(5, 7, dtype=jnp.bfloat16)).bytes == 2 * (
        15 + 35 + 21
    )
    assert count(jnp.matmul, array(3, 5, dtype=jnp.complex64), array(5, 7, dtype=jnp.complex64)).flops == 8 * 3 * 5 * 7


def test_elementwise_work_costs_nothing():
    def fn(x, key):
        x = jax.nn.softmax(jax.nn.gelu(jax.nn.relu(x))) + jnp.sort(x) + jnp.cumsum(x, 0)
        x = x.at[jnp.arange(8)].add(1.0)[::-1] * jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.median(x) + jax.scipy.special.logsumexp(x)

    assert count(fn, X, jax.random.key(0)) == Cost(flops=0, bytes=8 * 8 * 4 + 8 + 4)


def test_primitives_that_a_jax_release_adds():
    """Elementwise ones need no entry; what changes shapes is named until it has one."""
    new = core.Primitive("one_minus_cube")
    new.def_abstract_eval(lambda x: x)
    assert count(new.bind, X).uncounted == ()
    folded = core.Primitive("fold_columns")
    folded.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape[:1], x.dtype))
    (name,) = count(folded.bind, X).uncounted
    assert name.startswith("fold_columns")
    (name,) = count(lambda x: jnp.linalg.cholesky(x, symmetrize_input=False), X).uncounted
    assert name.startswith("cholesky")


def test_a_scan_costs_what_the_unrolled_loop_costs():
    def body(x, w):
        return jnp.tanh(x @ w), None

    def unrolled(x, ws):
        for w in ws:
            x, _ = body(x, w)
        return x

    def scanned(x, ws):
        return lax.scan(body, x, ws)[0]

    args = X, array(5, 8, 8)
    assert count(scanned, *args) == count(unrolled, *args)
    assert count(scanned, *args).flops == 5 * MATMUL

    def loss(fn):
        return lambda *args: fn(*args).sum()

    gradients = [count(jax.grad(loss(fn), argnums=(0, 1)), *args).flops for fn in (scanned, unrolled)]
    assert gradients == [3 * 5 * MATMUL] * 2  # forward, and one product each for the input and the weights


def test_nested_loops_multiply():
    def fn(x):
        return lax.fori_loop(0, 3, lambda _, c: lax.map(lambda row: row @ jnp.ones((8, 8)), c), x)

    assert count(fn, X).flops == 3 * 8 * (2 * 8 * 8)


def test_calls_are_entered():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))

    @jax.custom_jvp
    def cube(x):
        return x @ x @ x

    cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * tangents[0]))

    assert count(jax.jit(lambda x: jax.jit(jnp.matmul)(x, x) @ x), X).flops == 2 * MATMUL
    assert count(square, X).flops == MATMUL
    assert count(cube, X).flops == 2 * MATMUL
    assert count(jax.checkpoint(lambda x: x @ x), X).flops == MATMUL
    assert count(jax.grad(lambda x: square(x).sum()), X).flops == 3 * MATMUL
    assert count(jax.named_call(lambda x: x @ x, name="block"), X).flops == MATMUL


def test_recomputation_is_counted():
    def block(x, w):
        return jnp.sin(jnp.sin(x @ w) @ w)

    def gradient(fn):
        return count(jax.value_and_grad(lambda x, w: fn(x, w).sum(), argnums=(0, 1)), X, W).flops

    assert gradient(block) == 3 * 2 * MATMUL
    assert gradient(jax.checkpoint(block)) == 4 * 2 * MATMUL


def test_vmap_and_batched_products():
    mapped = jax.vmap(jnp.matmul)
    assert count(mapped, array(4, 3, 5), array(4, 5, 7)).flops == 4 * 2 * 3 * 5 * 7
    assert count(jax.vmap(jnp.matmul, (0, None)), array(4, 3, 5), array(5, 7)).flops == 4 * 2 * 3 * 5 * 7


def test_cond_counts_the_dearer_branch_and_names_what_any_leaves_out():
    def fn(x, i):
        return lax.switch(i, [lambda x: x, lambda x: x @ x @ x, lambda x: jnp.linalg.cholesky(x @ x)], x)

    cost = count(fn, X, array(dtype=jnp.int32))
    assert cost.flops == 2 * MATMUL
    assert [name.split()[0] for name in cost.uncounted] == ["cholesky"]


def test_a_dynamic_while_is_named_with_its_place_and_not_guessed():
    def power(x, n):
        return lax.fori_loop(0, n, lambda _, c: c @ c, x) @ x

    cost = count(power, X, array(dtype=jnp.int32))
    assert cost.flops == MATMUL
    (name,) = cost.uncounted
    assert name.startswith("while") and "test_cost.py:" in name and "power" in name


def test_decompositions_callbacks_and_foreign_calls_are_named():
    def fn(x):
        x = jnp.linalg.qr(x)[0] + jnp.fft.fft(x).real
        x = jax.pure_callback(np.asarray, X, x)
        return jax.ffi.ffi_call("my_kernel", X)(x), jnp.linalg.solve(x, x)

    named = " ".join(count(fn, X).uncounted)
    for name in ("qr", "fft", "pure_callback", "ffi_call my_kernel", "lu", "custom_linear_solve"):
        assert name in named, name


def test_a_call_that_is_not_a_plain_call_is_named():
    def solve(a, b):
        return lax.custom_linear_solve(lambda v: a @ v, b, solve=lambda _, b: a @ b, symmetric=True)

    cost = count(solve, X, array(8))
    assert cost.flops == 0 and cost.uncounted[0].startswith("custom_linear_solve")


def test_pallas_kernels_count_their_estimate():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] @ x_ref[...]

    def call(estimate):
        return pl.pallas_call(kernel, out_shape=X, cost_estimate=estimate, interpret=True, name="squaring")

    estimate = pl.CostEstimate(flops=MATMUL, transcendentals=0, bytes_accessed=0)
    assert count(call(estimate), X) == Cost(flops=MATMUL, bytes=2 * 8 * 8 * 4)
    assert count(jax.vmap(call(estimate)), array(3, 8, 8)).flops == 3 * MATMUL
    cost = count(call(None), X)
    assert cost.flops == 0 and "squaring" in cost.uncounted[0]


def test_shards_are_counted_over_all_devices():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sharded = jax.shard_map(
        jnp.matmul, mesh=mesh, in_specs=(P("data"), P(None, "tensor")), out_specs=P("data", "tensor")
    )
    assert count(sharded, X, W) == count(jnp.matmul, X, W)
    replicated = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    assert count(replicated, X, W).flops == 8 * MATMUL
    partly = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    assert count(partly, X, W).flops == MATMUL
    assert count(jax.pmap(lambda x: x @ x), array(8, 3, 3)).flops == 8 * 2 * 27


CONVOLUTION = "NHWC", "HWIO", "NHWC"


def test_convolution_against_its_formula():
    def conv(x, w, **kwargs):
        return lax.conv_general_dilated(x, w, **{"window_strides": (1, 1), "padding": "VALID", **kwargs},
                                        dimension_numbers=CONVOLUTION)  # fmt: skip

    x, w = array(2, 12, 10, 6), array(3, 5, 6, 4)
    assert count(conv, x, w).flops == 2 * (2 * 10 * 6 * 4) * (3 * 5 * 6)
    assert count(lambda x, w: conv(x, w, padding="SAME"), x, w).flops == 2 * (2 * 12 * 10 * 4) * (3 * 5 * 6)
    assert count(lambda x, w: conv(x, w, window_strides=(2, 3)), x, w).flops == 2 * (2 * 5 * 2 * 4) * (3 * 5 * 6)
    assert count(lambda x, w: conv(x, w, rhs_dilation=(2, 2)), x, w).flops == 2 * (2 * 8 * 2 * 4) * (3 * 5 * 6)
    grouped = array(3, 5, 2, 9)
    assert count(lambda x, w: conv(x, w, feature_group_count=3), x, grouped).flops == 2 * (2 * 10 * 6 * 9) * (3 * 5 * 2)
    batched = count(lambda x, w: conv(x, w, batch_group_count=2), x, w)
    assert batched.flops == 2 * (1 * 10 * 6 * 4) * (3 * 5 * 6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_a_transposed_convolution_costs_what_the_plain_one_does(length, kernel, stride):
    def transposed(x, w):
        return lax.conv_transpose(x, w, (stride,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))

    # Every input element meets every tap once. A stride of 1 has no holes, so there padding is multiplied as well.
    places = length if stride > 1 else length + kernel - 1
    assert count(transposed, array(2, length, 3), array(kernel, 3, 5)).flops == 2 * 2 * places * kernel * 3 * 5


@pytest.mark.parametrize("stride", [2, 3])
def test_gradients_of_a_strided_convolution(stride):
    """Linformer's convolution: windows that tile the length; backward costs exactly two forwards."""

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (stride,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))

    args = array(2, 12, 4), array(stride, 4, 5)
    forward = count(conv, *args).flops
    assert forward == 2 * (2 * (12 // stride) * 5) * (stride * 4)
    gradient = jax.value_and_grad(lambda x, w: (conv(x, w) ** 2).sum(), argnums=(0, 1))
    assert count(gradient, *args).flops == 3 * forward
