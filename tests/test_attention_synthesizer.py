"""What the variants without an outside engine of their own do beyond the suite: chunks of queries, and refusals."""

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import as_jax, close, forward_and_gradients, inputs, parameters, refuses

from xformer import cost
from xformer.attention import Compressed, Nystrom, Shape, Shaw, Synthesizer, TopKBlocks, nystrom, synthesizer


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_of_queries_change_nothing(causal, monkeypatch):
    """Outputs, every gradient and the cost, in 5 chunks of 9 queries and 4 of 12, the last one padded."""
    op = Synthesizer("factorized_dense", max_len=50, rank=4, causal=causal)
    row = conformance.Row("chunks", next(c for c in conformance.CASES if c.name == "synthesizer-factorized_dense"), op)
    call = conformance.everything(row)
    params, cotangent = parameters(op, call), conformance.random_cotangent(call)
    whole = forward_and_gradients(op, params, as_jax(call), cotangent)
    for most in (9, 12):
        monkeypatch.setattr(synthesizer, "CHUNK_SCORES", most * 2 * 4 * 45)
        jax.clear_caches()
        cut = forward_and_gradients(op, params, as_jax(call), cotangent)
        for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
            close(a, np.asarray(b, np.float64), 1e-5)
        shape, plain = Shape(2, 45, 45, 4, 4, 2), as_jax(inputs())
        counted = cost.count(lambda plain, params: op(**plain, params=params), plain, as_jax(params))
        assert op.cost(shape).flops == counted.flops


@pytest.mark.parametrize("size", [1, 3, 33, 65, 131])
@pytest.mark.parametrize("length", [1, 40, 64, 150])
def test_convolution_is_that_of_jax(size, length):
    x = jax.random.normal(jax.random.key(0), (2, length, 3, 4))
    kernel = jax.random.normal(jax.random.key(1), (3, size))
    by_channel = jnp.moveaxis(x, 1, 3).reshape(2, 12, length)  # heads before depth: a kernel each for a head's four
    kernels = jnp.repeat(kernel, 4, axis=0)[:, None]
    sides = [(size // 2, size // 2)]
    theirs = jax.lax.conv_general_dilated(by_channel, kernels, (1,), sides, feature_group_count=12)
    theirs = jnp.moveaxis(theirs.reshape(2, 3, 4, length), 3, 1)
    close(nystrom.depthwise_convolution(x, kernel), np.asarray(theirs, np.float64), 1e-5)
    counted = cost.count(nystrom.depthwise_convolution, x, kernel)
    assert nystrom.convolution_flops(size, length, 6, 4) == counted.flops


def test_refusals():
    call = as_jax(inputs())
    with refuses(NotImplementedError, 'gate="block"', "later ones"):
        TopKBlocks(gate="block")(**call, is_causal=True)
    with refuses(NotImplementedError, "mask with query dimension 45"):
        TopKBlocks()(**call, mask=jnp.ones((1, 1, 45, 45)))
    with refuses(NotImplementedError, "query_offset", "landmarks"):
        Nystrom()(**call, query_offset=0)
    with refuses(ValueError, "Nystrom.conv_size must be odd", "got 4"):
        Nystrom(conv_size=4)
    with refuses(NotImplementedError, "position", "Shaw"):
        Synthesizer(position=Shaw())
    with refuses(ValueError, "query_offset"):
        few = call | {"query": call["query"][:, :5]}
        Compressed(causal=True)(**few, params=parameters(Compressed(), inputs()))


def test_a_causal_query_without_a_complete_slot_gives_zeros():
    call = inputs()
    out = Compressed(stride=4, causal=True)(**as_jax(call), params=parameters(Compressed(stride=4), call))
    assert not np.any(out[:, :3]) and np.any(out[:, 3])
