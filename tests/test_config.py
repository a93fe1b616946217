"""Config files, overrides, and what is refused before anything is computed (FAULTS 18, 25)."""

import itertools
import json
import logging
import shutil
from pathlib import Path

import pytest
from ml_collections import ConfigDict, config_dict
from tiny_tokenizer import tokenizer_json

from xformer import comparison as comparisons
from xformer import config as configs
from xformer import experiment, presets, shipped
from xformer.config import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"
VARIANTS = ("full", "window", "linformer", "bigbird", "shaw", "music", "t5", "alibi", "rotary")
ARENA = tuple(f"lra/{task}" for task in ("listops", "text", "retrieval", "image", "pathfinder", "pathx"))
PROBES = ("needle", "order", "recall")
TEXTS = ("imdb", "sentiment", "linux_docs", "documents")
EXPERIMENTS = (
    "listops",
    "demo",
    "retrieval",
    "same_document",
    "tagging",
    "masked_lm",
    "language_model",
    "chorales",
    "translation",
    "treebank",
    "images",
    "summarization",
    *TEXTS,
    *PROBES,
    *ARENA,
)
LOADED = (*VARIANTS, "bigbird+shaw", "window+rotary", "window+alibi")
SIZES = {"gpt3": ("small", "xl", "13b"), "transformer": ("base", "big")}  # configs of sizes, not of variants
DEMO_VARIANTS = ["full", "window", "bigbird", "linformer-4", "linformer-16", "shaw"]
COMPARISONS = (
    "compare_chorales",
    "compare_demo",
    "compare_documents",
    "compare_images",
    "compare_imdb",
    "compare_language_model",
    "compare_linux_docs",
    "compare_listops",
    "compare_lra",
    "compare_recall",
    "compare_summarization",
    "compare_translation",
    "compare_treebank",
    "scaling",
    "study",
)


def load(spec, *overrides):
    return configs.load_config(f"{CONFIGS}/{spec}", overrides)


def refusal(spec, *overrides):
    with pytest.raises(ConfigError) as error:
        load(spec, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_all_shipped_configs_are_known_here():
    assert set(shipped.names()) == {*EXPERIMENTS, *SIZES, *COMPARISONS, "finetune"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["bigbird", "longformer", "linformer", "shaw"])
def test_a_checkpoint_is_tuned_with_any_variant(variant, tmp_path, monkeypatch):
    """The sizes of the model are the folder's; without a folder one line says so."""
    monkeypatch.chdir(tmp_path)
    assert refusal(f"finetune.py:{variant}").startswith("train.init_from: checkpoint: there is no such folder")
    shutil.copytree(CONFIGS.parent / "tests" / "fixtures" / "weights" / "roberta_classifier", "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").write_text(tokenizer_json())
    config = load(f"finetune.py:{variant}", "train.num_steps=10", "task.max_len=64")
    assert (config.name, config.model.width, config.model.norm) == (f"finetune_{variant}", 24, "post")
    assert config.model.global_projections == (variant == "longformer") and config.task.tokenizer == "checkpoint"


# Every config with a third of the table, which is each variant with a third of the configs.
@pytest.mark.sampled(21)
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        (name, variant)
        for (place, name), (index, variant) in itertools.product(enumerate(EXPERIMENTS), enumerate(LOADED))
        if (place + index) % 3 == 0
    ],
)
def test_variants_of_every_config_load(name, variant):
    if name in ("language_model", "chorales") and variant == "linformer":
        assert refusal(f"{name}.py:linformer", "train.num_steps=10").startswith("attention.causal: Linformer")
        return
    config = load(f"{name}.py:{variant}", "train.num_steps=10")
    assert config.name == f"{name}_{variant}".replace("/", "_") and config.train.num_steps == 10


def test_long_range_arena_size():
    config = load("lra/listops.py:bigbird")
    model = {key: config.model[key] for key in ("num_layers", "width", "num_heads", "mlp_dim")}
    assert model == {"num_layers": 4, "width": 512, "num_heads": 8, "mlp_dim": 1024}
    assert (config.train.batch_size, config.train.num_steps, config.task.preset) == (32, 5000, "listops_2k")


