"""Constants of an op: drawn, held, updated while training and saved; never trained, decayed or counted."""

import dataclasses

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_fake import LENGTH, VOCAB, arrays, compile_cache, make_trainer, rows  # noqa: F401

from xformer.attention import Attention, Cost, Full, Layers, Options, Shape, T5Bias, Window
from xformer.models import EncoderClassifier
from xformer.nn import AttentionFn, Constant, MultiHeadAttention
from xformer.nn import linen as xformer_linen
from xformer.train import ExponentialMovingAverage, Interrupted, warm_start
from xformer.train import step as steps


@dataclasses.dataclass(frozen=True)
class RandomFeatures(Attention):
    """Positive random features (Choromanski et al. 2021, lemma 1), not normalised for speed."""

    num_features: int = 8
    seed: int = 3

    def init(self, rng, shape):
        return {}

    def constants(self, rng, shape):
        return {"directions": jax.random.normal(rng, (shape.num_heads, self.num_features, shape.head_dim))}

    def attend(self, call, params):
        directions = params["constants"]["directions"]
        features = lambda x: jnp.exp(jnp.einsum("bthd,hfd->bthf", x, directions) - jnp.sum(x**2, -1, keepdims=True) / 2)
        query, key = (
            features(call.query * call.query.shape[-1] ** -0.25),
            features(call.key * call.key.shape[-1] ** -0.25),
        )
        if call.mask is not None:
            key = key * jnp.broadcast_to(call.mask, (len(key), 1, 1, key.shape[1]))[:, 0, 0, :, None, None]
        weights = jnp.einsum("bthf,bshf->bhts", query, key)
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-9)
        return jnp.einsum("bhts,bshd->bthd", weights, call.value)

    def pattern(self, q_len, kv_len, num_heads):
        return None

    def cost(self, shape):
        return Cost(0, 0, 0, ())


@dataclasses.dataclass(frozen=True)
class Centred(Full):
    """Full attention from queries less a running mean of the keys, and a count of its updates."""

    rate: float = 0.5

    def constants(self, rng, shape):
        mean = jax.random.normal(rng, (shape.num_kv_heads or shape.num_heads, shape.head_dim))
        return {"mean": mean, "updates": jnp.int32(0)}

    def update(self, constants, query, key, mask):
        real = jnp.ones((*key.shape[:2], 1, 1)) if mask is None else (mask[:, 0, 0, :, None, None] > 0)
        new = jnp.sum(key * real, (0, 1)) / jnp.maximum(real.sum(), 1)
        return {
            "mean": (1 - self.rate) * constants["mean"] + self.rate * new,
            "updates": constants["updates"] + 1,
        }

    def attend(self, call, params):
        query = call.query - params["constants"]["mean"].astype(call.query.dtype)
        return super().attend(dataclasses.replace(call, query=query), params)


def inputs(length=6, num_heads=2, head_dim=4, batch=2):
    return jax.random.normal(jax.random.key(1), (3, batch, length, num_heads, head_dim))


@pytest.mark.parametrize("op", [RandomFeatures(), Centred()], ids=["features", "centred"])
def test_a_bare_op_draws_from_its_seed_and_a_call_may_bring_its_own(op):
    query, key, value = inputs()
    shape = Shape(1, 6, 6, 2, 4)
    drawn = op.constants(jax.random.key(getattr(op, "seed", 0)), shape)
    other = op.constants(jax.random.key(9), shape)
    bare = op(query, key, value)
    np.testing.assert_array_equal(bare, op(query, key, value, params={"constants": drawn}))
    assert np.abs(bare - op(query, key, value, params={"constants": other})).max() > 1e-3
    assert Window().constants(jax.random.key(0), shape) == {}


def test_attention_fn_holds_constants_that_are_no_params():
    query, key, value = inputs()
    rngs = nnx.Rngs(5)
    held = AttentionFn(RandomFeatures(), num_heads=2, head_dim=4, rngs=rngs)
    assert not jax.tree.leaves(nnx.state(held, nnx.Param))
    (directions,) = jax.tree.leaves(nnx.state(held, Constant))
    expected = RandomFeatures()(query, key, value, params={"constants": {"directions": directions}})
    np.testing.assert_array_equal(held(query, key, value), expected)
    other = AttentionFn(RandomFeatures(), num_heads=2, head_dim=4, rngs=rngs)
    assert np.abs(other(query, key, value) - expected).max() > 1e-3  # layers draw their own
    bare = AttentionFn(RandomFeatures(), num_heads=2, head_dim=4)
    np.testing.assert_array_equal(bare(query, key, value), RandomFeatures()(query, key, value))


