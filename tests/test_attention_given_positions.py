"""Attention by given positions: packed, shuffled and sorted tokens."""

import dataclasses

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import BOTH, POSITION_TERMS, as_jax, close, forward, inputs, parameters, refuses

from xformer import cost
from xformer.attention import (
    BigBird,
    Full,
    Linformer,
    Longformer,
    MusicRelative,
    Options,
    Rotary,
    Shape,
    Shaw,
    T5Bias,
    Window,
)

BY_TOKEN = ("query", "key", "value", "segment_ids")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(
    "op",
    [Full(causal=True), Window(left=6, right=3), Longformer(4, (1, 2, 2, 5), 2)],
    ids=["full", "window", "longformer"],
)
@pytest.mark.parametrize("term", POSITION_TERMS)
def test_shuffling_tokens_with_their_positions_permutes_the_output(op, term, implementation):
    """And the gradients of tokens; those of the term's parameters stay. Each example has its own order."""
    op = dataclasses.replace(op, position=POSITION_TERMS[term], implementation=implementation)
    call = inputs(value_dim=6) | {"segment_ids": np.sort(np.random.default_rng(1).integers(0, 2, (2, 45)))}
    params, cotangent = parameters(op, call), conformance.random_cotangent(call)
    order = np.stack([np.random.default_rng(seed).permutation(45) for seed in range(2)])
    moved = lambda x: np.take_along_axis(x, order.reshape(2, 45, *[1] * (x.ndim - 2)), 1)
    shuffled = {name: moved(x) if name in BY_TOKEN else x for name, x in call.items()}
    run = conformance.forward_and_gradients
    out, own, tokens = run(op, params, as_jax(call), cotangent)
    by_position = as_jax(shuffled | {"positions": order.astype(np.int32)})
    got, own_got, tokens_got = run(op, params, by_position, moved(cotangent))
    close(got, moved(np.asarray(out)))
    for name, gradient in tokens.items():
        close(tokens_got[name], moved(np.asarray(gradient)), 5e-5, name)
    jax.tree.map(lambda a, b: close(a, np.asarray(b, np.float64), 1e-4), own_got, own)


@pytest.mark.parametrize("op", [Full(causal=True, position=Rotary()), Window(left=5, right=2, position=Shaw(4))])
def test_packed_documents_are_separate_documents(op):
    """Three documents in one row of 300 tokens, which is several tiles, with their own positions and segments."""
    lengths = 120, 7, 173
    segments = np.repeat(np.arange(3), lengths)[None]
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    call = inputs(q_len=300, batch=1, heads=2, kv_heads=1, head_dim=2)
    params = parameters(op, call)
    packed = as_jax(call | {"segment_ids": segments, "positions": positions})
    out = np.asarray(forward(op, params, packed))
    ends = np.cumsum(lengths)
    for end, length in zip(ends, lengths, strict=True):
        alone = {name: x[:, end - length : end] for name, x in call.items()}
        close(out[:, end - length : end], np.asarray(forward(op, params, as_jax(alone)), np.float64))


def test_queries_and_keys_at_their_own_positions():
    """A tuple, in cross-attention and in decoding: equal to an offset."""
    op, call = Window(left=8, right=0, position=T5Bias(num_buckets=8, max_distance=20)), inputs(q_len=5, kv_len=45)
    params = parameters(op, call)
    positions = jnp.arange(20, 25), jnp.arange(45)
    want = forward(op, params, as_jax(call), (("query_offset", 20),))
    close(forward(op, params, as_jax(call) | {"positions": positions}), np.asarray(want, np.float64))
    options = Options(positions=positions, params=params)
    weights = op.attention_weights(*as_jax(call).values(), options)
    assert not np.any(weights[..., 25:]) and not np.any(weights[..., 0, :12])


@pytest.mark.parametrize("implementation", BOTH)
def test_beyond_the_last_position_of_a_term(implementation):
    op, call = Full(position=MusicRelative(max_len=45), implementation=implementation), inputs()
    params, positions = parameters(op, call), np.arange(45)
    positions[3] = 45
    for wrong in (positions, positions - 1):
        with refuses(ValueError, "MusicRelative(max_len=45) has positions 0 to 44", "reach from"):
            op(**as_jax(call), params=params, positions=wrong)
    # At run time: the query there is NaN, and so is whoever sees the key there.
    mask = np.ones((1, 1, 45, 45), bool)
    mask[..., 3] = False
    mask[..., 7, 3] = True
    out = forward(op, params, as_jax(call | {"positions": positions, "mask": mask}))
    hit = np.isin(np.arange(45), [3, 7])
    assert np.isnan(out[:, hit]).all() and np.isfinite(out[:, ~hit]).all()


@pytest.mark.parametrize("implementation", BOTH)
def test_costs_say_that_every_tile_is_visited(implementation):
    for op in (
        Full(causal=True),
        Window(left=4, right=4),
        Window(left=4, right=4, position=Shaw(3)),
        Full(position=MusicRelative(max_len=700)),
    ):
        op, shape = dataclasses.replace(op, implementation=implementation), Shape(1, 640, 640, 2, 4)
        params = jax.eval_shape(lambda op=op, shape=shape: op.init(jax.random.key(0), shape))
        array = jax.ShapeDtypeStruct((1, 640, 2, 4), jnp.float32)
        positions = jax.ShapeDtypeStruct((1, 640), jnp.int32)
        run = lambda q, k, v, params, positions, op=op: op(q, k, v, params=params, positions=positions)
        counted = cost.count(run, array, array, array, params, positions)
        assert op.cost(shape, positions=True).flops == counted.flops
        assert counted.flops >= Full(implementation=implementation).cost(shape).flops


def test_what_does_not_go_together_is_refused():
    call, positions = as_jax(inputs()), np.arange(45)
    with refuses(ValueError, "positions", "query_offset"):
        Full(causal=True)(**call, positions=positions, query_offset=3)
    shape = Shape(2, 45, 45, 4, 4, 2)
    with refuses(ValueError, "positions", "plan"):
        Window(2, 2)(**call, positions=positions, plan=BigBird(8).plans(Shape(1, 200, 200, 4, 4), 2))
    for op in (BigBird(block_size=8), Linformer(rank=6, max_len=48, projection="mean")):
        with refuses(NotImplementedError, type(op).__name__, "positions"):
            op(**call, positions=positions)
    with refuses(NotImplementedError, "BigBird", "positions"):
        BigBird(block_size=8).cost(shape, positions=True)
    with refuses(ValueError, "positions of the query", "got (44,)"):
        Full()(**call, positions=np.arange(44))
    for wrong in (np.arange(45.0), list(range(45))):
        with refuses(ValueError, "positions must be int arrays", "got"):
            Full()(**call, positions=wrong)
    with refuses(ValueError, "positions must be below 536,870,912 in size", "1,073,741,824"):
        Full()(**call, positions=np.full(45, 2**30))
    for name in ("pallas", "splash", "cudnn"):
        with refuses(NotImplementedError, name, "no positions"):
            Full(implementation=name)(**call, positions=positions)