@pytest.mark.full
def test_the_arena_is_one_comparison_or_a_column_of_it():
    parts = comparisons.comparison_parts(comparisons.load_comparison(f"{CONFIGS}/compare_lra.py"))
    assert [f"lra/{task}" for task in parts] == list(ARENA)
    for number, (task, part) in enumerate(parts.items()):
        runs = {variant: run for variant, _, run in comparisons.comparison_runs(part)}
        assert len(runs) == 12
        for variant, run in list(runs.items())[number::6]:
            alone = load(f"lra/{task}.py:{variant}")
            assert run.attention == alone.attention and run.task == alone.task and run.optimizer == alone.optimizer
    column = comparisons.load_comparison(f"{CONFIGS}/compare_lra.py:text")
    assert "tasks" not in column and column.base.task.name == "imdb"
    assert "takes all, or names with + between them: listops" in refusal("compare_lra.py:listops+nope")
    with pytest.raises(ConfigError, match=r"tasks text, .* set it too; override tasks.NAME.train.num_steps instead"):
        comparisons.load_comparison(f"{CONFIGS}/compare_lra.py", ["train.num_steps=10"])


# Others compare positions (test_tasks_chorales.py, test_tasks_treebank.py), attention and positions at once
# (test_config_study.py), models, or sizes (test_scaling.py).
ELSEWHERE = (
    "compare_chorales",
    "compare_images",
    "compare_summarization",
    "compare_translation",
    "compare_treebank",
    "scaling",
    "study",
)
OF_ATTENTION = [name for name in COMPARISONS if name not in ELSEWHERE]

# What is compared beside full attention and BigBird, where it is not Linformer and Shaw's positions.
OTHERS = {
    "compare_language_model": ("window", "linear"),
    "compare_linux_docs": ("linformer", "window"),
    "compare_recall": ("window", "retention"),
}


@pytest.mark.parametrize("name", [f"{name}.py" + ":pathx" * (name == "compare_lra") for name in OF_ATTENTION])
def test_comparisons_change_attention_and_seed_only(name):
    for comparison in comparisons.comparison_parts(
        comparisons.load_comparison(f"{CONFIGS}/{name}", ["train.num_steps=10"])
    ).values():
        runs = comparisons.comparison_runs(comparison)
        assert [(variant, seed) for variant, seed, _ in runs] == [
            (v, s) for v in comparison.variants for s in comparison.seeds
        ]
        least = {"full", "bigbird", *OTHERS.get(name.removesuffix(".py"), ("linformer", "shaw"))}
        assert least <= {variant.partition("-")[0] for variant in comparison.variants}
        for _, seed, run in runs:
            assert run.seed == seed and run.train.num_steps == 10
            changed = {key for key in run if run[key] != comparison.base[key]}
            asked = presets.of_model(run.attention, comparison.base.model)  # such as keys that are the queries
            assert changed <= {"name", "attention", "seed"} | ({"model"} if asked else set())
            assert run.model.to_dict() == comparison.base.model.to_dict() | asked


def test_translation_is_compared_with_the_lstm_at_equal_compute_with_as_many_trials():
    comparison = comparisons.load_comparison(f"{CONFIGS}/compare_translation.py")
    assert list(comparison.budget) == ["train_flops"] and comparison.seeds == (0, 1, 2)
    runs = {variant: run for variant, _, run in comparisons.comparison_runs(comparison)}
    assert runs["seq2seq_lstm"].model.name == "seq2seq_lstm" and runs["seq2seq_lstm"].attention.name == "none"
    assert runs["transformer"].task == runs["seq2seq_lstm"].task
    assert not any("tune" in change for change in comparison.variants.values())  # one grid for both


