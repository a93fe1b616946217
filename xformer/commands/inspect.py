"""Shapes, parameters and FLOPs of every layer of an experiment, and its attention pattern as a picture. Trains nothing.

  xformer inspect --config=listops:bigbird [--depth=2] [--out=pattern.png]
  xformer inspect --config=gpt3:xl --mesh='{"fsdp": 8}' --mesh='{"fsdp": 64, "tensor": 8}'

Writes nothing without --out. Sizes come from the prepared data; without it they are assumed, and the output says so.
Arrays are abstract: a model of any size takes no memory, and a mesh needs no devices.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xformer import cost, critical_path, sections, tasks
from xformer.commands import cli, memory_by_mesh, pictures
from xformer.config import override, read_plain
from xformer.config_help import experiment_help
from xformer.experiment import Experiment, as_json, build, check_cuts
from xformer.nn.experts import active_params
from xformer.report import patterns, style
from xformer.schema import ConfigError
from xformer.train import step as steps

MOST_BATCHES = 512  # that an epoch's lengths are counted by
MAX_PICTURE = 2048  # positions on a side of the pattern that is computed


@dataclasses.dataclass(frozen=True)
class Layer:
    """One module's call in the forward pass of a batch."""

    path: str
    kind: str
    output: str
    num_params: int
    flops: int
    uncounted: tuple[str, ...]


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--config", required=True, help="path.py[:argument] or config.json; --config.key=value overrides"
    )
    parser.add_argument("--out", help="a PNG file to draw the attention pattern in; without it nothing is written")
    parser.add_argument("--data_dir", help="folder of prepared data (default: $XFORMER_DATA or ~/.cache/xformer)")
    parser.add_argument("--depth", type=int, default=2, help="how deep into the modules the table goes")
    parser.add_argument(
        "--mesh", action="append", default=[], help="sizes of mesh axes, to count the memory of a device by; repeatable"
    )
    parser.add_argument("--keys", action="store_true", help="list every key of the config, and nothing else")
    args, overrides = parser.parse(argv)
    if args.depth < 1:
        raise ConfigError(f"--depth: got {args.depth}, takes an integer from 1")
    out, meshes = parser.picture(args.out), [memory_by_mesh.mesh_sizes(text) for text in args.mesh]
    experiment = build(override(read_plain(args.config), overrides))
    if out is not None and experiment.attention is None:
        raise ConfigError(f"--out: got {args.out!r}, but model {experiment.config.model.name} has no attention to draw")
    if args.keys or args.config_help:
        print(experiment_help(as_json(experiment.config)))
        return
    for mesh in meshes:
        check_cuts(experiment, mesh, "--mesh: ")
        shares = mesh["data"] * mesh["fsdp"] * experiment.train.accumulate
        if (size := experiment.train.batch_size) % shares:
            what = f"data x fsdp x train.accumulate {shares}"
            raise ConfigError(f"--mesh: got {what}, takes a divisor of train.batch_size, which is {size}")
    sizes, source = data_sizes(experiment, args.data_dir)
    batch = experiment.task.example_batch(experiment.train.batch_size, preprocessing(experiment, args.data_dir))
    print(f"{experiment.name}: {experiment.attention or 'no attention'}")
    tokens = tokens_by_input(experiment, sizes, batch)
    spelt = " + ".join(map(str, tokens))
    print(f"batch {experiment.train.batch_size} x {spelt} tokens, computing in {experiment.train.dtype}")
    print(f"{sizes['vocab_size']} token ids, {sizes['num_classes']} classes ({source})")
    if sizes.assumed:
        print(f"Parameters and FLOPs hold for these assumed sizes and inputs of {spelt} tokens. "
              "Training prepares the data; then its own sizes are shown.")  # fmt: skip
    print()
    forward, training, state = training_cost(experiment, sizes, batch)
    rows = layers(experiment, sizes, batch, args.depth)
    if experiment.model_args.get("scan_layers"):
        rows.append(scanned(experiment, rows, forward, state.params))
    print(table(rows))
    print()
    chain = sequential_products(experiment, sizes, batch)
    print(totals(experiment, sizes, forward, training, state, chain, sum(tokens)))
    if experiment.train.length_buckets > 1:
        print(f"These are FLOPs of the longest batches; train.length_buckets {experiment.train.length_buckets} makes "
              "shorter ones of shorter texts.")  # fmt: skip
    if meshes:
        print()
        print(memory_by_mesh.table(state, meshes))
    if out is not None:
        print(draw_pattern(experiment, min(sizes["max_len"], experiment.num_positions), out))


def data_sizes(experiment: Experiment, data_dir: str | None) -> tuple[tasks.Sizes, str]:
    """(what the data decides, where it comes from): of the prepared data if it is there, else as the task expects."""
    known = preprocessing(experiment, data_dir)
    sizes = experiment.task.sizes(known)
    if sizes.assumed:
        return sizes, f"assumed: the data is not prepared yet; it decides {' and '.join(sizes.assumed)}"
    return sizes, "known without the data" if known is None else "from the prepared data"


