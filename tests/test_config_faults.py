"""Choices that make no sense, the key that a refusal names, and what a check costs."""

import json
import logging
import pickle
import time

import pytest
from test_config import CONFIGS, load, refusal

from xformer import comparison as comparisons
from xformer import config as configs
from xformer import experiment, schema
from xformer.checks import ArgumentError
from xformer.commands import cli, compare, inspect, run
from xformer.config import ConfigError
from xformer.config_errors import construct
from xformer.difference import difference
from xformer.models import EncoderClassifier

SCAN = ("model.scan_layers=true", "model.mlp_dim=64")


@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        (
            "full",
            ["attention.causal=true", "model.pooling=cls"],
            "model.pooling: pooling must be 'mean', 'attention' or 'last' where attention",
        ),
        (
            "window",
            ["attention.causal=true", "attention.right=5"],
            "attention.right: Window.right must be 0 in a causal window, got 5",
        ),
        ("full", ["optimizer.learning_rate=1e308"], "optimizer.learning_rate: got 1e+308, takes a number that float32"),
        (
            "full",
            ["optimizer.learning_rate=1e-320"],
            "optimizer.learning_rate: got 1e-320, takes a number that float32",
        ),
        ("full", ["optimizer.eps=1e-320"], "optimizer.eps: got 1e-320, takes a number or None that float32 can hold"),
        ("full", ["optimizer.clip_norm=1e-39"], "optimizer.clip_norm: got 1e-39"),
        ("full", ["optimizer.weight_decay=1e39"], "optimizer.weight_decay: got 1e+39"),
        ("full", ["model.dropout_rate=1e-320"], "model.dropout_rate: got 1e-320"),
        ("rotary", ["attention.position.base=1e300"], "attention.position.base: got 1e+300"),
        ("full", ["optimizer.warmup_steps=4294967295"], "optimizer.warmup_steps: warmup_steps must be"),
        ("full", ["optimizer.warmup_steps=2147483648"], "optimizer.warmup_steps: warmup_steps must be"),
        ("full", ["train.num_steps=4294967295"], "train.num_steps: num_steps must be"),
        ("full", ["train.eval_every=4294967295"], "train.eval_every: eval_every must be"),
        ("full", ["train.batch_size=1000000000"], "train.batch_size: got 1000000000, takes at most 16777216 examples"),
        ("full", ["train.eval_batch_size=1000000000"], "train.eval_batch_size: got 1000000000, takes at most"),
        ("full", ["name=a\nb"], r"name: got 'a\nb', takes at most 100 printable characters"),
        ("full", [f"name={'n' * 300}"], "name: got 'nnn"),
        ("full", ["name=a/b"], "name: got 'a/b', takes at most 100 printable"),
        ("full", ["name=.."], "name: got '..', takes at most 100 printable"),
        ("full", ["name="], "name: got '', takes at most 100 printable"),
        ("full", ["name= a"], "name: got ' a', takes at most 100 printable"),
        ("full", ["attention.implementation=splash"], "attention.implementation: "),
        ("full", ["attention.implementation=cudnn"], "attention.implementation: "),
        ("window", ["attention.left=-1"], "attention.left: Window.left must be"),
        ("rotary", ["model.num_heads=64"], "model.num_heads: head_dim must be even"),
        ("linformer", ["attention.max_len=100"], "attention.max_len: attention.max_len must be at least 128"),
        ("music", ["attention.position.max_len=100"], "attention.position.max_len: attention.position.max_len must be"),
        ("music", ["attention.position.max_len=128", "model.pooling=cls"], "attention.position.max_len: "),
        ("linformer", ["attention.causal=true"], "attention.causal: Linformer.causal must be False"),
    ],
)
def test_refused_with_the_key_it_is_about(spec, overrides, message):
    assert refusal(f"demo.py:{spec}", *overrides).startswith(message)


def test_a_causal_window_from_a_config_has_no_right_side():
    config = load("demo.py:window", "attention.causal=true")
    assert (config.attention.left, config.attention.right) == (8, 0)
    assert experiment.build(json.loads(json.dumps(experiment.as_json(config)))).attention.right == 0


