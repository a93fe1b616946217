"""The models that share the encoder: what each head gives, that it learns, scans, resumes and shards."""

import dataclasses
import inspect
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_fake import LENGTH, VOCAB, FakeData, FakeTask, arrays, compile_cache, make_trainer, rows  # noqa: F401

from xformer.attention import BigBird, Full, Shaw, Window
from xformer.models import MODELS, Encoder, EncoderClassifier, EncoderOptions, TokenClassifier, TwoTower
from xformer.train import Interrupted

pytestmark = pytest.mark.usefixtures("compile_cache")
CLASSES, MAX_LEN = 3, 16


def make(cls, op, seed=0, **kwargs):
    kwargs = {"num_layers": 2, "width": 16, "num_heads": 4, "mlp_dim": 24, "rngs": nnx.Rngs(seed), **kwargs}
    return cls(VOCAB, CLASSES, MAX_LEN, attention=op, **kwargs)


def documents(real, length=10, seed=0):
    inputs = jax.random.randint(jax.random.key(seed), (len(real), length), 1, VOCAB)
    mask = jnp.arange(length) < jnp.array(real)[:, None]
    return jnp.where(mask, inputs, 0), mask


def batch(cls):
    first = documents((10, 6))
    return (*first, *documents((7, 8), length=8, seed=1)) if cls is TwoTower else first


# The parameters of a classifier as first released, whose checkpoints must stay readable.
CLASSIFIER_PATHS = [
    "blocks/N/attention/attention_fn/params/position/key",
    "blocks/N/attention/attention_fn/params/position/value",
    "blocks/N/attention/key/bias",
    "blocks/N/attention/key/kernel",
    "blocks/N/attention/out/bias",
    "blocks/N/attention/out/kernel",
    "blocks/N/attention/query/bias",
    "blocks/N/attention/query/kernel",
    "blocks/N/attention/value/bias",
    "blocks/N/attention/value/kernel",
    "blocks/N/attention_norm/bias",
    "blocks/N/attention_norm/scale",
    "blocks/N/feed_forward/contract/bias",
    "blocks/N/feed_forward/contract/kernel",
    "blocks/N/feed_forward/expand/bias",
    "blocks/N/feed_forward/expand/kernel",
    "blocks/N/feed_forward_norm/bias",
    "blocks/N/feed_forward_norm/scale",
    "classify/bias",
    "classify/kernel",
    "embed/table",
    "final_norm/bias",
    "final_norm/scale",
]


