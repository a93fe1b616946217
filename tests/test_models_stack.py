"""Scanning over layers and computing blocks again: other programs, the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_models import OPS, call, make_batch, make_model, num_params

from xformer import cost
from xformer.attention import BigBird, Linformer, Reformer, Routing, Sinkhorn, Window
from xformer.nn.stack import unstack_blocks
from xformer.train import health

WAYS = {
    "scan": {"scan_layers": True},
    "remat": {"remat": True},
    "both": {"scan_layers": True, "remat": True},
}
# Padded, causal, with partial tiles: what makes plans differ between layers.
OPS = OPS | {
    "etc": BigBird(block_size=4, num_random_blocks=1, num_global_blocks=0, num_global_tokens=1, causal=True),
    "reformer": Reformer(num_buckets=4, bucket_size=4),
    "routing": Routing(num_clusters=4, window=6),
    "sinkhorn": Sinkhorn(block_size=4),
}


def loss(model, inputs, mask, key=None):
    rngs = None if key is None else nnx.Rngs(dropout=key)
    return jnp.sum(model(inputs, mask, deterministic=key is None, rngs=rngs) ** 2)


def gradient(model, *args):
    """The loss and its gradient, by layer as in the unrolled model."""
    value, grads = nnx.jit(nnx.value_and_grad(loss))(model, *args)
    nnx.update(model, grads)
    return value, jax.tree.leaves(nnx.state(model.unrolled()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "way", "kwargs"),
    [
        ("bigbird", "scan", {"dropout_rate": 0.2, "attention_dropout_rate": 0.2}),
        ("etc", "both", {"num_layers": 3, "norm": "post"}),
        ("linformer", "scan", {"share_attention_params": True}),
        ("shaw", "remat", {"pooling": "cls"}),
        ("reformer", "both", {"share_qk": True}),
        ("routing", "scan", {"dropout_rate": 0.2}),
        ("routing", "remat", {}),
        ("sinkhorn", "both", {}),
    ],
)
def test_the_same_parameters_losses_and_gradients(name, way, kwargs):
    inputs, mask = make_batch(length=16, real=(16, 9))
    args = (inputs, mask, jax.random.key(3)) if "dropout_rate" in kwargs else (inputs, mask)
    plain, model = make_model(OPS[name], **kwargs), make_model(OPS[name], **WAYS[way], **kwargs)
    assert num_params(model) == num_params(plain)
    own = (jax.tree.leaves(nnx.state(each)) for each in (model.unrolled(), plain))
    for ours, theirs in zip(*own, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    (value, grads), (other, other_grads) = gradient(plain, *args), gradient(model, *args)
    np.testing.assert_allclose(other, value, rtol=1e-5)
    largest = max(np.abs(grad).max() for grad in grads)  # some are zero but for rounding, those of key biases
    for ours, theirs in zip(other_grads, grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6 * largest)


def traced(fn, model):
    """A function of the model's arrays, and them."""
    graph, state = nnx.split(model)
    return (lambda state: fn(nnx.merge(graph, state))), state


@pytest.mark.parametrize("name", ["bigbird", "linformer"])
def test_the_program_does_not_grow_with_depth_but_its_flops_do(name):
    inputs, mask = make_batch(length=16, real=(16, 16))
    run = lambda model: model(inputs, mask)
    sizes, flops = [], []
    for num_layers in (2, 6):
        scanned = traced(run, make_model(OPS[name], num_layers=num_layers, scan_layers=True))
        plain = traced(run, make_model(OPS[name], num_layers=num_layers))
        sizes.append(len(str(jax.make_jaxpr(scanned[0])(scanned[1])).splitlines()))
        flops.append(cost.count(*scanned).flops)
        assert flops[-1] == cost.count(*plain).flops
    assert sizes[0] == sizes[1]
    assert flops[1] > 2 * flops[0]


def test_remat_counts_what_it_computes_again():
    inputs, mask = make_batch(length=16, real=(16, 16))
    models = [make_model(OPS["full"], **way) for way in ({}, *WAYS.values())]
    steps = [traced(nnx.grad(lambda model: loss(model, inputs, mask)), model) for model in models]
    plain, scanned, again, both = (cost.count(*step).flops for step in steps)
    assert plain == scanned < again == both < 1.5 * plain


def test_every_layer_of_a_scan_has_its_own_random_blocks():
    op = BigBird(block_size=1, num_random_blocks=2, num_global_blocks=0)
    model = make_model(op, num_layers=3, scan_layers=True, num_heads=1)
    layers = unstack_blocks(model.stacked_blocks, 3, op)
    assert [block.attention.attention_fn.op.layer for block in layers] == [0, 1, 2]
    inputs, _ = make_batch(length=16, real=(16, 16))
    same = make_model(op, num_layers=3, num_heads=1)
    for block in same.blocks:
        block.attention.attention_fn.op = op.at_layer(0)
    assert np.abs(call(same, inputs) - call(model, inputs)).max() > 1e-4


def test_the_layer_of_a_nan_is_named_in_a_scan():
    model = make_model(Window(left=2, right=2), num_layers=3, scan_layers=True, remat=True)
    kernel = model.blocks.feed_forward.expand.kernel
    kernel[...] = kernel[...].at[1].set(jnp.inf)
    with_list = model.unrolled()
    assert type(with_list.blocks) is nnx.List and not with_list.remat
    places = []
    with health.watched(with_list, places):
        with_list(*make_batch())
    assert places[0] == "blocks/1/feed_forward/expand (Linear)"


def test_what_a_scan_can_not_do_is_said():
    inputs, mask = make_batch(length=16, real=(16, 9))  # blocks enough for layers to differ
    reference = BigBird(block_size=2, num_random_blocks=1, implementation="reference")
    with pytest.raises(NotImplementedError, match="layers can't share a trace"):
        make_model(reference, scan_layers=True)(inputs, mask)
    x = jnp.ones((1, 16, 2, 4))
    with pytest.raises(NotImplementedError, match="cannot honour plan"):
        Linformer(rank=4, max_len=16)(x, x, x, plan=1, params={})
    with pytest.raises(ValueError, match="plan must be one layer's slice"):
        Window()(x, x, x, plan=1, is_causal=True)
