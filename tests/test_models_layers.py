"""Hybrid stacks: layers of one model that attend differently."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_models import CLASSES, call, make_batch, make_model, num_params

from xformer import cost
from xformer.attention import BigBird, Full, Layers, Linformer, Longformer, Shape, Shaw, Window, build, entries
from xformer.nn import MultiHeadAttention

OPS = (Full(position=Shaw(max_distance=2)), BigBird(block_size=2, num_random_blocks=1), Window(left=2, right=2))
STACK = Layers(OPS)


def test_layer_i_attends_with_entry_i_and_its_own_random_blocks():
    assert entries(STACK) == OPS and entries(OPS[0]) == (OPS[0],)
    ops = [block.attention.attention_fn.op for block in make_model(STACK, num_layers=5).blocks]
    assert ops == [OPS[0], OPS[1].at_layer(1), OPS[2], OPS[0], OPS[1].at_layer(4)]


def test_a_model_is_that_of_its_layers():
    model, inputs = make_model(STACK, num_layers=3), make_batch()
    blocks = list(model.blocks)
    assert set(nnx.state(blocks[0].attention)) == {*nnx.state(blocks[1].attention), "attention_fn"}
    x = model.embed(inputs[0]) + model.positions(10)
    for block in blocks:
        x = block(x, inputs[1])
    expected = model.classify(model.pool(model.final_norm(x), inputs[1]))
    np.testing.assert_allclose(model(*inputs), expected, atol=1e-6)


@pytest.mark.full
def test_a_scan_over_groups_of_layers_is_the_same_model():
    inputs, mask = make_batch(length=16, real=(16, 9))
    kwargs = {"num_layers": 4, "attention_dropout_rate": 0.2, "dropout_rate": 0.1}
    op = Layers(OPS[:2])
    plain, scanned = make_model(op, **kwargs), make_model(op, scan_layers=True, remat=True, **kwargs)
    assert num_params(plain) == num_params(scanned) and len(scanned.blocks) == 2
    assert scanned.blocks[1].attention.query.kernel.shape == (2, 16, 4, 4)
    own = (jax.tree.leaves(nnx.state(model)) for model in (plain, scanned.unrolled()))
    for ours, theirs in zip(*own, strict=True):
        np.testing.assert_array_equal(ours, theirs)

    def loss(model):
        return jnp.sum(model(inputs, mask, deterministic=False, rngs=nnx.Rngs(dropout=3)) ** 2)

    (value, grads), (other, other_grads) = (nnx.jit(nnx.value_and_grad(loss))(model) for model in (plain, scanned))
    np.testing.assert_allclose(other, value, rtol=1e-5)
    nnx.update(scanned, other_grads)
    for ours, theirs in zip(jax.tree.leaves(nnx.state(scanned.unrolled())), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_program_of_a_scan_does_not_grow_and_its_flops_are_those_of_the_layers():
    inputs, mask = make_batch(length=16, real=(16, 16))

    def measured(**kwargs):
        graph, state = nnx.split(make_model(STACK, **kwargs))
        run = lambda state: nnx.merge(graph, state)(inputs, mask)
        return len(str(jax.make_jaxpr(run)(state)).splitlines()), cost.count(run, state).flops

    (small, flops), (large, many) = (measured(num_layers=layers, scan_layers=True) for layers in (3, 9))
    assert small == large and flops == measured(num_layers=3)[1]
    assert many == measured(num_layers=9)[1]


@pytest.mark.parametrize("scan", [False, True])
def test_parameters_are_shared_by_the_layers_of_an_entry(scan):
    op = Layers((Linformer(rank=4, max_len=32), Full()))
    own, shared = (make_model(op, num_layers=4, share_attention_params=share) for share in (False, True))
    one = num_params(own.blocks[0].attention.attention_fn)
    assert one > 0 and num_params(own) - num_params(shared) == one
    model = make_model(op, num_layers=4, share_attention_params=True, scan_layers=scan)
    assert num_params(model) == num_params(shared)
    np.testing.assert_allclose(call(model, *make_batch()), call(shared, *make_batch()), atol=1e-6)
    with pytest.raises(ValueError, match="share_attention_params must be False"):
        make_model(Layers((Full(), Window())), share_attention_params=True)


@pytest.mark.parametrize(("norm", "scan"), [("pre", True), ("post", False)])
def test_blocks_without_a_feed_forward_layer_are_those_whose_layer_gives_nothing(norm, scan):
    alone, model = (make_model(STACK, num_layers=3, norm=norm, scan_layers=scan, mlp_dim=mlp) for mlp in (0, 24))
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    own = dict(nnx.to_flat_state(nnx.state(alone, nnx.Param)))
    assert own.keys() < flat.keys() and all("feed_forward" in "/".join(map(str, path)) for path in flat.keys() - own)
    for path, value in flat.items():
        if path in own:
            own[path][...] = value[...]
        elif "contract" in path:
            value[...] = jnp.zeros_like(value[...])
    np.testing.assert_allclose(call(alone, *make_batch()), call(model, *make_batch()), atol=1e-4)


def test_numbers_of_layers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_layers must be at least 3, the entries of attention, got 2"):
        make_model(STACK, num_layers=2)
    with pytest.raises(ValueError, match=r"num_layers must be a multiple of 3, the entries of attention, .* got 4"):
        make_model(STACK, num_layers=4, scan_layers=True)
    assert make_model(STACK, num_layers=4)(*make_batch()).shape == (2, CLASSES)
    with pytest.raises(ValueError, match=r"attention.layers\[1\].max_len must be at least 16, .* got 8"):
        make_model(Layers((Full(), Linformer(rank=4, max_len=8))), num_layers=2)


def test_a_stack_is_no_op_of_its_own():
    x = jnp.ones((1, 8, 2, 4))
    for use in (
        lambda: STACK(x, x, x),
        lambda: STACK.init(jax.random.key(0), Shape(1, 8, 8, 2, 4)),
        lambda: STACK.pattern(8, 8, 2),
        lambda: STACK.cost(Shape(1, 8, 8, 2, 4)),
        lambda: MultiHeadAttention(4, 16, attention_fn=STACK, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(NotImplementedError, match=r"Layers is a stack of 3 ops: use at_layer\(i\)"):
            use()
    for wrong in ((), 3, (Full(), "window"), (STACK,)):
        with pytest.raises(ValueError, match=r"Layers\.ops must be"):
            Layers(wrong)


def test_causal_and_implementation_are_those_of_every_entry():
    stack = dataclasses.replace(Layers((Full(), Window(left=2, right=0))), causal=True)
    assert stack.ops == (Full(causal=True), Window(left=2, right=0, causal=True))
    assert Layers((Full(causal=True),)).causal and not Layers((Full(causal=True), Full())).causal
    assert Layers((Full(), Full()), implementation="reference").at_layer(5) == Full(implementation="reference")
    assert hash(stack) == hash(Layers((Full(causal=True), Window(left=2, right=0, causal=True))))
    with pytest.raises(ValueError, match="pooling must be 'mean', 'attention' or 'last' where attention is causal"):
        make_model(stack, pooling="cls")
    make_model(Layers((Full(causal=True), Full())), pooling="cls")  # the CLS vector sees the tokens in layer 1


def test_a_stack_from_a_mapping():
    window = {"name": "window", "left": 3, "position": {"name": "rotary"}}
    stack = build({"name": "layers", "layers": [{"name": "full"}, window]}, 256)
    assert stack.ops[0] == Full() and (stack.ops[1].left, stack.ops[1].right) == (3, 8)
    for wrong, message in (
        ({}, "attention.layers: got None, takes a sequence of at least one attention section"),
        ({"layers": ()}, r"attention.layers: got \(\)"),
        ({"layers": ({"name": "full"},), "left": 3}, "attention.left: a stack takes layers only"),
        ({"layers": ({"name": "full"}, {"name": "windw"})}, r"attention.layers\[1\].name: got 'windw'.*mean window"),
        ({"layers": ({"name": "layers", "layers": ()},)}, r"attention.layers\[0\].name: got 'layers'"),
    ):
        with pytest.raises(ValueError, match=message):
            build({"name": "layers", **wrong})


def test_remarks_are_those_of_the_entries():
    assert Layers((Full(), Window(left=64, right=64))).remarks(32) == Window(left=64, right=64).remarks(32) != ()


def test_global_tokens_reach_the_ops_that_tell_them_apart():
    """In a list and in a scan alike, a CLS vector put in front among them; others attend as they do without."""
    inputs, mask = make_batch(length=16, real=(16, 9))
    tokens = jnp.zeros((2, 16), bool).at[:, 5].set(True)
    op = Layers((Longformer(window=2, dilation=2), Window(left=1, right=1)))
    plain, scanned = (make_model(op, num_layers=2, scan_layers=scan, pooling="cls") for scan in (False, True))
    got = plain(inputs, mask, global_tokens=tokens)
    np.testing.assert_allclose(scanned(inputs, mask, global_tokens=tokens), got, atol=1e-5)
    assert not np.allclose(plain(inputs, mask), got, atol=1e-4)
    first = jnp.zeros((2, 16), bool)  # the vector in front, and no other
    np.testing.assert_allclose(plain(inputs, mask, global_tokens=first), plain(inputs, mask), atol=1e-5)