def test_variant_names_are_short_enough_for_folders():
    with pytest.raises(ConfigError, match=r"^variants: got the name 'v+\.\.\.v+', takes at most 100 letters"):
        comparisons.load_comparison(f"{CONFIGS}/compare_demo.py", [f"variants.{'v' * 300}={{}}"])
    with pytest.raises(ConfigError, match=r"^variants.v+.name: got"):  # with the comparison's name before it
        comparisons.load_comparison(f"{CONFIGS}/compare_demo.py", [f"variants.{'v' * 99}={{}}"])
    with pytest.raises(ConfigError, match=r"^name: got"):
        comparisons.load_comparison(f"{CONFIGS}/compare_demo.py", ["name=a\nb"])


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (ArgumentError("size", "whatever the left half says"), "model.size"),
        (ArgumentError("attention.max_len", "too short"), "attention.max_len"),
        (ValueError("size must be 3, got 4"), "model.size"),
        (ValueError("size: got 4, takes 3"), "model.size"),
        (ValueError("Ring.left must be 3"), "attention.left"),
        (NotImplementedError('left="x" cannot do this call: the size is wrong'), "attention.left"),
        (ValueError("head_dim must be even"), "model.num_heads"),
        (ValueError("listops: size must be an int"), "model.size"),
        (ValueError("the left half of the size is wrong"), "model"),
        (ValueError("size of nothing"), "model"),
        (ValueError("Other.left must be 3"), "model"),
        (ValueError("there must be two"), "model"),
    ],
)
def test_a_key_is_read_from_the_structure_of_an_error_never_from_its_words(error, path):
    def make():
        raise error

    keys = {"model": {"size": 3}, "attention": {"left": 2}}
    elsewhere = {"attention": "attention", "head_dim": "model.num_heads"}
    with pytest.raises(ConfigError) as raised:
        construct("model", make, keys=keys, owners={"Ring": "attention"}, elsewhere=elsewhere)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("int too large"), MemoryError("two\nlines")])
def test_sizes_beyond_the_machine_are_one_line(error):
    def make():
        raise error

    with pytest.raises(ConfigError, match=r"^model: a size is too large: .+") as raised:
        construct("model", make, keys={"model": {}})
    assert "\n" not in str(raised.value)


def test_an_argument_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(ArgumentError("size", "size must be 3")))
    assert (error.key, str(error)) == ("size", "size must be 3")


@pytest.fixture
def checks(monkeypatch):
    """Counts the models that are traced to check a config."""
    counted = []
    original = experiment.trace
    monkeypatch.setattr(experiment, "trace", lambda built: counted.append(built) or original(built))
    monkeypatch.setattr(experiment, "_CHECKED", {})
    return counted


def test_a_config_is_checked_once(checks):
    built = configs.load_experiment(f"{CONFIGS}/demo.py:full")
    again = experiment.build(built.config)
    other = experiment.build(experiment.as_json(built.config) | {"seed": 3, "name": "b"})
    assert len(checks) == 1
    assert (again.name, again.seed, other.name, other.seed, other.config.name) == ("demo_full", 0, "b", 3, "b")
    assert experiment.build(experiment.as_json(built.config) | {"seed": 4}).config.seed == 4 and len(checks) == 1
    load("demo.py:full", "train.num_steps=77")
    assert len(checks) == 2


def test_a_comparison_checks_its_base_and_each_variant_once(checks):
    comparison = comparisons.load_comparison(f"{CONFIGS}/compare_demo.py", ["seeds=(0,1,2)"])
    runs = [
        run for part in comparisons.comparison_parts(comparison).values() for run in comparisons.comparison_runs(part)
    ]
    for _, seed, config in runs:
        assert experiment.build(config).seed == seed
    assert len(runs) == 36 and len(checks) == 12  # the base is the variant "full" on the first task


def test_a_class_of_the_same_name_is_another_experiment(checks, monkeypatch):
    config = load("demo.py:full")
    monkeypatch.setitem(experiment.attention.ATTENTIONS, "full", type("Full", (experiment.attention.Full,), {}))
    experiment.build(config)
    assert len(checks) == 2


def test_a_variant_chooses_what_the_base_leaves_unset(tmp_path):
    base = configs.read(f"{CONFIGS}/demo.py:music")
    given = {"name": "c", "base": base, "variants": {"mean": {"model": {}}, "cls": {"model": {"pooling": "cls"}}}}
    comparison = comparisons.check_comparison(given)
    lengths = {variant: run.attention.position.max_len for variant, _, run in comparisons.comparison_runs(comparison)}
    assert lengths == {"mean": 128, "cls": 129}
    again = comparisons.check_comparison(json.loads(json.dumps(experiment.as_json(comparison))))
    assert experiment.as_json(again) == experiment.as_json(comparison)


def test_the_check_of_scanned_layers_does_not_grow_with_depth(monkeypatch):
    """Blocks that are made for a check, not seconds: the same few at any depth."""
    from xformer.nn import block

    made = []
    original = block.EncoderBlock.__init__
    monkeypatch.setattr(
        block.EncoderBlock, "__init__", lambda self, *args, **kwargs: made.append(1) or original(self, *args, **kwargs)
    )
    counts = []
    for depth in (25, 1000):
        made.clear()
        start = time.process_time()
        load("demo.py:bigbird", f"model.num_layers={depth}", *SCAN)
        counts.append((len(made), time.process_time() - start < 30))  # 40 s for 100 layers before
    assert counts[0] == counts[1] and counts[0][1]


