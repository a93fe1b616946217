"""Mixture of experts: against plain arithmetic, one expert is the dense layer, nothing of padding or of neighbours."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_fake import LENGTH as FAKE_LENGTH
from train_fake import VOCAB as FAKE_VOCAB
from train_fake import arrays, compile_cache, make_trainer, rows  # noqa: F401

from xformer import cost, layer_terms
from xformer.attention import Full, Window
from xformer.commands import cli, run
from xformer.models import MODELS, Encoder, EncoderClassifier
from xformer.nn import FeedForward, MixtureOfExperts
from xformer.nn.experts import active_params, places
from xformer.tasks.next_tokens import NextTokens
from xformer.train import step as steps
from xformer.train.settings import AXES

WIDTH, MLP, BATCH, LENGTH = 6, 10, 3, 12


def make(num_experts=4, experts_per_token=2, **options):
    options = {"capacity": 1.0, "activation": "relu", **options}
    sizes = {"num_experts": num_experts, "experts_per_token": experts_per_token}
    return MixtureOfExperts(WIDTH, MLP, **sizes, **options, rngs=nnx.Rngs(3))


def inputs(seed=0, batch=BATCH, length=LENGTH):
    x = np.random.default_rng(seed).normal(size=(batch, length, WIDTH)).astype(np.float32)
    return x, np.arange(length) < np.array([length, length - 3, 5])[:batch, None]


def reference(layer, x, mask, *, room=None):
    """The output, the balance of each row and the share dropped, in float64; `room` None: nothing is dropped."""
    value = lambda variable: np.asarray(variable[...], np.float64)
    count, each = layer.num_experts, layer.experts_per_token
    out, balance, dropped = np.zeros(x.shape), [], []
    for row, tokens in enumerate(np.asarray(x, np.float64)):
        scores = tokens @ value(layer.router.kernel)
        probs = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        used, sent = np.zeros(count), np.zeros(count)
        real = np.flatnonzero(mask[row])
        for t in real:
            chosen = np.argsort(-probs[t], kind="stable")[:each]
            gates = probs[t, chosen] / (probs[t, chosen].sum() if each > 1 else 1)
            for gate, expert in zip(gates, chosen, strict=True):
                sent[expert] += 1
                if room is None or used[expert] < room:
                    used[expert] += 1
                    dense = layer.experts
                    hidden = tokens[t] @ value(dense.expand.kernel)[expert] + value(dense.expand.bias)[expert]
                    wide = np.maximum(hidden, 0) @ value(dense.contract.kernel)[expert]
                    out[row, t] += gate * (wide + value(dense.contract.bias)[expert])
        balance.append(count * (sent / sent.sum()) @ probs[real].mean(0))
        dropped.append(1 - used.sum() / sent.sum())
    return out, np.array(balance), np.array(dropped)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_experts", "each"), [(4, 1), (4, 2), (3, 3)])
def test_it_is_what_the_papers_say(num_experts, each):
    layer = make(num_experts, each)
    layer.experts.expand.bias[...] = jax.random.normal(jax.random.key(1), (num_experts, MLP))
    x, mask = inputs()
    np.testing.assert_allclose(layer(x, mask), reference(layer, x, mask)[0], atol=1e-5)
    room = -(-each * LENGTH // num_experts)
    out, balance, dropped = reference(layer, x, mask, room=room)
    np.testing.assert_allclose(layer(x, mask, deterministic=False), out, atol=1e-5)
    losses, metrics = layer_terms.taken(layer)
    np.testing.assert_allclose(losses["balance_loss"][0], 0.01 * balance, rtol=1e-5)
    np.testing.assert_allclose(metrics["dropped_tokens"][0], dropped, atol=1e-6)
    assert each == num_experts or dropped.max() > 0  # else the case shows nothing


def test_places_count_each_expert_by_itself():
    expert = np.random.default_rng(0).integers(0, 4, 50)
    expected = [int((expert[:index] == one).sum()) for index, one in enumerate(expert)]
    np.testing.assert_array_equal(places(jnp.asarray(expert), 3), expected)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_one_expert_is_the_dense_layer(activation, deterministic):
    layer = make(1, 1, activation=activation)
    dense = FeedForward(WIDTH, MLP, activation=activation, rngs=nnx.Rngs(0))
    nnx.update(dense, jax.tree.map(lambda x: x[0], nnx.state(layer.experts)))
    x, _ = inputs()
    np.testing.assert_allclose(layer(x, deterministic=deterministic), dense(x), atol=1e-6)


def test_a_model_of_one_expert_is_that_of_none():
    sizes = {"attention": Full(), "num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8}
    plain, one = (MODELS["decoder"](11, 16, **sizes, **more, rngs=nnx.Rngs(0)) for more in ({}, {"num_experts": 1}))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(plain), nnx.state(one))


def test_experts_with_room_for_all_train_as_they_evaluate():
    layer, (x, mask) = make(4, 2, capacity=2.0), inputs()
    np.testing.assert_allclose(layer(x, mask, deterministic=False), layer(x, mask), atol=1e-5)


@pytest.mark.parametrize("deterministic", [True, False])
def test_neighbours_padding_and_later_tokens_change_nothing(deterministic):
    layer, (x, mask) = make(), inputs()
    call = lambda x, mask: np.asarray(layer(x, mask, deterministic=deterministic))
    before = call(x, mask)
    assert not before[~mask].any()
    changed = np.where(mask[..., None], x, np.nan)
    np.testing.assert_array_equal(call(changed, mask)[mask], before[mask])
    np.testing.assert_allclose(call(x[1:2], mask[1:2])[0], before[1], atol=1e-6)
    x[:, 6:] = 9
    np.testing.assert_allclose(call(x, mask)[:, :6], before[:, :6], atol=1e-6)


def test_in_evaluation_more_padding_changes_nothing():
    layer, (x, mask) = make(), inputs()
    wide = lambda y: np.pad(y, ((0, 0), (0, 5), *((0, 0),) * (y.ndim - 2)))
    np.testing.assert_allclose(layer(wide(x), wide(mask))[:, :LENGTH], layer(x, mask), atol=1e-6)


def test_what_is_counted_are_the_experts_in_use():
    layer = MixtureOfExperts(16, 32, num_experts=8, experts_per_token=2, capacity=1.0, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((4, 512, 16), jnp.float32)

    def flops(deterministic):
        def call(state, x):
            return nnx.merge(graphdef, state)(x, deterministic=deterministic)

        return cost.count(call, state, x)

    tokens = 4 * 512
    a_token, router = 2 * 2 * 16 * 32, tokens * 2 * 16 * 8
    assert flops(False).flops == tokens * 2 * a_token + router
    active = flops(True)
    assert tokens * 2 * a_token <= active.flops - router <= (tokens * 2 + 8 * 128) * a_token
    assert active.uncounted == ()
    dense = 2 * (16 * 32) + 32 + 16
    assert active_params(layer) == 2 * dense + 16 * 8


# In models.


def decoder(**options):
    options = {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_dim": 24, "num_experts": 4, **options}
    return MODELS["decoder"](11, 32, attention=Window(left=7, right=0), **options, rngs=nnx.Rngs(0))


def batch_of(size=4, length=20, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 11, (size, length + 1))
    real = np.arange(length) < rng.integers(4, length + 1, (size, 1))
    return {
        "inputs": tokens[:, :-1],
        "targets": np.where(real, tokens[:, 1:], -1).astype(np.int32),
        "segment_ids": real.astype(np.int32),
        "bytes": real.sum(1).astype(np.float32),
        "weights": np.ones(size, np.float32),
    }


class Task:
    """What a training step needs of the language model's task."""

    def inputs(self, batch):
        return {"inputs": batch["inputs"], "mask": batch["segment_ids"] > 0}

    metrics = staticmethod(NextTokens().metrics)


