"""EncoderClassifier: what padding, positions, sharing, dropout and dtypes may and may not do to its logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from xformer.attention import BigBird, Full, Linformer, Rotary, Shaw, Window
from xformer.models import EncoderClassifier

VOCAB, CLASSES, MAX_LEN = 13, 3, 16
OPS = {
    "full": Full(),
    "shaw": Full(position=Shaw(max_distance=4)),
    "window": Window(left=2, right=2),
    "bigbird": BigBird(block_size=2, num_random_blocks=1),
    "linformer": Linformer(rank=4, max_len=32),
}


def make_model(op, seed=0, **kwargs):
    kwargs = {"num_layers": 2, "width": 16, "num_heads": 4, "mlp_dim": 24, "rngs": nnx.Rngs(seed), **kwargs}
    return EncoderClassifier(VOCAB, CLASSES, MAX_LEN, attention=op, **kwargs)


call = nnx.jit(lambda model, inputs, mask=None: model(inputs, mask))


def make_batch(length=10, real=(10, 6), seed=0):
    inputs = jax.random.randint(jax.random.key(seed), (len(real), length), 1, VOCAB)
    mask = jnp.arange(length) < jnp.array(real)[:, None]
    return jnp.where(mask, inputs, 0), mask


@pytest.mark.parametrize(
    ("name", "pooling"),
    [*((name, "mean") for name in OPS), ("full", "cls"), ("bigbird", "cls"), ("window", "attention")],
)
def test_what_stands_in_padding_changes_nothing(name, pooling):
    model = make_model(OPS[name], pooling=pooling)
    inputs, mask = make_batch()
    logits = call(model, inputs, mask)
    assert logits.shape == (2, CLASSES) and logits.dtype == jnp.float32
    np.testing.assert_array_equal(call(model, jnp.where(mask, inputs, 5), mask), logits)
    moved = call(model, inputs.at[1, 0].set(inputs[1, 0] % 12 + 1), mask)
    assert np.abs(moved[1] - logits[1]).max() > 1e-4
    np.testing.assert_array_equal(moved[0], logits[0])


@pytest.mark.parametrize(("name", "pooling"), [("window", "cls"), ("linformer", "mean")])
def test_more_padding_changes_nothing(name, pooling):
    model = make_model(OPS[name], pooling=pooling)
    inputs, mask = make_batch()
    longer = [jnp.pad(array, ((0, 0), (0, 3))) for array in (inputs, mask)]
    logits = call(model, inputs, mask)
    np.testing.assert_allclose(call(model, *longer), logits, atol=2e-5)
    np.testing.assert_allclose(call(model, inputs[1:, :6]), logits[1:], atol=2e-5)


def test_the_last_real_token_is_classified():
    """Of a causal model it has seen all; padding behind it changes nothing."""
    model = make_model(Full(causal=True), pooling="last", num_layers=1)
    inputs = np.random.default_rng(0).integers(1, VOCAB, (3, 9)).astype(np.int32)
    lengths = np.array([9, 4, 1])
    mask = np.arange(9) < lengths[:, None]
    encoded = model.encode(inputs, mask)
    pooled = model.pool(encoded, mask)
    np.testing.assert_array_equal(pooled, encoded[np.arange(3), lengths - 1])
    np.testing.assert_array_equal(model.pool(encoded, None), encoded[:, -1])
    alone = model(inputs[1:2, :4])
    np.testing.assert_allclose(model(np.where(mask, inputs, 7), mask)[1], alone[0], atol=1e-5)
    without = make_model(Full(causal=True), pooling="last", num_layers=1, head_bias=False)
    assert without.classify.bias is None
    with pytest.raises(ValueError, match=r"pooling must be 'mean', 'attention' or 'last' where .* causal, got 'first'"):
        make_model(Full(causal=True), pooling="first")


@pytest.mark.parametrize("pooling", ["mean", "attention", "cls", "last"])
def test_an_example_of_padding_alone_is_finite_with_finite_gradients(pooling):
    inputs, mask = make_batch(real=(10, 0))
    model = make_model(OPS["linformer"] if pooling == "mean" else OPS["full"], pooling=pooling, num_layers=1)
    value, grads = nnx.jit(nnx.value_and_grad(lambda model: jnp.sum(model(inputs, mask) ** 2)))(model)
    assert np.isfinite(value) and all(np.isfinite(grad).all() for grad in jax.tree.leaves(grads))


def test_cls_shifts_every_position_by_one():
    inputs, _ = make_batch(length=5, real=(5, 5))
    grad_of = nnx.jit(nnx.grad(lambda model: jnp.sum(model(inputs) ** 2)))
    for pooling, used in (("mean", 5), ("cls", 6)):
        model = make_model(Full(), pooling=pooling, position_embedding="learned", num_layers=1)
        grad = grad_of(model).positions.table[...]
        assert grad.shape[0] == MAX_LEN + (pooling == "cls")
        np.testing.assert_array_equal(np.abs(grad).max(axis=1) > 0, np.arange(len(grad)) < used)
    # An op made for as many positions as tokens has none left for the CLS vector.
    make_model(Linformer(rank=4, max_len=MAX_LEN))
    with pytest.raises(ValueError, match="at least 17"):
        make_model(Linformer(rank=4, max_len=MAX_LEN), pooling="cls")


def test_cls_sees_tokens_from_one_position_before_them():
    inputs, _ = make_batch(length=8, real=(8, 8))
    model = make_model(Window(left=1, right=1), pooling="cls")
    logits = call(model, inputs)
    for token in range(4):  # two layers of one neighbour each reach tokens 0 and 1 from the CLS vector in front
        moved = np.abs(call(model, inputs.at[:, token].set(0)) - logits).max()
        assert moved > 1e-5 if token < 2 else moved == 0


@pytest.mark.parametrize("position_embedding", ["sinusoidal", "learned", "none"])
def test_order_counts_where_there_are_positions(position_embedding):
    inputs, _ = make_batch()
    model = make_model(Full(), position_embedding=position_embedding)
    moved = np.abs(call(model, inputs[:, ::-1]) - call(model, inputs)).max()
    assert moved < 1e-5 if position_embedding == "none" else moved > 1e-4
    if position_embedding == "none":
        relative = make_model(Full(position=Rotary()), position_embedding="none")
        assert np.abs(call(relative, inputs[:, ::-1]) - call(relative, inputs)).max() > 1e-4


def num_params(model):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_shared_attention_parameters_exist_once():
    for op in (OPS["linformer"], OPS["shaw"]):
        own, shared = make_model(op), make_model(op, share_attention_params=True)
        one_layer = num_params(own.blocks[0].attention.attention_fn)
        assert one_layer > 0 and num_params(own) - num_params(shared) == one_layer
        inputs, mask = make_batch()
        assert np.isfinite(call(shared, inputs, mask)).all()
        first, second = (block.attention.attention_fn for block in shared.blocks)
        for param, other in zip(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(nnx.state(second)), strict=True):
            assert param is other


def test_layers_have_their_own_random_blocks():
    model = make_model(BigBird(block_size=1, num_random_blocks=2), num_layers=3)
    patterns = [block.attention.attention_fn.op.pattern(16, 16, 4) for block in model.blocks]
    assert (patterns[0] != patterns[1]).any() and (patterns[1] != patterns[2]).any()


def test_dropout_comes_from_the_call_and_leaves_no_state():
    inputs, mask = make_batch()

    @nnx.jit
    def train_call(model, seed):
        return model(inputs, mask, deterministic=False, rngs=nnx.Rngs(dropout=jax.random.key(seed)))

    for name in ("dropout_rate", "attention_dropout_rate"):
        model = make_model(Full(), num_layers=1, **{name: 0.5})
        assert not jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))
        np.testing.assert_array_equal(train_call(model, 0), train_call(model, 0))
        assert np.abs(train_call(model, 0) - train_call(model, 1)).max() > 1e-3
        assert np.abs(train_call(model, 0) - call(model, inputs, mask)).max() > 1e-3
        with pytest.raises(ValueError, match="needs rngs"):
            model(inputs, mask, deterministic=False)


@pytest.mark.parametrize(("name", "norm"), [("shaw", "post"), ("linformer", "pre")])
def test_bfloat16_computes_near_float32_with_float32_parameters(name, norm):
    inputs, mask = make_batch()
    model = make_model(OPS[name], dtype=jnp.bfloat16, norm=norm)
    logits = call(model, inputs, mask)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(logits, call(make_model(OPS[name], norm=norm), inputs, mask), atol=0.1)


def test_dtype_really_is_the_dtype_of_the_blocks():
    inputs, mask = make_batch()
    model = make_model(Full(), dtype=jnp.bfloat16)
    jaxpr = str(jax.make_jaxpr(lambda: model(inputs, mask))())
    dots = [line for line in jaxpr.splitlines() if "dot_general" in line]
    assert sum("bf16" in line.split("=")[0] for line in dots) >= 8


def test_one_trace_a_shape():
    model, traces = make_model(OPS["bigbird"]), []

    @nnx.jit
    def traced(model, inputs, mask):
        traces.append(inputs.shape)
        return model(inputs, mask)

    for length in (8, 10, 8, 10):
        traced(model, *make_batch(length=length, real=(8, 5)))
    assert len(traces) == 2


def test_bad_input_is_one_line():
    model = make_model(Full())
    inputs, mask = make_batch()
    for wrong, message in (
        (lambda: model(jnp.ones((2, 17), int)), "length up to 16"),
        (lambda: model(inputs, mask[:, :5]), "mask must be"),
        (lambda: make_model(Full(), pooling="max"), "pooling must be"),
        (lambda: make_model(Full(), norm="rms"), "norm must be"),
        (lambda: make_model(Full(), position_embedding="rope"), "position_embedding must be"),
        (lambda: make_model(Full(), num_heads=5), "num_heads must divide width"),
        (lambda: make_model(Full(), num_heads=True), "num_heads must be an integer of at least 1, got True"),
        (lambda: make_model(Full(), num_layers=0), "num_layers must be"),
        (lambda: make_model(Full(), mlp_dim=-1), "mlp_dim must be"),
        (lambda: make_model(Full(), dropout_rate=1.0), "dropout_rate must be"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            wrong()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("norm", ["pre", pytest.param("post", marks=pytest.mark.full)])
def test_a_small_model_learns_in_a_hundred_steps(norm):
    """Whether token 1 stands anywhere before token 2: attention and positions are both needed."""
    model = make_model(Full(), norm=norm, width=32, mlp_dim=64)
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    keys = jax.random.split(jax.random.key(0), 3)
    first = jax.random.randint(keys[0], (512,), 0, MAX_LEN)
    second = (first + jax.random.randint(keys[1], (512,), 1, MAX_LEN)) % MAX_LEN
    inputs = jax.random.randint(keys[2], (512, MAX_LEN), 3, VOCAB)
    inputs = inputs.at[jnp.arange(512), first].set(1).at[jnp.arange(512), second].set(2)
    targets = (first < second).astype(int)

    @nnx.jit
    def step(model, optimizer, inputs, targets):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    for i in range(100):
        batch = slice(64 * (i % 6), 64 * (i % 6) + 64)
        step(model, optimizer, inputs[batch], targets[batch])
    accuracy = (model(inputs[384:]).argmax(-1) == targets[384:]).mean()
    assert accuracy > 0.85
