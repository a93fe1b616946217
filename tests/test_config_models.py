"""`model.name`, hybrid stacks and runs of older versions: from a config to a trained model and back."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import xformer
from xformer import arguments, experiment
from xformer import comparison as comparisons
from xformer import config as configs
from xformer.arguments import Parameter
from xformer.attention import BigBird, Full, Layers, Linformer, Rotary, Shape, Window
from xformer.bench import attention_costs
from xformer.commands import cli, inspect, pictures
from xformer.config import ConfigError
from xformer.models import MODELS, EncoderClassifier
from xformer.train import WorkdirMismatch

DEMO = f"{Path(__file__).parent.parent}/configs/demo.py"
STACK = 'attention={"name": "layers", "layers": ({"name": "window", "left": 3}, {"name": "full"})}'
SMALL = {
    "train.num_steps": 4,
    "train.eval_every": 2,
    "train.checkpoint_every": 2,
    "train.log_every": 1,
    "train.batch_size": 8,
    "train.mesh": {"data": 1},
    "task.num_train": 64,
    "task.num_validation": 21,
    "task.num_test": 19,
    "model.num_layers": 2,
    "model.width": 16,
    "model.mlp_dim": 16,
    "optimizer.warmup_steps": 1,
}


def load(*overrides):
    return configs.load_experiment(f"{DEMO}:full", overrides)


def test_the_default_model_is_the_classifier():
    built = load("train.num_steps=10", "model.head_dim=5")
    assert built.config.model.name == "classifier" and built.model is EncoderClassifier
    model = nnx.eval_shape(lambda: built.model_fn(vocab_size=17, num_classes=10, max_len=128)(nnx.Rngs(0)))
    assert model.blocks[0].attention.query.kernel.shape == (64, 4, 5)
    assert experiment.build(experiment.as_json(built.config)).config == built.config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.name=two_towers", "model.name: got 'two_towers', takes one of 'classifier', 'two_tower', "),
        ("model.name=two_tower", "model.name: two_tower reads inputs2, task listops gives inputs, mask"),
        (
            "model.name=token_classifier",
            "model.name: got 'token_classifier', whose outputs float32[1, 128, 10] do not ",
        ),
        ("model.vocab_size=5", "model.vocab_size: got 5, but the data of the task decides it"),
        ("model.rngs=5", "model.rngs: got 5, but model 'classifier' reads no such key"),
        ("model.heads=5", "model.heads: got 5, but model 'classifier' reads no such key"),
        ("model.num_layers=two", "model.num_layers: got 'two', takes an integer"),
        ("model.head_dim=0", "model.head_dim: head_dim must be an integer of at least 1, got 0"),
        ("attention.name=layers", "attention.position: got {'name': 'none'}, but attention 'layers' reads no such key"),
        ('attention={"name": "layers"}', "attention.layers: missing; takes a sequence"),
        ('attention={"name": "layers", "layers": ()}', "attention.layers: got (), takes at least one"),
        (STACK.replace("3", "-3"), "attention.layers[0].left: Window.left must be an integer of at least 0, got -3"),
        (STACK.replace("left", "lefft"), "attention.layers[0].lefft: got 3, but attention.layers[0] 'window' reads no"),
        (
            "attention.name=none",
            "attention.name: got 'none', which is for models without attention; model classifier h",
        ),
        (
            'model={"name": "bilstm", "width": 8, "hidden_dim": 8}',
            "attention: got 'full', takes {'name': 'none'}, as bilstm has no attention",
        ),
        (STACK.replace("full", "layers"), "attention.layers[1].name: got 'layers', takes one of 'full'"),
        (STACK.replace("full", "fulll"), "attention.layers[1].name: got 'fulll', takes one of 'full'"),
    ],
)
def test_what_is_wrong_is_one_line_about_its_key(override, message):
    with pytest.raises(ConfigError) as error:
        load(override)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_combinations_that_do_not_fit_are_about_the_key_that_is_wrong():
    for overrides, message in (
        ((STACK, "model.scan_layers=True", "model.num_layers=3"), "model.num_layers: num_layers must be a multiple of"),
        ((STACK, "model.num_layers=1"), "model.num_layers: num_layers must be at least 2, the entries of attention"),
        (("model.head_dim=5", 'attention.position={"name": "rotary"}'), "model.head_dim: head_dim must be even"),
    ):
        with pytest.raises(ConfigError) as error:
            load(*overrides)
        assert str(error.value).startswith(message)


def test_a_missing_key_of_the_model_and_a_missing_size_are_told_apart(monkeypatch):
    config = experiment.as_json(load().config)
    del config["model"]["width"]
    with pytest.raises(ConfigError, match=r"^model\.width: missing; takes an integer$"):
        experiment.build(config)

    class Translator(nnx.Module):
        def __init__(self, vocab_size: int, target_vocab_size: int, *, width: int, rngs: nnx.Rngs):
            raise AssertionError("refused before it is made")

        def __call__(self, inputs, mask=None, *, deterministic=True, rngs=None): ...

    for module in ("sections", "attention_sections", "experiment"):
        monkeypatch.setattr(f"xformer.{module}.MODELS", {**MODELS, "translator": Translator})
    without = {"attention": {"name": "none"}}
    with pytest.raises(ConfigError) as error:
        experiment.build(config | without | {"model": {"name": "translator", "width": 8}})
    assert str(error.value) == (
        "model.name: translator needs target_vocab_size, task listops gives vocab_size, num_classes, max_len"
    )


def test_a_model_from_outside_gets_the_sizes_and_arguments_that_it_names(monkeypatch):
    class Bag(nnx.Module):
        """Reads neither attention nor dtype, and hands on nothing."""

        def __init__(self, num_classes: int, vocab_size: int, width: int = 4, *, rngs: nnx.Rngs):
            self.embed, self.classify = (
                nnx.Embed(vocab_size, width, rngs=rngs),
                nnx.Linear(width, num_classes, rngs=rngs),
            )

        def __call__(self, inputs, *, deterministic=True, rngs=None, **others):
            return self.classify(self.embed(inputs).mean(1))

    for module in ("sections", "attention_sections", "experiment"):
        monkeypatch.setattr(f"xformer.{module}.MODELS", {**MODELS, "bag": Bag})
    config = experiment.as_json(load().config)
    built = experiment.build(config | {"attention": {"name": "none"}, "model": {"name": "bag"}})
    assert built.attention is None
    assert built.config.model.to_dict() == {"name": "bag", "width": 4}
    model = built.model_fn(vocab_size=17, num_classes=10, max_len=128)(nnx.Rngs(0))
    assert model.embed.embedding.shape == (17, 4)
    with pytest.raises(ConfigError, match=r"model\.name: bag needs vocab_size, task listops gives num_classes$"):
        built.model_fn(num_classes=10)


def test_arguments_that_a_class_hands_on_are_its_own():
    class Base:
        def __init__(self, size: int, *, depth: int = 2, **rest: int): ...

    class Middle(Base): ...

    class Model(Middle):
        def __init__(self, size: int, *, head: str = "a", **options: int): ...

    own = {"size": Parameter(int), "head": Parameter(str, "a"), "depth": Parameter(int, 2)}
    assert arguments.parameters(Model) == own and arguments.positional(Model) == ["size"]
    assert list(arguments.parameters(EncoderClassifier))[:9] == [
        "vocab_size", "num_classes", "max_len", "pooling", "chunk_len", "head", "head_dropout_rate", "head_bias",
        "attention",
    ]  # fmt: skip


def test_a_stack_is_completed_entry_by_entry():
    built = load(STACK.replace('"full"', '"bigbird", "position": {"name": "rotary"}'), "model.scan_layers=True")
    assert built.attention == Layers((Window(left=3, right=8), BigBird(block_size=8, position=Rotary())))
    config = json.loads(json.dumps(experiment.as_json(built.config)))
    window, bigbird = config["attention"]["layers"]
    assert (window["name"], window["right"], window["position"]) == ("window", 8, {"name": "none"})
    unscaled = {"scaling": "none", "factor": 1.0, "trained_len": None}
    assert (bigbird["block_size"], bigbird["position"]) == (8, {"name": "rotary", "base": 10000.0, **unscaled})
    again = experiment.build(config)
    assert again.attention == built.attention and experiment.as_json(again.config) == config


def test_variants_of_a_comparison_may_be_stacks():
    base = experiment.as_json(load().config)
    stack = {"name": "layers", "layers": ({"name": "window"}, {"name": "full"})}
    comparison = comparisons.check_comparison(
        {"name": "c", "base": base, "variants": {"full": {}, "hybrid": {"attention": stack}}}
    )
    (_, _, full), (_, _, hybrid) = comparisons.comparison_runs(comparison)
    assert full.attention.name == "full" and [op["name"] for op in hybrid.attention.layers] == ["window", "full"]
    assert configs.check(hybrid).attention == hybrid.attention


def test_no_preset_is_a_stack():
    with pytest.raises(ConfigError, match="takes full, window"):
        configs.load_config(f"{DEMO}:layers")


def test_the_costs_of_a_stack_are_the_mean_of_its_entries():
    stack = Layers((Full(), Linformer(rank=8, max_len=16)))
    plan = attention_costs.Plan({"stack": stack}, "stack", 2, 8, None, "float32", (16, 64), 16, 600.0)
    rows = attention_costs.measure(plan, lambda line: None)
    for row in rows:
        ops = (Full(), Linformer(rank=8, max_len=row.length))
        costs = [op.cost(Shape(1, row.length, row.length, 2, 8)).flops for op in ops]
        assert row.flops == sum(costs) / 2 and row.train_flops > 2 * row.flops
    assert rows[0].time_ms > 0 and "mean of its entries" in plan.note


def test_the_picture_of_a_stack_has_its_entries_for_parts():
    found = pictures.pattern(Layers((Window(left=1, right=1), Full(), Linformer(rank=2, max_len=8))), 8, 2)
    assert list(found.parts) == ["layer 0: Window", "layer 1: Full"] and found.allowed.all()
    np.testing.assert_array_equal(found.parts["layer 0: Window"], Window(left=1, right=1).pattern(8, 8, 2))
    assert found.note == "3 layers in turn, 1 of them without pairs"
    pooled = pictures.pattern(Layers((Linformer(rank=2, max_len=8),) * 2), 8, 2)
    assert pooled.allowed is None and "the length is mixed" in pooled.note


def test_inspect_draws_a_stack(tmp_path, capsys):
    out = tmp_path / "pattern.png"
    argv = (f"--config={DEMO}:full", f"--config.{STACK}", f"--out={out}", f"--data_dir={tmp_path}")
    assert cli.exit_code(inspect.command, argv) == 0, capsys.readouterr()
    shown = capsys.readouterr().out
    assert out.stat().st_size > 0 and "Layers(" in shown and "FLOPs of a training step" in shown


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(workdir, data folder, overrides) of a run of four steps whose layers are a scanned stack."""
    workdir, data_dir = tmp_path_factory.mktemp("runs") / "a", tmp_path_factory.mktemp("data")
    key, _, value = STACK.partition("=")
    overrides = SMALL | {key: value, "model.scan_layers": True}
    xformer.fit("demo:full", workdir, overrides=overrides, data_dir=data_dir)
    return workdir, data_dir, overrides