def paths(model):
    return {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def test_the_parameters_of_a_classifier_have_the_paths_of_old_checkpoints():
    op, kwargs = Full(position=Shaw(max_distance=2)), {"pooling": "cls", "position_embedding": "learned"}
    unrolled = {path.replace("N", index) for path, index in itertools.product(CLASSIFIER_PATHS, "01")}
    assert paths(make(EncoderClassifier, op)) == unrolled
    scanned = {path.replace("N/", "") for path in CLASSIFIER_PATHS} | {"cls", "positions/table"}
    assert paths(make(EncoderClassifier, op, scan_layers=True, **kwargs)) == scanned


def test_the_initial_parameters_of_a_classifier_are_those_of_old_runs():
    model = EncoderClassifier(
        13, 3, 16, attention=Full(position=Shaw(max_distance=2)), num_layers=2, width=8, num_heads=2, mlp_dim=8,
        scan_layers=True, pooling="cls", position_embedding="learned", rngs=nnx.Rngs(0),
    )  # fmt: skip
    total = lambda leaf: float(np.abs(leaf[...]).sum())
    blocks = model.blocks
    found = [
        model.embed.table, model.cls, model.positions.table, blocks.attention.query.kernel,
        blocks.feed_forward.contract.kernel, model.classify.kernel,
    ]  # fmt: skip
    expected = [36.704926, 8.423141, 39.325283, 35.576874, 34.751816, 7.855744]
    np.testing.assert_allclose([total(leaf) for leaf in found], expected, rtol=1e-5)


def test_the_options_of_an_encoder_are_its_keywords():
    arguments = inspect.signature(Encoder.__init__).parameters.values()
    keywords = {argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY}
    options = typing.get_type_hints(EncoderOptions, include_extras=True)
    assert keywords == set(options)
    required = {argument.name for argument in arguments if argument.default is argument.empty} & keywords
    assert required == {name for name, hint in options.items() if typing.get_origin(hint) is typing.Required}
    assert set(MODELS) >= {"classifier", "two_tower", "token_classifier"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kwargs", [{}, {"pooling": "cls"}], ids=["mean", "cls"])
def test_two_tower_is_the_head_of_the_long_range_arena(kwargs):
    model = make(TwoTower, Full(), **kwargs)
    inputs, mask, inputs2, mask2 = batch(TwoTower)
    a, b = (model.pool(model.encode(*args), args[1]) for args in ((inputs, mask), (inputs2, mask2)))
    assert a.shape == b.shape == (2, 16)
    first, second, last = model.head
    assert [layer.kernel.shape for layer in model.head] == [(64, 24), (24, 12), (12, CLASSES)]
    hidden = jax.nn.relu(first(jnp.concatenate([a, b, a * b, a - b], axis=-1)))
    logits = model(inputs, mask, inputs2, mask2)
    np.testing.assert_allclose(logits, last(jax.nn.relu(second(hidden))), atol=1e-6)
    assert logits.shape == (2, CLASSES) and logits.dtype == jnp.float32
    # Neither what stands in padding nor another pair of the batch matters; the order of the two documents does.
    np.testing.assert_array_equal(model(jnp.where(mask, inputs, 5), mask, jnp.where(mask2, inputs2, 5), mask2), logits)
    np.testing.assert_allclose(model(*(x[1:] for x in batch(TwoTower))), logits[1:], atol=2e-6)
    assert np.abs(model(inputs2, mask2, inputs, mask) - logits).max() > 1e-4


def test_the_two_documents_have_dropout_masks_of_their_own():
    model = make(TwoTower, Full(), dropout_rate=0.5)
    inputs, mask = documents((10, 10))
    seen = []
    object.__setattr__(model, "pool", lambda x, real: seen.append(x) or TwoTower.pool(model, x, real))
    model(inputs, mask, inputs, mask, deterministic=False, rngs=nnx.Rngs(dropout=0))
    first, second = seen[0][::2], seen[0][1::2]
    assert first.shape == second.shape == (2, 10, 16) and np.abs(first - second).max() > 1e-2


def test_token_classifier_classifies_every_token():
    model = make(TokenClassifier, Window(left=1, right=1), num_layers=1, position_embedding="none")
    inputs, mask = documents((10, 6))
    logits = model(inputs, mask)
    assert logits.shape == (2, 10, CLASSES) and logits.dtype == jnp.float32 and np.isfinite(logits).all()
    np.testing.assert_allclose(model.classify(model.encode(inputs, mask)), logits, atol=1e-6)
    places = jnp.array([[9, 0], [3, 3]])
    some = np.take_along_axis(np.asarray(logits), places[..., None], axis=1)
    np.testing.assert_allclose(model(inputs, mask, places=places), some, atol=1e-6)
    moved = np.abs(model(inputs.at[0, 4].set(inputs[0, 4] % 9 + 1), mask) - logits).max(axis=2)
    np.testing.assert_array_equal(moved[0] > 0, (np.arange(10) >= 3) & (np.arange(10) <= 5))
    garbage = model(jnp.where(mask, inputs, 5), mask)
    np.testing.assert_array_equal(garbage[mask], logits[mask])


@pytest.mark.parametrize("cls", [TwoTower, TokenClassifier])
def test_scanned_recomputed_layers_give_the_same_model(cls):
    op, args = BigBird(block_size=2, num_random_blocks=1), batch(cls)
    plain, scanned = make(cls, op), make(cls, op, scan_layers=True, remat=True)
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(m)) for m in (scanned.unrolled(), plain)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    gradient = nnx.jit(nnx.value_and_grad(lambda model: jnp.sum(model(*args) ** 2)))
    (value, grads), (other, other_grads) = gradient(plain), gradient(scanned)
    np.testing.assert_allclose(other, value, rtol=1e-5)
    nnx.update(scanned, other_grads)
    for ours, theirs in zip(jax.tree.leaves(nnx.state(scanned.unrolled())), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", [TwoTower, TokenClassifier])
def test_bfloat16_computes_near_float32(cls):
    args = batch(cls)
    model, half = make(cls, Full()), make(cls, Full(), dtype=jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(half))} == {"float32"}
    assert half(*args).dtype == jnp.float32
    np.testing.assert_allclose(half(*args), model(*args), atol=0.2)


def test_bad_sizes_are_one_line():
    for wrong, message in (
        (lambda: make(TwoTower, Full(), mlp_dim=1), "mlp_dim must be at least 2"),
        (lambda: make(TwoTower, Full(), pooling="max"), "pooling must be one of 'mean', 'attention', 'cls', 'first', "),
        (lambda: TokenClassifier(VOCAB, 0, 8, **OPTIONS), "num_classes must be an integer of at least 1, got 0"),
        (lambda: EncoderClassifier(VOCAB, True, 8, **OPTIONS), "num_classes must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    model, (inputs, mask) = make(TwoTower, Full()), documents((10, 6))
    with pytest.raises(ValueError, match=r"inputs2 must hold a document for each of 2 inputs, got \(1, 10\)"):
        model(inputs, mask, inputs[:1], mask[:1])


OPTIONS = {"attention": Full(), "num_layers": 1, "width": 8, "num_heads": 4, "mlp_dim": 8, "rngs": nnx.Rngs(0)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cls", [TwoTower, TokenClassifier])
def test_it_learns(cls):
    """Pairs: whether both documents begin with the same token. Tokens: whether the one before was token 1."""
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = jax.random.randint(keys[0], (256, 8), 1, 5)
    if cls is TwoTower:
        other = jnp.where(jax.random.bernoulli(keys[2], 0.5, (256, 1)), inputs, inputs % 4 + 1)
        other = jnp.concatenate([other[:, :1], jax.random.randint(keys[1], (256, 7), 1, 5)], axis=1)
        args, targets = (inputs, None, other, None), (inputs[:, 0] == other[:, 0]).astype(int)
    else:
        args, targets = (inputs, None), jnp.pad(inputs[:, :-1] == 1, ((0, 0), (1, 0))).astype(int)
    model = make(cls, Full(), num_layers=1, width=32, mlp_dim=32, position_embedding="learned")
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(*args), targets).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


class PairTask(FakeTask):
    """The class of a pair is that of the first document; the second is the same one backwards."""

    def inputs(self, batch):
        inputs, other = batch["inputs"], batch["inputs"][:, ::-1]
        return {"inputs": inputs, "mask": inputs > 0, "inputs2": other, "mask2": other > 0}


def pair_trainer(workdir, **kwargs):
    options = {"num_layers": 2, "width": 8, "num_heads": 4, "mlp_dim": 8, "scan_layers": True, "dropout_rate": 0.2}
    op = BigBird(block_size=1, num_random_blocks=1, num_global_blocks=1)
    model_fn = lambda rngs: TwoTower(VOCAB, 2, LENGTH, attention=op, **options, rngs=rngs)
    trainer = make_trainer(workdir, task=PairTask(), data=FakeData(), **kwargs)
    return dataclasses.replace(trainer, model_fn=model_fn)


@pytest.mark.full
def test_pairs_train_and_resume_exactly(tmp_path):
    whole = pair_trainer(tmp_path / "whole").fit()
    with pytest.raises(Interrupted):
        pair_trainer(tmp_path / "parts", stop_at_step=5).fit()
    parts = pair_trainer(tmp_path / "parts").fit()
    assert parts["test"] == whole["test"] and rows(tmp_path / "parts") == rows(tmp_path / "whole")
    for ours, theirs in zip(*(arrays(tmp_path / name, 10) for name in ("parts", "whole")), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.full
def test_pairs_have_the_losses_of_one_device_on_a_mesh(tmp_path):
    found = {}
    for name, mesh in (("one", {"data": 1}), ("many", {"fsdp": 4, "tensor": 2})):
        trainer = pair_trainer(tmp_path / name, mesh=mesh)
        engine = trainer.engine
        state, report = engine.step(engine.init(), next(engine.train_batches(trainer.data, 0)))
        found[name] = [float(report["sums"]["loss"][0]), float(report["health"]["grad_norm"])]
    np.testing.assert_allclose(found["many"], found["one"], rtol=2e-5)
    head = [leaf for path, leaf in jax.tree.leaves_with_path(state.params) if "'head'" in jax.tree_util.keystr(path)]
    assert len(head) == 6 and {axis for leaf in head for axis in leaf.sharding.spec} >= {"fsdp"}