def test_the_kernel_documents_are_compared_from_scratch_or_pretrained():
    scratch, pretrained = (
        comparisons.load_comparison(f"{CONFIGS}/compare_linux_docs.py:{way}") for way in ("scratch", "pretrained")
    )
    assert pretrained.base == scratch.base and pretrained.variants.keys() == scratch.variants.keys()
    in_all = pretrained.budget.train_flops + pretrained.pretrain.train_flops
    assert "pretrain" not in scratch and scratch.budget.train_flops == in_all and scratch.base.task.max_len == 4096
    with pytest.raises(ConfigError, match="takes scratch or pretrained"):
        comparisons.load_comparison(f"{CONFIGS}/compare_linux_docs.py:both")


def test_a_task_changes_the_base_and_what_its_variants_are():
    given = configs.read(f"{CONFIGS}/compare_demo.py")
    given["tasks"]["long"] = {
        "task": {"name": "needle", "max_len": 64},
        "train": {"batch_size": 8},
        "variants": {"linformer-4": {"attention": {"name": "linformer", "rank": 8}}},
    }
    comparison = comparisons.check_comparison(given)
    parts = comparisons.comparison_parts(comparison)
    assert list(parts) == ["needle", "order", "long"] and parts["long"].name == "demo-long"
    runs = {variant: run for variant, _, run in comparisons.comparison_runs(parts["long"])}
    assert {run.task.max_len for run in runs.values()} == {64}
    assert {(run.train.batch_size, run.train.num_steps) for run in runs.values()} == {(8, 150)}
    assert (runs["linformer-4"].attention.rank, runs["linformer-16"].attention.rank) == (8, 16)
    assert runs["linformer-4"].attention.max_len == 65  # chosen for the task's own length
    written = json.dumps(experiment.as_json(comparison))
    assert json.dumps(experiment.as_json(comparisons.check_comparison(json.loads(written)))) == written


def test_comparison_keeps_the_order_of_its_variants_and_comes_back_from_json():
    comparison = comparisons.load_comparison(f"{CONFIGS}/compare_demo.py")
    assert list(comparison.variants) == DEMO_VARIANTS
    written = json.dumps(experiment.as_json(comparison))
    again = comparisons.check_comparison(json.loads(written))
    assert json.dumps(experiment.as_json(again)) == written


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("variants.full.attention.name=fll", "variants.full.attention.name: got 'fll', takes one of 'full'"),
        ("variants.linformer-4.attention.max_len=10", "variants.linformer-4.attention.max_len: "),
        ("variants.full=3", "variants.full: got 3, takes a section of keys"),
        ("variants={}", "variants: got {}, takes at least one"),
        ("variants.a/b.seed=1", "variants: got the name 'a/b', takes at most 100 letters"),
        ("model.width=3", "base.model.num_heads: num_heads must divide width"),
        ("seeds=(0, True)", "seeds[1]: got True, takes an integer"),
        ("report.measure_seconds=long", "report.measure_seconds: got 'long', takes a number"),
        ("sedes=(0,)", "sedes: got (0,), but a comparison reads no such key; it takes name, base"),
        ("seeds=(0,-1)", "seeds: got (0, -1), takes different integers"),
        ("seeds=(1,1)", "seeds: got (1, 1), takes different integers"),
        ('variants={"..": {}}', "variants: got the name '..', takes at most 100 letters"),
        ("variants.full.seed=3", "variants.full.seed: got 3, but a variant changes only attention, model"),
        ("base.seed=7", "base.seed: got 7, but a comparison names and seeds its runs"),
        ("attention.name=window", "base.attention.name: got window, but every variant replaces attention"),
        ("base=None", "base: got None, takes a section of keys"),
        ("report.cost_lengths=()", "report.cost_lengths: got (), takes integers from 1"),
        ("tasks.needle.variants.fll={}", "tasks.needle.variants: got 'fll', takes full, window"),
        ("tasks.runs={}", "tasks: got the name 'runs', takes at most 100 letters, digits and _ + -, and not 'runs'"),
        ("tasks.order.seed=3", "tasks.order.seed: got 3, but a task changes only attention, model"),
        ("tasks.order.task.name=ordr", "tasks.order.task.name: got 'ordr', takes one of"),
        ("report.measure_up_to=-1", "report.measure_up_to: got -1, takes 0 or more"),
    ],
)
def test_comparison_refusals(override, message):
    with pytest.raises(ConfigError) as error:
        comparisons.load_comparison(f"{CONFIGS}/compare_demo.py", [override])
    assert str(error.value).startswith(message), error.value