def one_step(model, batch, optimizer=None, **options):
    """The report of one training step, and the parameters after it."""
    optimizer = optimizer or optax.sgd(1.0)
    graphdef, params, rest = steps.split(model)
    state = steps.TrainState(jnp.int32(0), params, rest, optimizer.init(params))
    step = jax.jit(steps.train_step(graphdef, Task(), optimizer, lambda _: jnp.float32(1), **options))
    after, report = step(state, batch, jnp.uint32(0))
    assert jax.tree.structure(after.rest) == jax.tree.structure(rest)  # nothing that was sown stays
    return report, after.params


def test_the_step_adds_the_term_to_the_loss_of_each_example():
    """The gradient of the whole objective by itself, and the same from micro-batches."""
    batch, model = batch_of(), decoder(balance_weight=0.5, expert_capacity=1.0)
    graphdef, params, rest = steps.split(model)

    def objective(params):
        model = nnx.merge(graphdef, params, rest, copy=True)
        outputs = model(**Task().inputs(batch), deterministic=False)
        loss, weight = Task().metrics(outputs, batch)["loss"]
        blocks = [layer_terms.taken(model).losses["balance_loss"][0]]
        return ((loss + sum(blocks)) * weight).sum() / weight.sum()

    grads = jax.grad(objective)(params)
    report, after = one_step(model, batch)
    expected = jax.tree.map(lambda param, grad: param - grad, params, grads)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), after, expected)
    total, weight = report["sums"]["balance_loss"]
    assert float(total / weight) >= 2 * 0.5 * 0.99  # two layers, each 1 where all experts are used alike
    assert float(report["sums"]["dropped_tokens"][0]) > 0
    cut, in_parts = one_step(model, batch, accumulate=2)
    np.testing.assert_allclose(cut["sums"]["balance_loss"], (total, weight), rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), in_parts, after)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"remat": True}, {"scan_layers": True}, {"scan_layers": True, "remat": True}])
