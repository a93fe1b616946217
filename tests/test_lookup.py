"""Names of classes from outside, `package.module:Class`: found, checked as our own are, and refused in a line."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from xformer import attention, config, config_help, lookup, schema
from xformer.attention import Attention, Full, Position
from xformer.checks import ArgumentError
from xformer.schema import ConfigError
from xformer.train.sums import reduce

MODULE = '''
import dataclasses
from xformer.attention import Window, Position, ALiBi
from xformer.tasks import Task

@dataclasses.dataclass(frozen=True)
class Near(Window):
    """A window of one number."""
    reach: int = 3
    flavour: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.reach > 100:
            raise ValueError(f"Near.reach must be at most 100, got {self.reach}")
        if self.reach == 77:
            raise RuntimeError("seventy-seven")

@dataclasses.dataclass(frozen=True)
class Slope(ALiBi):
    steep: bool = False

class Unfinished(Task):
    pass

class Odd:
    def __init__(self, x: "Missing" = 1, y: "int" = 2, z: "Missing" = None, **rest): ...

number = 3

def function(): ...

def not_one(rate): return [rate]

def greedy(rate, clip_norm=1.0): ...

import jax.numpy as jnp
from flax import nnx
from xformer.tasks import Metric

@dataclasses.dataclass(frozen=True)
class Falls(Window):
    def attend(self, call, params):
        raise KeyError("of the call")

class Bag(nnx.Module):
    """Two numbers from the mean of the tokens."""
    def __init__(self, vocab_size: int, num_classes: int, *, size: int = 4, sharp: bool = False, rngs: nnx.Rngs):
        if size == 77:
            raise RuntimeError("seventy-seven")
        self.embed = nnx.Embed(vocab_size, size, rngs=rngs)
        self.out = nnx.Linear(size, num_classes, rngs=rngs)

    def __call__(self, inputs, mask, *, deterministic=True, rngs=None):
        return self.out(self.embed(inputs).mean(1))

class Certain(Metric):
    """Mean logit of the class; or, added up, the largest class counted."""
    better = "max"

    def __init__(self, name: str = "certain", wrong: str = ""):
        self.name, self.wrong = name, wrong

    def of_batch(self, outputs, batch):
        values = jnp.take_along_axis(outputs, batch["targets"][:, None], -1)[:, 0]
        if self.wrong == "shape":
            return values, batch["weights"][:, None]
        return values, batch[self.wrong or "weights"]

class Nameless(Metric):
    def of_batch(self, outputs, batch): ...

class Loss(Nameless):
    name, better = "loss", "min"

class Seconds(Loss):
    name = "seconds"

class Sums(Loss):
    name = "f1"

class Counts(Metric):
    name, better = "spread", "min"

    def of_batch(self, outputs, batch):
        hot = (jnp.arange(outputs.shape[-1]) == batch["targets"][:, None]) * batch["weights"][:, None]
        return hot.sum(0)

    def finish(self, sums):
        return sums.max() - sums.min()
'''


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A module `scratch_ops` that can be imported, and one that cannot be."""
    (tmp_path / "scratch_ops.py").write_text(MODULE)
    (tmp_path / "scratch_broken.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "scratch_raises.py").write_text("\n1 / 0\n")
    (tmp_path / "scratch_syntax.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("scratch_")]:
        del sys.modules[name]


def settings(**sections):
    """A small experiment with sections replaced."""
    base = {
        "name": "scratch",
        "attention": {"name": "full"},
        "model": {"num_layers": 1, "width": 8, "num_heads": 2, "mlp_dim": 8},
        "task": {"name": "listops", "preset": "listops_128"},
        "optimizer": {"name": "adamw"},
        "train": {"num_steps": 2, "batch_size": 4, "mesh": {"data": 1}},
    }
    return base | sections


def test_an_op_and_a_position_from_outside_are_built_and_stored(house):
    section = {"name": "scratch_ops:Near", "reach": 4, "position": {"name": "scratch_ops:Slope", "steep": True}}
    built = config.build(settings(attention=section))
    assert type(built.attention).__name__ == "Near" and built.attention.reach == 4
    assert built.attention.position.steep is True
    stored = built.config.to_dict()["attention"]
    assert stored["name"] == "scratch_ops:Near" and stored["flavour"] == 0.5
    assert config.build(built.config).attention == built.attention
    assert attention.build(section, built.task.length) == built.attention  # without the config room too


def test_presets_take_an_op_from_outside(house):
    from xformer import presets

    assert presets.attention("scratch_ops:Near+shaw") == {"name": "scratch_ops:Near", "position": {"name": "shaw"}}
    assert presets.attention("scratch_ops:Near")["position"] == {"name": "none"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reach": "far"}, r"^attention.reach: got 'far', takes an integer$"),
        ({"reech": 3}, r"^attention.reech: got 3, but attention 'scratch_ops:Near' reads no such key; .*'reach'"),
        ({"reach": 101}, r"^attention.reach: Near.reach must be at most 100, got 101$"),
        (
            {"reach": 77},
            r"^attention.name: scratch_ops:Near raised RuntimeError: seventy-seven \(scratch_ops.py, line ",
        ),
        (
            {"position": {"name": "scratch_ops:Near"}},
            r"^attention.position.name: got .*xformer.attention.position_term.Pos",
        ),
    ],
)
def test_arguments_of_a_class_from_outside_are_checked_as_our_own(house, changes, message):
    with pytest.raises(ConfigError, match=message):
        config.build(settings(attention={"name": "scratch_ops:Near", **changes}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scratch_opz:Near", r"ModuleNotFoundError: No module named 'scratch_opz'; searched: .*working directory"),
        ("scratch_ops:Neer", r"there is no Neer in .*scratch_ops.py; did you mean Near\?"),
        ("scratch_ops:Near.x:y", r"takes 'package.module:Class', such as"),
        ("scratch_ops:", r"takes 'package.module:Class', such as"),
        (":Near", r"takes 'package.module:Class', such as"),
        ("../scratch_ops:Near", r"takes 'package.module:Class', such as"),
        ("scratch_broken:Near", r"importing scratch_broken fails with ModuleNotFoundError: No module named 'no_such_p"),
        ("scratch_raises:Near", r"ZeroDivisionError: division by zero \(scratch_raises.py, line 2\)"),
        ("scratch_syntax:Near", r"importing scratch_syntax fails with SyntaxError: .*scratch_syntax.py, line 1"),
        ("scratch_ops:Slope", r"does not derive from it: takes a class that derives from xformer.attention.interface"),
        ("scratch_ops:number", r"which is 'int' object, takes a class that derives from"),
        ("scratch_ops:function", r"which is a function, takes a class that derives from"),
    ],
)
def test_what_is_no_such_class_is_one_line_about_the_key(house, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config.build(settings(attention={"name": name}))
    assert str(caught.value).startswith(f"attention.name: got {name!r}") and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        attention.build({"name": name})


def test_an_abstract_task_is_refused_with_what_it_lacks(house):
    with pytest.raises(
        ConfigError, match=r"^task.name: got 'scratch_ops:Unfinished', which is abstract: .*open, prepa"
    ):
        config.build(settings(task={"name": "scratch_ops:Unfinished"}))


def test_a_name_from_the_command_line_may_be_dotted(house):
    text = schema.Text("scratch_ops:Near")
    assert config.build(settings(attention={"name": text})).config.attention.name == "scratch_ops:Near"
    with pytest.raises(ConfigError, match=r"takes one of 'full', .*, or 'package.module:Class'$"):
        config.build(settings(attention={"name": schema.Text("nothing_like_it")}))


def test_a_table_is_a_dict_of_its_own_entries():
    table = lookup.Table({"full": Full}, kind=Attention)
    assert list(table) == ["full"] and "xformer.attention:Window" not in table
    assert table["xformer.attention:Window"] is attention.Window
    with pytest.raises(ArgumentError, match=r"^name: got 'ful', allowed are full, or .*; did you mean full\?"):
        table["ful"]
    with pytest.raises(ArgumentError, match=r"derives from xformer.attention.interface.Attention"):
        table["xformer.attention:ALiBi"]
    assert attention.POSITIONS["xformer.attention:ALiBi"] is attention.ALiBi and attention.POSITIONS.kind is Position


def test_an_annotation_that_cannot_be_evaluated_leaves_the_others_checked(house):
    check = lambda **keys: schema.check_named("x", {"name": "scratch_ops:Odd", **keys}, lookup.Table({}))
    assert check(z="anything") == {"name": "scratch_ops:Odd", "x": 1, "y": 2, "z": "anything"}
    for wrong in ({"x": 1.5}, {"y": "two"}):
        with pytest.raises(ConfigError, match="takes an integer"):
            check(**wrong)
    with pytest.raises(ConfigError, match=r"x.rest: got 1, but x 'scratch_ops:Odd' reads no such key; it takes x, y"):
        check(rest=1)


def test_arguments_that_cannot_be_read_are_one_line():
    with pytest.raises(ConfigError, match=r"^x.name: got 'builtins:max', whose arguments can't be read: "):
        schema.check_named("x", {"name": "builtins:max"}, lookup.Table({}))


def test_an_optimizer_from_outside_takes_its_own_arguments(house):
    section = {"name": "optax:adafactor", "learning_rate": 0.01, "min_dim_size_to_factor": 64, "warmup_steps": 1}
    built = config.build(settings(optimizer=section))
    stored = built.config.to_dict()["optimizer"]
    assert stored["min_dim_size_to_factor"] == 64 and stored["decay_rate"] == 0.8 and "b1" not in stored
    assert config.build(built.config).config == built.config
    assert "optimizer.decay_rate" in config_help.experiment_help(built.config.to_dict())
    with pytest.raises(ConfigError, match=r"^optimizer.min_dim_size_to_factor: got 'x', takes an integer"):
        config.build(settings(optimizer=section | {"min_dim_size_to_factor": "x"}))
    with pytest.raises(ConfigError, match=r"^optimizer.b1: got 0.5, but the optimizer section reads no such key"):
        config.build(settings(optimizer=section | {"b1": 0.5}))


def test_the_weight_decay_of_an_optimizer_from_outside_is_its_own(house):
    params = {"kernel": jnp.ones((2, 2))}
    decays = []
    for section in ({}, {"weight_decay": 0.0}, {"weight_decay": 0.5}):
        built = config.build(settings(optimizer={"name": "optax:adamw", "learning_rate": 1.0, **section}))
        updates, _ = built.optimizer.update({"kernel": jnp.zeros((2, 2))}, built.optimizer.init(params), params)
        decays.append(-float(updates["kernel"][0, 0]))
    np.testing.assert_allclose(decays, [1e-4, 0, 0.5])  # what optax's own default is, none, what is given


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "scratch_ops:function",
            r"^optimizer.name: scratch_ops:function takes no argument, but is given the learning r",
        ),
        ("scratch_ops:not_one", r"^optimizer.name: 'scratch_ops:not_one' must give an optax.Gradient.*got 'list' obj"),
        ("scratch_ops:greedy", r"^optimizer.name: scratch_ops:greedy takes clip_norm, which the section decides"),
        ("scratch_ops:number", r"^optimizer.name: got 'scratch_ops:number', which is a 'int' object, takes a function"),
        ("adamx", r"^optimizer.name: got 'adamx', takes one of 'adamw', .*nearest match 'adam', or 'package.module:C"),
    ],
)
def test_what_is_no_optimizer_is_refused(house, name, message):
    with pytest.raises(ConfigError, match=message):
        config.build(settings(optimizer={"name": name}))