@pytest.mark.parametrize("variant", ["full", "linformer", "bigbird+shaw"])
def test_config_json_builds_the_same_experiment(variant, tmp_path):
    first = experiment.build(load(f"demo.py:{variant}", "train.mesh.fsdp=2", "model.dropout_rate=0.1"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(experiment.as_json(first.config)))
    second = experiment.build(configs.load_config(str(path)))
    assert (second.attention, second.task, second.train) == (first.attention, first.task, first.train)
    assert experiment.as_json(second.config) == experiment.as_json(first.config)
    assert configs.load_config(str(path), ["model.norm=post"]).model.norm == "post"


def test_every_default_is_filled_in():
    config = load("demo.py:full")
    assert config.model.norm == "pre" and config.optimizer.momentum is None and config.task.data_seed == 0
    assert config.attention.to_dict() == {
        "name": "full", "position": {"name": "none"}, "causal": False, "implementation": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("train.stop_at_step=5", lambda c: c.train.stop_at_step, 5),
        ("train.stop_at_step=None", lambda c: c.train.stop_at_step, None),
        ("optimizer.clip_norm=None", lambda c: c.optimizer.clip_norm, None),
        ("optimizer.learning_rate=1", lambda c: c.optimizer.learning_rate, 1.0),
        ("model.scan_layers=true", lambda c: c.model.scan_layers, True),
        ("model.pooling=cls", lambda c: c.model.pooling, "cls"),
        ("task.num_train=None", lambda c: c.task.num_train, None),
        ("name=1", lambda c: c.name, "1"),
        ("seed=7", lambda c: c.seed, 7),
        ("train.mesh.fsdp=2", lambda c: c.train.mesh.to_dict(), {"data": -1, "fsdp": 2}),
        ('train.mesh={"data": 2}', lambda c: c.train.mesh.to_dict(), {"data": 2}),
        ("attention.position.name=shaw", lambda c: c.attention.position.name, "shaw"),
        ("attention.position=None", lambda c: c.attention.position.name, "none"),
        ('attention={"name": "window", "left": 3}', lambda c: (c.attention.name, c.attention.left), ("window", 3)),
    ],
)
def test_overrides(override, read, expected):
    value = read(load("demo.py:full", override))
    assert value == expected and type(value) is type(expected)


def test_overrides_apply_in_order_and_before_the_types_are_known():
    config = load("demo.py:full", "attention.left=3", "attention.name=window", "attention.left=5")
    assert (config.attention.name, config.attention.left) == ("window", 5)
    config = load("demo.py:full", 'attention={"name": "window"}', "attention.position.name=alibi")
    assert (config.attention.name, config.attention.position.name) == ("window", "alibi")