def test_our_layer_updates_while_training_only_and_after_attending():
    layer = MultiHeadAttention(2, 8, attention_fn=Centred(), rngs=nnx.Rngs(0))
    x, mask = jax.random.normal(jax.random.key(2), (2, 5, 8)), jnp.arange(5) < jnp.array([[5], [3]])
    constants = lambda: jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, Constant)))
    before = constants()
    evaluated = layer(x, mask)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, constants()))
    np.testing.assert_array_equal(layer(x, mask, deterministic=False), evaluated)  # of the constants before the update
    held = layer.attention_fn.constants
    keys = np.asarray(layer.key(x))[np.asarray(mask)]
    start = before["attention_fn"]["constants"]["mean"]
    np.testing.assert_allclose(held["mean"][...], 0.5 * start + 0.5 * keys.mean(0), rtol=1e-5, atol=1e-6)
    assert held["updates"][...] == 1


def test_constants_change_with_a_context_and_not_with_a_cache():
    layer = MultiHeadAttention(2, 8, attention_fn=Centred(causal=True), rngs=nnx.Rngs(0))
    held = layer.attention_fn.constants
    x, context = jax.random.normal(jax.random.key(2), (2, 2, 5, 8))
    layer(x, cache=layer.init_cache(2, 8), deterministic=False)
    assert held["updates"][...] == 0  # decoding is no training
    start = held["mean"][...]
    layer(x, context=context, query_offset=0, deterministic=False)
    expected = 0.5 * start + 0.5 * layer.key(context).mean((0, 1))
    np.testing.assert_allclose(held["mean"][...], expected, rtol=1e-5, atol=1e-6)


def test_the_log_sum_exp_knows_constants_and_they_know_the_depth_of_values():
    @dataclasses.dataclass(frozen=True)
    class Deep(Centred):
        def constants(self, rng, shape):
            assert shape.value_depth == 3
            return super().constants(rng, shape)

        def attend_lse(self, call, params):
            query = call.query - params["constants"]["mean"]
            return super().attend_lse(dataclasses.replace(call, query=query), params)

    query, key, value = inputs()
    out, lse = Deep().attend_with_lse(query, key, value[..., :3], Options())
    np.testing.assert_allclose(out, Deep()(query, key, value[..., :3]), rtol=1e-6)
    mean = Deep().constants(jax.random.key(0), Shape(1, 6, 6, 2, 4, None, 3))["mean"]
    scores = jnp.einsum("bthd,bshd->bths", query - mean, key) / 2
    np.testing.assert_allclose(lse, jax.nn.logsumexp(scores, -1), rtol=1e-5)


def test_linen_holds_constants_in_a_collection_of_their_own():
    query, key, value = inputs()
    layer = xformer_linen.AttentionFn(op=Centred())
    variables = layer.init(jax.random.key(0), query, key, value)
    assert set(variables) == {"constants"} and variables["constants"]["updates"] == 0
    out, changed = layer.apply(variables, query, key, value, mutable=["constants"])
    np.testing.assert_array_equal(out, layer.apply(variables, query, key, value))
    np.testing.assert_array_equal(out, Centred()(query, key, value, params=variables))
    expected = Centred().update(variables["constants"], query, key, None)
    jax.tree.map(np.testing.assert_array_equal, changed["constants"], expected)
    stock = linen.MultiHeadDotProductAttention(
        2, attention_fn=xformer_linen.AttentionFn(op=RandomFeatures(), parent=None)
    )
    held = stock.init(jax.random.key(0), jnp.ones((1, 4, 8)))
    assert held["constants"]["attention_fn"]["directions"].shape == (2, 8, 4)


def model(rngs, op=None, **options):
    settings = {"num_layers": 3, "width": 8, "num_heads": 2, "mlp_dim": 8, **options}
    return EncoderClassifier(VOCAB, 2, LENGTH, attention=op or Centred(), rngs=rngs, **settings)