def test_remarks_of_an_op_are_one_warning(caplog, monkeypatch):
    remark = lambda self, num_positions: (f"full attention at {num_positions} positions",)
    monkeypatch.setattr(experiment.attention.BigBird, "remarks", remark, raising=False)
    with caplog.at_level(logging.WARNING):
        load("demo.py:bigbird", "attention.num_random_blocks=64")
        load("demo.py:bigbird", "attention.num_random_blocks=64", "seed=1")
    assert caplog.text.count("attention: full attention at 128 positions") == 1


def test_a_config_that_was_trained_is_built_without_remarks(caplog):
    """A run that is loaded, or asked whether it can go on, is not told again what its training did not do."""
    config = experiment.as_json(load("demo.py:bigbird"))
    config["optimizer"]["warmup_steps"] = 99_987
    experiment.build(config, quiet=True)
    assert "99987" not in caplog.text
    experiment.build(config)
    assert "optimizer.warmup_steps: 99987 is above train.num_steps" in caplog.text


def test_a_scaling_that_slows_nothing_down_is_said(caplog):
    position = ("attention.position.name=rotary", "attention.position.scaling=linear")
    load("demo.py:bigbird", *position, "attention.position.trained_len=512")
    assert caplog.text.count("a factor of 1 slows nothing down, as scaling='none': 128 positions, trained_len 512") == 1
    caplog.clear()
    load("demo.py:bigbird", *position, "attention.position.trained_len=64")
    assert "slows nothing down" not in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({"a": 1}, {"a": 1}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}}, {"a.b": (1, 3)}),
        ({"a": 1}, {"a": 1.0}, {"a": (1, 1.0)}),
        ({"a": True}, {"a": 1}, {"a": (True, 1)}),
        ({"a": 1}, {}, {"a": (1, "nothing")}),
        ({}, {"a": {"b": 1}}, {"a.b": ("nothing", 1)}),
        ({"a": {}}, {}, {"a": ({}, "nothing")}),
        ({"a": 1}, {"a": {"b": 1}}, {"a": (1, {"b": 1})}),
        ({"a": [1, 2]}, {"a": [1, 3]}, {"a": ([1, 2], [1, 3])}),
    ],
)
def test_difference(old, new, found):
    assert difference(old, new) == found


@pytest.mark.parametrize("argv", [(run.command, "--config.help"), (inspect.command, "--keys")])
def test_the_keys_of_an_experiment_are_listed(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, flag = argv
    assert cli.exit_code(command, [f"--config={CONFIGS}/demo.py:bigbird+shaw", flag, "--config.seed=7"]) == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if line}
    config = experiment.as_json(load("demo.py:bigbird+shaw"))
    leaves = {key for key in difference(config, {}) if not key.startswith("train.mesh.")} | {"train.mesh"}
    assert leaves == lines.keys() - {"key"} - {line for line in lines if line.startswith("---")}
    assert lines["seed"] == "7 0 an integer"
    assert lines["attention.block_size"] == "8 chosen for the length of the inputs an integer"
    assert lines["attention.position.name"].startswith("'shaw' 'none' one of 'none', 'shaw'")
    assert lines["model.pooling"] == "'mean' 'mean' one of 'mean', 'attention', 'cls', 'first', 'last'"
    assert lines["train.num_steps"] == "400 required an integer"
    assert not list(tmp_path.iterdir())


def test_the_keys_of_a_comparison_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.exit_code(compare.command, [f"--config={CONFIGS}/compare_demo.py", "--config.help"]) == 0
    out = capsys.readouterr().out
    for key in ("seeds ", "variants ", "report.cost_lengths ", "attention.name ", "train.num_steps "):
        assert f"\n{key}" in out
    assert not list(tmp_path.iterdir())


def test_numbers_that_float32_holds():
    assert schema.check("x", 1e-37, float) == 1e-37 and schema.check("x", 0, float) == 0.0
    assert schema.check("x", 3.4028234663852886e38, float) > 0
    for wrong in (1e-38, -1e-40, 3.41e38, 10**400, float("inf"), -float("inf")):
        with pytest.raises(ConfigError, match="takes a number that float32 can hold: 0, or of a size from"):
            schema.check("x", wrong, float)


def test_positions_that_attention_sees():
    assert [EncoderClassifier.num_positions(7, pooling) for pooling in ("mean", "cls")] == [7, 8]


def test_inspect_names_files_that_are_not_there_in_one_line(capsys):
    """It opens the user's own data to know its sizes; what is wrong with that was a traceback."""
    argv = [f"--config={CONFIGS / 'documents.py'}", "--config.task.path=nowhere.csv"]
    assert cli.exit_code(inspect.command, argv) == 2
    assert "error: task.path: got 'nowhere.csv', takes a file or folder that is there" in capsys.readouterr().err