@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        ("full", ["model.num_heads=True"], "model.num_heads: got True, takes an integer"),
        ("full", [f"model.width=1{'0' * 30}"], "model.width: got 1000000000000000000000000000000, takes an integer"),
        ("full", ["optimizer.warmup=5"], "optimizer.warmup: got 5, but the optimizer section reads no such key"),
        ("full", ["optimizer.warmup=5"], "nearest match 'warmup_steps'"),
        ("full", ["optimizer.warmup_steps=None"], "optimizer.warmup_steps: got None, takes an integer"),
        (
            "full",
            ["attention.name=bigbrid"],
            "attention.name: got 'bigbrid', takes one of 'full', 'window', 'bigbird', 'l",
        ),
        ("full", ["attention.name=bigbrid"], "nearest match 'bigbird'"),
        ("full", ["attention.position.name=shwa"], "attention.position.name: got 'shwa'"),
        (
            "full",
            ["attention.position.max_distance=3"],
            "attention.position.max_distance: got 3, but attention.position 'none'",
        ),
        ("full", ["attention.position=shaw"], "attention.position: got 'shaw', takes a section of keys"),
        ("bigbird", ["attention.layer=1"], "attention.layer: got 1, but attention 'bigbird' reads no such key"),
        ("bigbird", ["attention.num_window_blocks=2"], "attention.num_window_blocks: "),
        (
            "bigbird",
            ["attention.name=full"],
            "attention.num_random_blocks: got 1, but attention 'full' reads no such key",
        ),
        ("linformer", ["attention.causal=True"], "attention.causal: "),
        (
            "linformer",
            ["attention.position.name=shaw"],
            "attention.position.name: got 'shaw', but linformer takes 'none'",
        ),
        ("linformer", ["attention.max_len=100"], "attention.max_len: "),
        ("linformer", ["attention.rank=129"], "attention.rank: "),
        ("music", ["attention.position.max_len=100"], "attention.position.max_len: "),
        ("shaw", ["attention.position.max_distance=0"], "attention.position.max_distance: "),
        ("rotary", ["model.num_heads=64"], "model.num_heads: "),
        ("full", ["model.num_heads=3"], "model.num_heads: "),
        ("full", ["model.num_heads=0"], "model.num_heads: "),
        ("full", ["model.width=-64"], "model.width: "),
        ("full", ["model.num_layers=0"], "model.num_layers: "),
        ("full", ["model.num_layers=4000000000"], "model.num_layers: "),
        ("shaw", ["attention.position.max_distance=4000000000"], "max_distance: Shaw.max_distance must be"),
        ("full", ["train.batch_size=99999999999"], "train.batch_size: got 99999999999, takes an integer below 2**32"),
        ("full", ["model.dropout_rate=1"], "model.dropout_rate: "),
        ("full", ["model.num_kv_heads=3"], "model.num_kv_heads: "),
        ("full", ["model.share_attention_params=true"], "share_attention_params must be False where attention has no"),
        (
            "bigbird",
            ["model.scan_layers=true", "attention.implementation=reference"],
            "attention.implementation: BigBird.implementation 'reference' has its layer in its program: ",
        ),
        ("full", ["optimizer.momentum=0.9"], "optimizer.momentum: "),
        ("full", ["optimizer.learning_rate=nan"], "optimizer.learning_rate: got 'nan', takes a number"),
        ("full", ["train.batch_size=12"], "train.batch_size: "),
        ("full", ["train.accumulate=3"], "train.accumulate: "),
        ("full", ["train.accumulate=8"], "train.batch_size: "),
        ("full", ["train.mesh.data=16"], "train.mesh: "),
        ("full", ["train.mesh.dta=1"], "train.mesh: "),
        (
            "full",
            ["train.mesh={'tensor': 8}"],
            "train.mesh.tensor: got 8, takes a divisor of model.num_heads, which is 4",
        ),
        (
            "full",
            ["train.mesh={'sequence': 3}"],
            "train.mesh.sequence: got 3, takes a divisor of task.max_len, which is",
        ),
        ("full", ["train.parallel=pmap", "train.mesh.fsdp=2"], "train.mesh: parallel 'pmap' shares out data only, got"),
        (
            "full",
            ["train.parallel=pmapp"],
            "train.parallel: got 'pmapp', takes one of 'jit', 'pmap'; nearest match 'pmap'",
        ),
        (
            "full",
            ["train.select_metric=acuracy"],
            "train.select_metric: got 'acuracy', takes one of 'accuracy', 'macro_f1', '",
        ),
        (
            "full",
            ["train.num_steps.x=1"],
            "train.num_steps.x: got '1', but train.num_steps is the value 400, not a section",
        ),
        ("full", ["task.preset=listops_12"], "task.preset: got 'listops_12', takes one of "),
        ("full", ["task.max_len=64"], "task.max_len: "),
        ("full", ["task=None"], "task: got None, takes a section of keys"),
        ("full", ["seed=-1"], "seed: got -1, takes an integer from 0"),
        ("full", ["nam=x"], "nam: got 'x', but an experiment reads no such key"),
        ("full", ["train."], "train.: got 'train.', takes --config.key=value"),
        ("full", ["train.=3"], "train.: got an empty part, takes --config.key=value"),
        ("full", ["=3"], "takes --config.key=value"),
    ],
)
def test_refusals_name_key_value_and_choices(spec, overrides, message):
    assert message in refusal(f"demo.py:{spec}", *overrides)


