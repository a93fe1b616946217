"""GPT-3 and the transformer of 2017: the sizes that the papers print, and what a device of a mesh holds of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_config import CONFIGS, SIZES, load, refusal

from xformer import experiment
from xformer.commands import cli, inspect, memory_by_mesh, run
from xformer.train import TrainConfig
from xformer.train import step as steps
from xformer.train.parallel import make_layout

# Brown et al. 2020, table 2.1: parameters as printed, layers, width, heads, head_dim, batch in tokens, learning rate.
GPT3 = {
    "small": (125e6, 12, 768, 12, 64, 0.5e6, 6.0e-4),
    "medium": (350e6, 24, 1024, 16, 64, 0.5e6, 3.0e-4),
    "large": (760e6, 24, 1536, 16, 96, 0.5e6, 2.5e-4),
    "xl": (1.3e9, 24, 2048, 24, 128, 1e6, 2.0e-4),
    "2.7b": (2.7e9, 32, 2560, 32, 80, 1e6, 1.6e-4),
    "6.7b": (6.7e9, 32, 4096, 32, 128, 2e6, 1.2e-4),
    "13b": (13e9, 40, 5140, 40, 128, 2e6, 1.0e-4),
    "175b": (175e9, 96, 12288, 96, 128, 3.2e6, 0.6e-4),
}


def parameters(config):
    built = experiment.build(config)
    model = nnx.eval_shape(lambda: built.model_fn(**built.task.sizes())(nnx.Rngs(0)))
    return steps.num_params(nnx.state(model, nnx.Param))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", GPT3)
def test_gpt3_is_what_its_table_prints(row):
    printed, layers, width, heads, head_dim, batch, rate = GPT3[row]
    config = load(f"gpt3.py:{row}")
    model = config.model
    assert (model.num_layers, model.width, model.num_heads, model.head_dim) == (layers, width, heads, head_dim)
    assert model.mlp_dim == 4 * width and config.task.max_len == 2048
    assert config.optimizer.learning_rate == rate
    assert config.train.batch_size * 2048 == pytest.approx(batch, rel=0.05)
    assert [op["name"] for op in config.attention.layers] == ["full", "window"]
    assert all(op["causal"] for op in config.attention.layers)
    inner = heads * head_dim
    attention = 4 * width * inner + 3 * inner + width
    block = attention + 2 * 4 * width * width + 5 * width + 4 * width
    assert parameters(config) == layers * block + (50_257 + 2_048) * width + 2 * width
    off = 0.17 if row == "xl" else 0.02  # 24 heads of 128 in a width of 2,048: the docstring says so
    assert parameters(config) == pytest.approx(printed, rel=off)
    assert (parameters(config) == pytest.approx(printed, rel=0.02)) == (row != "xl")


def test_the_xl_row_adds_up_with_sixteen_heads():
    assert parameters(load("gpt3.py:xl", "model.num_heads=16")) == pytest.approx(1.3e9, rel=0.02)


@pytest.mark.parametrize(("row", "width", "mlp_dim", "heads"), [("base", 512, 2048, 8), ("big", 1024, 4096, 16)])
def test_the_transformer_of_2017(row, width, mlp_dim, heads):
    config = load(f"transformer.py:{row}")
    model = config.model
    assert (model.num_layers, model.width, model.mlp_dim, model.num_heads) == (6, width, mlp_dim, heads)
    assert (model.norm, model.activation, model.position_embedding) == ("post", "relu", "sinusoidal")
    built = experiment.build(config)
    for step in (1, 4_000, 50_000):  # equation 3
        rate = width**-0.5 * min(step**-0.5, step * 4_000**-1.5)
        assert float(built.schedule(step - 1)) == pytest.approx(rate, rel=1e-5)


def test_an_unknown_row_is_refused():
    assert "takes small, medium, large, xl, 2.7b, 6.7b, 13b, 175b" in refusal("gpt3.py:tiny")


def test_inspect_says_flops_of_a_token_and_memory_by_mesh(capsys):
    argv = [f"--config={CONFIGS}/gpt3.py:xl", "--mesh={'fsdp': 8}", "--mesh={'fsdp': 64, 'tensor': 8}"]
    assert cli.exit_code(inspect.command, argv) == 0
    out = capsys.readouterr().out
    assert "parameters                 1,517,123,584" in out
    rows = [re.split(" {2,}", line) for line in out.partition("---\n")[2].partition("\n\n")[0].splitlines()]
    assert any("24 scanned blocks, output" in row for row in rows)
    assert sum(int(row[-2].replace(",", "")) for row in rows) == 1_517_123_584
    forward = int(re.search(r"FLOPs of a forward pass +([\d,]+)", out)[1].replace(",", ""))
    assert sum(int(row[-1].replace(",", "")) for row in rows) == forward
    assert "FLOPs of a token" in out and "fsdp=64, tensor=8:" in out
    (line,) = [line for line in out.splitlines() if line.startswith("fsdp=8:")]
    each = 1_517_123_584 * 4 / 8 / 2**30
    numbers = [float(number) for number in re.findall(r"\d+\.\d\d", line)]
    assert numbers == pytest.approx([4 * each, each, 2 * each, each], abs=0.02)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("translation.py:full", lambda task, model: [task.max_len, task.longest_target]),
        ("retrieval.py:full", lambda task, model: [task.max_len] * 2),
        ("images.py:full", lambda task, model: [(28 // model.patch_size) ** 2]),
    ],
)
def test_tokens_are_those_of_all_inputs_and_patches_of_images(spec, expected):
    built = experiment.build(load(spec))
    found = inspect.tokens_by_input(built, built.task.sizes(), built.task.example_batch(2))
    assert found == expected(built.task, built.config.model)


@pytest.mark.parametrize("text", ["fsdp", "{'fsdp': 0}", "{'rows': 2}", "{'fsdp': True}", "[8]"])
def test_a_wrong_mesh_is_refused(text, capsys):
    argv = [f"--config={CONFIGS}/transformer.py:base", f"--mesh={text}"]
    assert cli.exit_code(inspect.command, argv) == 2
    assert "takes sizes from 1 of data, fsdp, tensor, sequence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{'tensor': 5}", "--mesh: tensor: got 5, takes a divisor of model.num_heads, which is 12"),
        ("{'fsdp': 7}", "--mesh: got data x fsdp x train.accumulate 7, takes a divisor of train.batch_size, which is"),
        ("{'sequence': 3}", "--mesh: sequence: got 3, takes a divisor of task.max_len, which is 2048"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(text, reason, capsys):
    assert cli.exit_code(inspect.command, [f"--config={CONFIGS}/gpt3.py:small", f"--mesh={text}"]) == 2
    assert reason in capsys.readouterr().err


def test_a_device_holds_what_is_said():
    """The bytes of arrays laid out over eight devices, those of each device counted."""
    sizes = {"fsdp": 4, "tensor": 2}
    shapes = {
        "query": {"kernel": (8, 4, 6)},
        "expand": {"kernel": (8, 6), "bias": (6,)},
        "scale": (7,),
        "table": (5, 8),
    }
    is_shape = lambda x: isinstance(x, tuple)
    state = jax.tree.map(lambda shape: jnp.zeros(shape, jnp.float32), shapes, is_leaf=is_shape)
    shardings = make_layout(TrainConfig(num_steps=1, batch_size=8, mesh=sizes)).shardings(state)
    placed = jax.tree.map(jax.device_put, state, shardings)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert memory_by_mesh.device_bytes(state, memory_by_mesh.mesh_sizes(str(sizes))) == held
    assert held < sum(np.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(state))


@pytest.mark.full
@pytest.mark.parametrize("spec", [f"{name}.py:{row}" for name, rows in SIZES.items() for row in rows])
def test_each_trains_at_a_smoke_size(spec, tmp_path):
    text = (CONFIGS / spec.partition(":")[0]).read_text()
    smoke = text.partition("Smoke size: ")[2].partition('."""')[0].partition('.\n"""')[0].split()
    argv = [f"--config={CONFIGS}/{spec}", f"--workdir={tmp_path}", f"--data_dir={tmp_path}", *smoke]
    (tmp_path / "texts.txt").write_text("".join(f"the {word} went on and on.\n" for word in map(str, range(3_000))))
    argv += [f"--config.task.path={tmp_path}/texts.txt", "--config.train.mesh={'data': 1}"]
    assert cli.exit_code(run.command, argv) == 0