def test_scanned_and_recomputed_layers_train_alike(options):
    sizes = {"expert_capacity": 1.0, "experts_per_token": 2, "dropout_rate": 0.1}
    report, _ = one_step(decoder(**sizes), batch_of())
    other, _ = one_step(decoder(**sizes, **options), batch_of())
    assert report["sums"].keys() == other["sums"].keys()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), other["sums"], report["sums"])
    np.testing.assert_allclose(other["health"]["grad_norm"], report["health"]["grad_norm"], rtol=1e-4)


def test_a_layer_must_not_take_the_name_of_a_metric():
    terms = layer_terms.Terms({}, {"loss": (jnp.ones(4), jnp.ones(4))})
    with pytest.raises(ValueError, match="a layer's term must not be named as a metric of the task, got 'loss'"):
        steps.with_layers({"loss": (jnp.ones(4), jnp.ones(4))}, terms)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_step_by_step_it_decodes_as_in_one_call(dtype):
    model, tokens = decoder(experts_per_token=2, dtype=dtype), batch_of(2, 9)["inputs"]
    whole = model(tokens).dense()
    assert bool(jnp.isfinite(whole).all())
    if dtype == jnp.bfloat16:
        np.testing.assert_allclose(whole, decoder(experts_per_token=2)(tokens).dense(), atol=0.15)
        return
    caches, step = model.init_caches(2), nnx.jit(lambda model, x, caches: model.decode(x, caches))
    for index in range(tokens.shape[1]):
        logits, caches = step(model, tokens[:, index : index + 1], caches)
        np.testing.assert_allclose(logits.dense()[:, 0], whole[:, index], atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if issubclass(model, Encoder)])
def test_every_model_takes_it(name):
    extra = {"classifier": (2,), "two_tower": (2,), "token_classifier": (2,)}
    sizes = {"num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8, "num_experts": 2, "rngs": nnx.Rngs(0)}
    x = np.ones((2, 6), int)
    if name == "vision":
        model = MODELS[name](2, 8, 8, 1, attention=Full(), **sizes)
        model(np.ones((2, 8, 8, 1), np.float32), deterministic=False)
    else:
        model = MODELS[name](11, *extra.get(name, ()), 16, attention=Full(), **sizes)
        second = {"two_tower": (x, None), "encoder_decoder": (x,), "separator_decoder": (x,)}
        model(x, None, *second.get(name, ()), deterministic=False)
    losses, _ = layer_terms.taken(model)
    rows = 4 if name == "two_tower" else 2
    assert losses["balance_loss"][0].shape == (rows,)
    assert layer_terms.by_example(losses["balance_loss"], 2)[0].shape == (2,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts_per_token": 5}, "experts_per_token must be at most num_experts 4, got 5"),
        ({"num_experts": 0}, "num_experts must be"),
        ({"expert_capacity": 0.0}, "expert_capacity must be a number above 0, got 0.0"),
        ({"balance_weight": -1.0}, "balance_weight must be a number from 0, got -1.0"),
        ({"mlp_dim": 0}, "num_experts must be 1 where mlp_dim is 0, got 4"),
    ],
)
def test_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        decoder(**options)