def preprocessing(experiment: Experiment, data_dir: str | None) -> tasks.Preprocessing | None:
    """What the prepared data decided, such as its vocabulary; None where it is not prepared.

    Raises ConfigError where the user's own files are at fault.
    """
    try:
        return sections.construct(
            "task", experiment.config.to_dict(), lambda: experiment.task.open(data_dir).preprocess
        )
    except tasks.DataMissing:
        return None


def num_train(experiment: Experiment, data_dir: str | None) -> int | None:
    """Examples of the training split; None where the data is not prepared."""
    try:
        return int(experiment.task.open(data_dir).num_examples("train"))
    except tasks.DataMissing:
        return None


def tokens_by_input(experiment: Experiment, sizes: Mapping[str, int], batch: Mapping[str, Any]) -> list[int]:
    """The places for tokens of an example, by input: two of a pair, source and target; what results count as tokens."""

    def masks(batch: Mapping[str, Any]) -> list[jax.Array]:
        return steps.token_masks(experiment.task.inputs(batch), experiment.model_fn(**sizes)(nnx.Rngs(0)))

    return [int(np.prod(mask.shape[1:])) for mask in nnx.eval_shape(masks, dict(batch))]


def layers(experiment: Experiment, sizes: Mapping[str, int], batch: Mapping[str, Any], depth: int) -> list[Layer]:
    """Every module down to `depth` that the forward pass calls, in that order."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: experiment.model_fn(**sizes)(nnx.Rngs(0))))
    found: list[Layer] = []

    def forward(state: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        model = nnx.merge(graphdef, state)
        modules = [(path, module) for path, module in nnx.iter_modules(model) if 0 < _depth(path) <= depth]
        names = {id(module): ".".join(map(str, path)) for path, module in modules}
        with recorded({type(module) for _, module in modules}) as calls:
            logits = model(**experiment.task.inputs(batch), deterministic=True)
        found.extend(_layer(names[id(call.module)], call) for call in calls if id(call.module) in names)
        return logits

    jax.eval_shape(forward, state, dict(batch))
    return found


def scanned(experiment: Experiment, rows: Sequence[Layer], forward: cost.Cost, params: Any) -> Layer:
    """One row for the blocks, whose calls a scan over them hides, and for what else has none: what the others leave."""
    kind = f"{experiment.model_args['num_layers']} scanned blocks, output"
    listed = [row for row in rows if "." not in row.path]
    num_params = steps.num_params(params) - sum(row.num_params for row in listed)
    return Layer("the rest", kind, "", num_params, forward.flops - sum(row.flops for row in listed), forward.uncounted)


def _depth(path: Sequence[Any]) -> int:
    return sum(not isinstance(part, int) for part in path)


def _layer(path: str, call: Call) -> Layer:
    graphdef, state = nnx.split(call.module)
    leaves, structure = jax.tree.flatten((call.args, call.kwargs))
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def again(state: Any, *arrays: jax.Array) -> Any:
        given = iter(arrays)
        filled = [next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return nnx.merge(graphdef, state)(*args, **kwargs)

    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    arrays = [shape(leaf) for leaf, array in zip(leaves, is_array, strict=True) if array]
    counted = cost.count(again, jax.tree.map(shape, state), *arrays)
    output = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(call.output))
    num_params = steps.num_params(nnx.state(call.module, nnx.Param))
    return Layer(path, type(call.module).__name__, output, num_params, counted.flops, counted.uncounted)


@dataclasses.dataclass
class Call:
    """What a module was called with, and what it gave."""

    module: Any
    args: tuple
    kwargs: dict[str, Any]
    output: Any = None


@contextlib.contextmanager
def recorded(classes: set[type]) -> Iterator[list[Call]]:
    """The list that every call of a module of these classes is added to while this is open, in order."""
    calls: list[Call] = []

    def recording(original: Callable) -> Callable:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            entry = Call(self, args, kwargs)
            calls.append(entry)
            entry.output = original(self, *args, **kwargs)
            return entry.output

        return call

    originals = {cls: cls.__dict__["__call__"] for cls in classes if "__call__" in cls.__dict__}
    try:
        for cls, original in originals.items():
            cls.__call__ = recording(original)  # type: ignore[method-assign]
        yield calls
    finally:
        for cls, original in originals.items():
            cls.__call__ = original  # type: ignore[method-assign]


def table(rows: Sequence[Layer]) -> str:
    """The layers as aligned text."""
    cells = [("layer", "module", "output", "parameters", "FLOPs forward")]
    cells += [(row.path, row.kind, row.output, f"{row.num_params:,}", flops(row.flops, row.uncounted)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = (str.ljust, str.ljust, str.ljust, str.rjust, str.rjust)
    lines = ["  ".join(put(cell, width) for put, cell, width in zip(align, row, widths, strict=True)) for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def totals(
    experiment: Experiment,
    sizes: Mapping[str, int],
    forward: cost.Cost,
    training: cost.Cost,
    state: steps.TrainState,
    chain: int,
    tokens: int,
) -> str:
    """Parameters and FLOPs of the whole model, of a token, of a training step and of the whole training.

    chain: matrix products of a forward pass that must wait for one another. tokens: of an example, all inputs together.
    """
    num_steps, places = experiment.train.num_steps, experiment.train.batch_size * tokens
    whole = training.scale(num_steps)
    return "\n".join(
        [
            f"parameters                 {parameters(experiment, sizes, state)}",
            f"FLOPs of a forward pass    {flops(forward.flops, forward.uncounted)}",
            f"FLOPs of a training step   {flops(training.flops, training.uncounted)}",
            f"FLOPs of a token           {forward.flops // places:,} forward, {training.flops // places:,} in training",
            f"FLOPs of {num_steps:,} steps".ljust(27) + flops(whole.flops, whole.uncounted),
            f"sequential products        {chain:,} in a forward pass: each needs the result of the one before",
        ]
    )


def parameters(experiment: Experiment, sizes: Mapping[str, int], state: steps.TrainState) -> str:
    """How many there are and, where experts share out the tokens, how many a token meets."""
    total = active = steps.num_params(state.params)
    if experiment.model_args.get("num_experts", 1) > 1:
        active = active_params(nnx.eval_shape(lambda: experiment.model_fn(**sizes)(nnx.Rngs(0))))
    return f"{total:,}" + (f" ({active:,} active for a token)" if active < total else "")


def training_cost(
    experiment: Experiment, sizes: Mapping[str, int], batch: Mapping[str, Any]
) -> tuple[cost.Cost, cost.Cost, steps.TrainState]:
    """What a forward pass and a training step cost, and the training state, of abstract arrays."""
    task, optimizer = experiment.task, experiment.optimizer
    graphdef, params, rest = steps.split(nnx.eval_shape(lambda: experiment.model_fn(**sizes)(nnx.Rngs(0))))
    forward = cost.count(steps.eval_step(graphdef, task), (params, rest), dict(batch))
    step = steps.train_step(graphdef, task, optimizer, experiment.schedule, accumulate=experiment.train.accumulate)
    zero: Any = jax.ShapeDtypeStruct((), jnp.int32)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    state = steps.TrainState(zero, params, rest, jax.eval_shape(optimizer.init, params))
    return forward, cost.count(step, state, dict(batch), seed), state


def mean_training_cost(
    experiment: Experiment, sizes: Mapping[str, int], data_dir: str | None
) -> tuple[float, steps.TrainState]:
    """(FLOPs of a training step, the training state); of batches by length, the mean over those of an epoch.

    Where there are more than `MOST_BATCHES`, over so many. Of data that is not prepared, batches of `max_len` count.
    """
    train, known = experiment.train, preprocessing(experiment, data_dir)
    abstract = experiment.task.example_batch(train.batch_size, known)
    if train.length_buckets == 1 or known is None:
        _, step, state = training_cost(experiment, sizes, abstract)
        return float(step.flops), state
    data = experiment.task.open(data_dir)
    batches = data.batches("train", train.batch_size, seed=experiment.seed, shuffle=True, epochs=None,
                           length_buckets=train.length_buckets)  # fmt: skip
    count = min(math.ceil(data.num_examples("train") / train.batch_size), MOST_BATCHES)
    shapes = collections.Counter(
        tuple((name, x.shape, x.dtype) for name, x in sorted(batch.items()))
        for batch in itertools.islice(batches, count)
    )
    total = 0.0
    for shape, times in shapes.items():
        batch = {name: jax.ShapeDtypeStruct(dims, dtype) for name, dims, dtype in shape}
        _, step, state = training_cost(experiment, sizes, batch)
        total += times * step.flops
    return total / count, state


def sequential_products(experiment: Experiment, sizes: Mapping[str, int], batch: Mapping[str, Any]) -> int:
    """Matrix products of a forward pass that must wait for one another, of abstract arrays."""
    graphdef, params, rest = steps.split(nnx.eval_shape(lambda: experiment.model_fn(**sizes)(nnx.Rngs(0))))
    return critical_path.sequential_products(steps.eval_step(graphdef, experiment.task), (params, rest), dict(batch))


def flops(number: int, uncounted: Sequence[str] = ()) -> str:
    """A FLOP count, and what it leaves out."""
    return f"{number:,}" + (f" + uncounted: {', '.join(uncounted)}" if uncounted else "")


def draw_pattern(experiment: Experiment, length: int, out: Path) -> str:
    """Writes the picture of which keys each query considers; the line that says what was done."""
    assert experiment.attention is not None  # checked before anything is printed
    positions = min(length, MAX_PICTURE)
    name, num_heads = experiment.config.attention.name, experiment.model_args.get("num_heads", 1)
    image = patterns.picture({name: pictures.pattern(experiment.attention, positions, num_heads)}, style.LIGHT)
    assert image is not None  # there is one pattern to draw
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(image)
    return f"pattern of {positions} positions: {out}"