def trained_once(**options):
    """(constants by layer after a training call, outputs, gradient of the sum of outputs)."""
    graphdef, params, rest = steps.split(model(nnx.Rngs(0), **options))
    tokens = jax.random.randint(jax.random.key(3), (4, LENGTH), 1, VOCAB)
    mask = jnp.arange(LENGTH) < jnp.array([[6], [3], [1], [5]])

    @jax.jit
    def run(params, rest):
        def total(params):
            whole = nnx.merge(graphdef, params, rest, copy=True)
            outputs = whole(tokens, mask, deterministic=False, rngs=nnx.Rngs(dropout=1))
            return outputs.sum(), (outputs, steps.split(whole)[2])

        grads, (outputs, rest) = jax.grad(total, has_aux=True)(params)
        return outputs, grads, rest

    outputs, grads, rest = run(params, rest)
    whole = nnx.merge(graphdef, params, rest).unrolled()
    held = [
        jax.tree.map(
            lambda x: np.asarray(x[...]),
            block.attention.attention_fn.constants,
            is_leaf=lambda x: isinstance(x, Constant),
        )
        for block in whole.blocks
    ]
    grads = nnx.merge(graphdef, grads, rest).unrolled()
    return held, outputs, jax.tree.leaves(nnx.state(grads, nnx.Param))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("options", [{"scan_layers": True}, {"remat": True}, {"scan_layers": True, "remat": True}])
def test_scan_and_remat_carry_constants_as_the_plain_model_does(options, shared):
    if shared:
        options = options | {
            "share_attention_params": True,
            "op": Centred(position=T5Bias()),
        }  # parameters that can be shared
    plain = trained_once(**{name: x for name, x in options.items() if name not in ("scan_layers", "remat")})
    other = trained_once(**options)
    counts = [held["updates"] for held in plain[0]]
    assert counts == ([3, 3, 3] if shared else [1, 1, 1])
    for one, two in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.full)], ids=["own", "shared"])
def test_a_scanned_hybrid_stack_carries_constants_as_the_plain_model_does(shared):
    ops = (Centred(position=T5Bias() if shared else None), Window(2, 2))  # parameters that can be shared
    options = {"op": Layers(ops), "num_layers": 4, "share_attention_params": shared}
    plain, other = trained_once(**options), trained_once(**options, scan_layers=True, remat=True)
    counts = [int(held["updates"]) if held else None for held in other[0]]
    assert counts == [2 if shared else 1, None] * 2
    for one, two in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_training_neither_counts_nor_decays_nor_moves_constants_by_gradient(tmp_path):
    make = lambda rngs: model(rngs, RandomFeatures())
    result = make_trainer(tmp_path, model_fn=make).fit()
    params = steps.split(make(nnx.Rngs(0)))[1]
    assert result["num_params"] == steps.num_params(params)
    constants = {name: x for name, x in read(tmp_path).items() if "constants" in name}
    initial = steps.initialize(make, make_trainer(tmp_path, model_fn=make).optimizer, 3)[1].rest
    assert len(constants) == 3
    for one, two in zip(constants.values(), jax.tree.leaves(initial), strict=True):
        np.testing.assert_array_equal(one, two)


def read(workdir, step=10):
    return warm_start.read(workdir / "checkpoints" / str(step), "model")


@pytest.mark.full
@pytest.mark.usefixtures("compile_cache")
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 2, "mesh": {"data": 2}},
        {"parallel": "pmap", "mesh": {"data": 2}, "accumulate": 2},
        {"callbacks": (("ema", ExponentialMovingAverage(0.5)),), "mesh": {"fsdp": 2}},
    ],
    ids=["accumulated", "pmap", "fsdp and average"],
)
def test_constants_go_on_exactly_after_a_restart(tmp_path, settings):
    make = lambda name, **more: make_trainer(
        tmp_path / name, model_fn=lambda rngs: model(rngs, scan_layers=True), **settings, **more
    )
    make("once").fit()
    with pytest.raises(Interrupted):
        make("twice", stop_at_step=5).fit()
    make("twice").fit()
    assert rows(tmp_path / "once") == rows(tmp_path / "twice")
    for one, other in zip(arrays(tmp_path / "once", 10), arrays(tmp_path / "twice", 10), strict=True):
        np.testing.assert_array_equal(one, other)
    (updates,) = [x for name, x in read(tmp_path / "once").items() if name.endswith("updates")]
    assert updates.tolist() == [10 * settings.get("accumulate", 1)] * 3


def test_pmap_averages_what_each_device_saw(tmp_path):
    one = lambda rngs: model(rngs, num_layers=1)
    for name, settings in {"jit": {}, "pmap": {"parallel": "pmap", "mesh": {"data": 2}}}.items():
        trainer = make_trainer(tmp_path / name, model_fn=one, num_steps=1, dropout_rate=0, **settings)
        trainer.fit()
    means = [x for name in ("jit", "pmap") for path, x in read(tmp_path / name, 1).items() if path.endswith("mean")]
    assert np.abs(means[0] - means[1]).max() < 0.004 and means[0].shape == (2, 4)  # masks weigh the devices otherwise