# In runs.


def losses_on(workdir, mesh, **options):
    make = lambda rngs: EncoderClassifier(
        FAKE_VOCAB,
        2,
        FAKE_LENGTH,
        attention=Full(),
        num_layers=2,
        width=8,
        num_heads=4,
        mlp_dim=8,
        num_experts=4,
        experts_per_token=2,
        expert_capacity=1.0,
        scan_layers=True,
        rngs=rngs,
    )
    trainer = dataclasses.replace(make_trainer(workdir, mesh=mesh, **options), model_fn=make)
    engine = trainer.engine
    state, batches, found = engine.init(), engine.train_batches(trainer.data, 0), []
    for _ in range(2):
        state, report = engine.step(state, next(batches))
        found += [*report["sums"]["loss"], *report["sums"]["balance_loss"], *report["sums"]["dropped_tokens"]]
        found.append(report["health"]["grad_norm"])
    found.append(engine.evaluate((state.params, state.rest), trainer.data, "test")["loss"])
    return [float(x) for x in found]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, compile_cache):  # noqa: F811
    return losses_on(tmp_path_factory.mktemp("one"), {"data": 1})


@pytest.mark.full
@pytest.mark.parametrize("axes", [("data",), *itertools.combinations(AXES, 2)], ids="-".join)
def test_on_every_mesh_the_losses_of_one_device(tmp_path, one_device, axes):
    mesh = {"data": 8} if axes == ("data",) else {axes[0]: 4, axes[1]: 2}
    np.testing.assert_allclose(losses_on(tmp_path, mesh), one_device, rtol=2e-5, atol=1e-6)


@pytest.mark.full
def test_with_pmap_the_losses_of_one_device(tmp_path, one_device):
    found = losses_on(tmp_path, {"data": 4}, parallel="pmap")
    np.testing.assert_allclose(found, one_device, rtol=2e-5, atol=1e-6)


@pytest.mark.full
def test_a_run_is_resumed_exactly_and_logs_both(tmp_path, compile_cache):  # noqa: F811
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"the {word} went on.\n" for word in map(str, range(2_000))))

    def train(name, *settings, code=0):
        argv = ["--config=language_model:full", f"--workdir={tmp_path / name}", f"--data_dir={tmp_path / 'data'}"]
        argv += [f"--config.task.path={texts}", "--config.task.max_len=32", "--config.task.num_validation=8"]
        argv += ["--config.task.num_test=8", "--config.train.num_steps=6", "--config.train.batch_size=4"]
        argv += ["--config.model.num_layers=2", "--config.model.width=16", "--config.model.mlp_dim=16"]
        argv += ["--config.model.num_experts=4", "--config.model.experts_per_token=2", "--config.train.log_every=1"]
        argv += ["--config.train.mesh={'data': 1}", "--config.train.eval_every=3", "--config.train.checkpoint_every=3"]
        assert cli.exit_code(run.command, [*argv, *settings]) == code
        return tmp_path / name

    once = train("once")
    train("twice", "--config.train.stop_at_step=3", code=75)
    twice = train("twice")
    logged = rows(once, "train")
    assert all({"balance_loss", "dropped_tokens"} <= row.keys() for row in logged)
    assert rows(once, "validation")[0].keys().isdisjoint({"balance_loss", "dropped_tokens"})
    clean = lambda found: [{key: value for key, value in row.items() if key != "seconds"} for row in found]
    assert clean(rows(twice)) == clean(rows(once))
    for one, other in zip(arrays(twice, 6), arrays(once, 6), strict=True):
        np.testing.assert_array_equal(one, other)
    assert json.loads((once / "result.json").read_text())["flops_per_step"] > 0