def test_a_hybrid_stack_takes_an_op_from_outside(house):
    stack = ({"name": "full"}, {"name": "scratch_ops:Near", "reach": 5})
    built = config.build(
        settings(
            attention={"name": "layers", "layers": stack},
            model={"num_layers": 2, "width": 8, "num_heads": 2, "mlp_dim": 8},
        )
    )
    assert built.attention.ops[1].reach == 5
    assert config.build(built.config).attention == built.attention
    with pytest.raises(ConfigError, match=r"^attention.layers\[0\].name: got 'scratch_ops:Neer', but there is no Neer"):
        config.check(settings(attention={"name": "layers", "layers": ({"name": "scratch_ops:Neer"},)}))
    with pytest.raises(ConfigError, match=r"^attention.name: scratch_ops:Falls raised KeyError: 'of the call' \(scr"):
        config.build(settings(attention={"name": "scratch_ops:Falls"}))


def test_a_model_from_outside_is_built_checked_and_stored(house):
    section = {"name": "scratch_ops:Bag", "size": 6}
    built = config.build(settings(model=section))
    assert built.model.__name__ == "Bag" and built.config.to_dict()["model"] == section | {"sharp": False}
    assert config.build(built.config).config == built.config
    assert "model.sharp" in config_help.experiment_help(built.config.to_dict())
    for changes, message in [
        ({"size": "big"}, r"^model.size: got 'big', takes an integer$"),
        ({"depth": 2}, r"^model.depth: got 2, but model 'scratch_ops:Bag' reads no such key; it takes .*size, sharp"),
        ({"size": 77}, r"^model.name: scratch_ops:Bag raised RuntimeError: seventy-seven \(scratch_ops.py, line "),
        ({"vocab_size": 3}, r"^model.vocab_size: got 3, but the data of the task decides it"),
        ({"name": "scratch_ops:Near"}, r"^model.name: got 'scratch_ops:Near', .*takes a class that derives from flax"),
    ]:
        with pytest.raises(ConfigError, match=message):
            config.build(settings(model=section | changes))