@pytest.mark.full
def test_a_stack_trains_and_loads(trained):
    run = xformer.load(trained[0])
    assert len(run.model.blocks) == 2 and run.config.attention.name == "layers"
    assert run.model.blocks[0].attention.attention_fn.op == Window(left=3, right=8)
    assert np.isfinite(run.predict(["[MAX 2 9 ]"]).probabilities).all()
    leaves = jax.tree.leaves(nnx.state(run.model.unrolled()))
    assert all(np.isfinite(leaf).all() for leaf in leaves)


@pytest.mark.full
def test_a_run_of_an_older_version_goes_on_and_loads(trained):
    """Its config.json lacks the keys that came later: they mean what they did then, their defaults."""
    workdir, data_dir, overrides = trained
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    result = json.loads((workdir / "result.json").read_text())
    older = {key: value for key, value in config["model"].items() if key not in ("name", "head_dim")}
    assert len(older) == len(config["model"]) - 2
    path.write_text(json.dumps(config | {"model": older}))
    try:
        assert xformer.fit("demo:full", workdir, overrides=overrides, data_dir=data_dir) == result
        assert xformer.load(workdir).step == result["best_step"]
        with pytest.raises(WorkdirMismatch, match=r"model\.head_dim: None there, 5 now"):
            xformer.fit("demo:full", workdir, overrides=overrides | {"model.head_dim": 5}, data_dir=data_dir)
        with pytest.raises(WorkdirMismatch, match=r"attention\.layers: "):
            other = overrides | {"attention": overrides["attention"].replace("3", "4")}
            xformer.fit("demo:full", workdir, overrides=other, data_dir=data_dir)
    finally:
        path.write_text(json.dumps(config))