def test_refusals_from_python_values():
    """What ConfigDict lets through: True in an int field, anything in a field that was None."""
    for section, key, value, message in [
        ("model", "num_heads", True, "model.num_heads: got True"),
        ("train", "stop_at_step", "soon", "train.stop_at_step: got 'soon', takes an integer or None"),
        ("optimizer", "clip_norm", [1.0], r"optimizer.clip_norm: got \[1.0\], takes a number or None"),
        ("attention", "position", 3, "attention.position: got 3, takes a section"),
    ]:
        config = ConfigDict(load("demo.py:full").to_dict(), type_safe=False)
        config[section][key] = value
        with pytest.raises(ConfigError, match=f"^{message}"):
            configs.check(config)


def test_placeholders_and_references_are_values():
    config = load("demo.py:full").copy_and_resolve_references()
    config = ConfigDict(config.to_dict())
    config.train.stop_at_step = config_dict.placeholder(int)
    config.train.checkpoint_every = config.train.get_ref("eval_every")
    checked = configs.check(config)
    assert checked.train.stop_at_step is None and checked.train.checkpoint_every == checked.train.eval_every


def test_missing_sections_and_names():
    config = load("demo.py:full").to_dict()
    for section in ("attention", "model", "task", "optimizer", "train"):
        without = {key: value for key, value in config.items() if key != section}
        with pytest.raises(ConfigError, match=f"^{section}: missing"):
            configs.check(without)
    with pytest.raises(ConfigError, match=r"^attention.name: missing; takes one of 'full'"):
        configs.check(config | {"attention": {}})
    with pytest.raises(ConfigError, match=r"^train.num_steps: missing; takes an integer"):
        configs.check(config | {"train": {"batch_size": 8}})


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        ("", "{}", "has no function get_config"),
        ("get_config = 3", "{}", "has no function get_config"),
        ("def get_config(): return {}", "{}:full", "takes no argument, got 'full'"),
        ("def get_config(): return 3", "{}", "takes a section of keys"),
        ("def get_config(arg): return {}", "{}", "with no argument: "),
        ("def get_config(arg=None):\n  raise ValueError('takes a, b')", "{}:c", "with argument 'c': takes a, b"),
        ("import nothing_of_that_name", "{}", "fails with ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("def get_config(:", "{}", "fails with SyntaxError"),
    ],
)
def test_wrong_files(tmp_path, text, spec, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        configs.load_config(spec.format(path))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_wrong_paths(tmp_path):
    assert refusal("listop.py:full").endswith(
        f"no such file: {CONFIGS}/listop.py; nearest match '{CONFIGS}/listops.py'"
    )
    assert "takes path/to/config.py" in refusal("listops:full")
    assert "with argument 'ful'" in refusal("listops.py:ful") and "takes full, window" in refusal("listops.py:ful")
    assert "this is a comparison" in refusal("compare_demo.py")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        configs.load_config(str(broken))
    with pytest.raises(ConfigError, match="takes no argument"):
        configs.load_config(f"{broken}:full")


def test_warmup_above_num_steps_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        load("demo.py:full", "train.num_steps=11", "optimizer.warmup_steps=12")
    assert "optimizer.warmup_steps: 12 is above train.num_steps 11" in caplog.text


def test_a_config_for_other_devices_can_be_built_but_not_run():
    config = load("demo.py:full").to_dict()
    config["train"] |= {"mesh": {"data": 16}}
    assert experiment.build(config).train.mesh == {"data": 16}
    with pytest.raises(ConfigError, match=r"^train.mesh: .*needs 16 devices, there are 8"):
        configs.check(config)