def with_metrics(*metrics, **train):
    """A small experiment that is judged by further metrics."""
    base = settings(model={"name": "scratch_ops:Bag"})
    return base | {"train": base["train"] | {"metrics": metrics, **train}}


def test_metrics_from_outside_stand_beside_those_of_the_task(house):
    built = config.build(with_metrics("scratch_ops:Counts", select_metric="scratch_ops:Certain"))
    stored = built.config.to_dict()["train"]
    assert [entry["name"] for entry in stored["metrics"]] == ["scratch_ops:Counts", "scratch_ops:Certain"]
    assert (stored["select_metric"], stored["select_mode"]) == ("certain", "max")
    assert config.build(built.config).config == built.config
    assert built.judged.better == {**built.task.better, "spread": "min", "certain": "max"}
    batch = {"targets": jnp.array([0, 1, 1, 9]), "weights": jnp.array([1.0, 1, 1, 0])}
    found = built.judged.metrics(jnp.eye(4, 10), batch)
    assert list(found) == [*built.task.metrics(jnp.eye(4, 10), batch), "spread", "certain"]
    sums = reduce(found)
    finished = built.judged.finish(
        {name: np.asarray(x) if not isinstance(x, tuple) else tuple(map(float, x)) for name, x in sums.items()}
    )
    assert finished["spread"] == 2 and finished["certain"] == pytest.approx(2 / 3)
    assert finished["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "scratch_ops:Certain", "wrong": 3}, r"^train.metrics\[0\].wrong: got 3, takes a string$"),
        ({"name": "scratch_ops:Certain", "name2": 3}, r"^train.metrics\[0\].name2: got 3, but .* reads no such key"),
        ({"name": "scratch_ops:Bag"}, r"^train.metrics\[0\].name: got .*derives from xformer.tasks.metric.Metric$"),
        ("accuracy", r"^train.metrics\[0\].name: got 'accuracy', allowed are 'package.module:Class'$"),
        ({"k": 2}, r"^train.metrics\[0\].name: missing; takes 'package.module:Class'$"),
        ("scratch_ops:Nameless", r"^train.metrics: Nameless must have a name and better, .* got None and None$"),
        ("scratch_ops:Loss", r"^train.metrics: Loss must have a name of its own, got 'loss'$"),
        ("scratch_ops:Seconds", r"^train.metrics: Seconds must have a name of its own, got 'seconds'$"),
        ("scratch_ops:Sums", r"^train.metrics: Sums must have a name of its own, got 'f1'$"),
        ({"name": "scratch_ops:Certain", "wrong": "shape"}, r"^train: metric 'certain' must be values and weights"),
        ({"name": "scratch_ops:Certain", "wrong": "x"}, r"^train.metrics\[0\].name: scratch_ops:Certain raised KeyErr"),
    ],
)
def test_what_is_no_metric_is_refused(house, entry, message):
    with pytest.raises(ConfigError, match=message):
        config.build(with_metrics(entry))


def test_code_from_outside_cannot_end_the_program():
    with pytest.raises(ConfigError, match=r"^the section raised SystemExit: 3"):
        lookup.guarded("the section", lambda: sys.exit(3), ConfigError)
