"""From a config to the objects that train: the only place that sees a config."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from xformer import attention, parts, pretrained, schema, sections, tasks
from xformer.attention import kernels
from xformer.attention.device import present
from xformer.models import MODELS, Encoder
from xformer.schema import ConfigError
from xformer.tasks.pipeline import bucket_lengths
from xformer.train import Engine, TrainConfig, Trainer, by_path, optimizers
from xformer.train.parallel import make_layout
from xformer.train.settings import check_data, selection
from xformer.train.sums import reduce
from xformer.tree_paths import Blocks

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
MAX_TOKENS = 2**31  # of a batch: more can't be numbered by the int32 indices that JAX uses


_CHECKED: dict[Any, None] = {}  # the contents and classes of configs that were checked together, oldest first
MAX_CHECKED = 256

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that a run is made of.

    Attributes:
      config: the complete checked config; building from it again gives an equal experiment.
      attention: the op, or the stack of them; None where the model has none.
      judged: the task as a run sees it: itself, or with the metrics that the `train` section adds.
      model: the class of the model.
      model_args: its arguments that neither the data nor `attention` decide.
    """

    name: str
    seed: int
    attention: attention.Attention | None
    task: Any
    judged: Any
    optimizer: optax.GradientTransformation
    schedule: Callable[[int], Any]
    train: TrainConfig
    model: Callable[..., nnx.Module]
    model_args: Mapping[str, Any]
    config: ConfigDict

    @property
    def num_positions(self) -> int:
        """The positions that attention sees of the longest input."""
        return _num_positions(self.model, self.task.length, {**self.task.sizes(), **self.model_args})  # type: ignore[arg-type]

    def model_fn(self, **sizes: Any) -> Callable[[nnx.Rngs], nnx.Module]:
        """The function that makes the freshly initialised model for data of these sizes.

        The model gets the sizes that its constructor names.

        Raises:
          ConfigError: it needs one more.
        """
        takes = schema.parameters(self.model)
        given = {**sizes, "attention": self.attention, "dtype": DTYPES[self.train.dtype]}
        needed = [name for name, parameter in takes.items() if parameter.default is schema.REQUIRED]
        others = {"rngs", "attention", *self.model_args}
        sections.check_sizes(self.config, [name for name in needed if name not in others], sizes)
        chosen = {name: value for name, value in given.items() if name in takes}
        return lambda rngs: self.model(**chosen, **self.model_args, rngs=rngs)

    @property
    def steps_key(self) -> Hashable:
        """What the compiled steps are made of, the data aside: experiments with equal keys share them by `like`.

        Not where `train.num_epochs` gives them other numbers of steps: `Engine` sees to that.
        """
        sections_text = json.dumps({key: as_json(self.config[key]) for key in ("model", "optimizer", "train")})
        return self.model, sections_text, self.attention, self.task.steps_key

    def trainer(
        self,
        workdir: str | Path,
        data_dir: str | Path | None = None,
        progress: Callable[[str], None] | None = None,
        like: Engine | None = None,
        test: bool = True,
    ) -> Trainer:
        """The trainer of this experiment in `workdir`, its data prepared and opened.

        Args:
          like: the engine of a run of an experiment with the same `steps_key`: nothing is compiled again.
          test: whether the test split is scored at the end.

        Raises:
          DataMissing: the data is not there and can't be made; the message says how to get it.
          ConfigError: the user's own files are at fault, or the batch is far larger than the training split.
        """
        # The user's own files are read here; what is wrong with them is a wrong `task` section.
        sections.construct("task", self.config.to_dict(), lambda: self.task.prepare(data_dir, progress=progress))
        data = self.task.open(data_dir)
        train = self.train.steps_for(data.num_examples("train"))
        sections.construct("train", self.config.to_dict(), lambda: check_data(train, data))
        sizes = self.task.sizes(data.preprocess)
        model_fn = self.model_fn(**sizes)
        if freeze := self.config.optimizer.get("freeze"):
            params = nnx.state(nnx.eval_shape(lambda: model_fn(nnx.Rngs(0))), nnx.Param)
            sections.construct("optimizer", self.config.to_dict(), lambda: by_path.frozen(params, freeze))
        return Trainer(
            model_fn=model_fn,
            data=data,
            task=self.judged,
            **_optimizer(self.config, train.num_steps, self.attention),
            train=train,
            workdir=Path(workdir),
            seed=self.seed,
            name=self.name,
            attention=self.config.attention.name,
            model={"name": self.config.model.name, **getattr(self.model, "facts", {})},
            config=as_json(self.config),
            callbacks=parts.make_callbacks(self.config.to_dict()["train"]),
            trackers=parts.make_trackers(self.config.to_dict()["train"]),
            complete=complete,
            like=like,
            test=test,
            sources={
                "hf": functools.partial(
                    pretrained.source,
                    config=as_json(self.config),
                    sizes=sizes,
                    pad_id=getattr(getattr(data.preprocess, "vocabulary", None), "pad_id", 0),
                )
            },
        )


def as_config(values: Mapping[str, Any]) -> ConfigDict:
    """Nested dicts as a ConfigDict that keeps their order (which is that of a comparison's variants)."""
    inner = {key: as_config(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return ConfigDict(inner, sort_keys=False, allow_dotted_keys=True)  # a grid to tune may be written so


def as_json(config: Mapping | ConfigDict) -> dict[str, Any]:
    """The config as `config.json` holds it: plain dicts, lists for tuples. Building from it again changes nothing."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping | ConfigDict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(config)


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's `config.json` with the defaults of keys that are newer; as it is where it can't be built any more."""
    try:
        return as_json(build(config, quiet=True).config)
    except ConfigError:
        return dict(config)


def build(config: Mapping | ConfigDict, *, quiet: bool = False) -> Experiment:
    """Checks a config, fills in its defaults and builds the experiment; nothing is computed.

    What the attention section leaves unset is chosen by `for_length` of its classes; where `train.init_from` is a
    Hugging Face folder, a model section without `width` is that folder's. The model is traced once for
    configs that differ by name and seed only. What a training run would not expect is a warning, once; `quiet` ones
    are of runs that have been trained.

    Raises:
      ConfigError: one line that names the key, what it got and what it takes.
    """
    checked = pretrained.fill(sections.check_keys(config))
    task = sections.construct("task", checked, lambda: tasks.build(checked["task"]))
    checked["model"] = sections.complete_model(checked, task.sizes())
    model, model_args = MODELS[checked["model"]["name"]], {**checked["model"]}
    del model_args["name"]
    num_positions = _num_positions(model, task.length, {**task.sizes(), **model_args})
    op, checked["attention"] = sections.build_attention(checked, num_positions)
    model_slots, complete_slots = sections.build_slots(checked, {**task.sizes(), "max_len": num_positions})
    checked["model"] |= complete_slots
    model_args |= model_slots
    judged, checked["train"]["select_metric"] = parts.judged(task, checked["train"])
    # The metric and its own direction, so that the config of a run says them.
    select = lambda: selection(TrainConfig(**checked["train"]), judged.better)
    schema.check("train.select_metric", checked["train"]["select_metric"], Literal[tuple(judged.better)] | None)
    checked["train"]["select_metric"], checked["train"]["select_mode"] = sections.construct("train", checked, select)
    experiment = Experiment(
        name=checked["name"],
        seed=checked["seed"],
        attention=op,
        task=task,
        judged=judged,
        train=sections.construct("train", checked, lambda: TrainConfig(**checked["train"])),
        **_optimizer(checked, checked["train"]["num_steps"], op),
        model=model,
        model_args=model_args,
        config=as_config(checked),
    )
    parts.make_callbacks(checked["train"])  # those of a run are made by its trainer
    parts.make_trackers(checked["train"])
    if not quiet:
        for remark in _remarks(experiment, num_positions):
            _warn(remark)
    content = (_as_text(checked), *sections.owners(checked))
    if content not in _CHECKED:
        _check_together(experiment)
        if len(_CHECKED) >= MAX_CHECKED:
            _CHECKED.pop(next(iter(_CHECKED)))
        _CHECKED[content] = None
    return experiment


def _num_positions(model: type, max_len: int, given: Mapping[str, Any]) -> int:
    """The positions that attention sees: those of the input, unless the model says otherwise by `num_positions`.

    `given` holds the sizes of the data and the arguments of the model.
    """
    count = getattr(model, "num_positions", None)
    if count is None:
        return max_len
    takes = [key for key in schema.parameters(count) if key in given and key != "max_len"]
    return count(max_len, **{key: given[key] for key in takes})


def _as_text(checked: Mapping[str, Any]) -> str:
    """The sections of a complete config as JSON, without name and seed."""
    content = {section: checked[section] for section in sections.SECTIONS}
    for section, keys in content.items():
        for key, value in keys.items():
            try:
                json.dumps(as_json({key: value}), allow_nan=False)
            except (TypeError, ValueError):
                raise ConfigError(f"{section}.{key}: got {schema.show(value)}, takes what JSON can hold") from None
    return json.dumps(as_json(content))


def check_devices(experiment: Experiment) -> None:
    """Raises ConfigError if the mesh does not fit this machine's devices, or the batch, heads or length the mesh."""
    config = experiment.config
    layout = sections.construct("train", config.to_dict(), lambda: make_layout(experiment.train))
    check_cuts(experiment, layout.mesh.shape)


def recommend_half(dtypes: Iterable[str], say: Callable[[str], None]) -> None:
    """Recommends bfloat16, in one line, where a run (its `train.dtype`) is in float32 on a device made for half."""
    device = present()
    if device.made_for_half and "float32" in dtypes:
        say(f"{device.kind} has units for half precision: train.dtype=bfloat16 uses them (parameters stay float32)")


def check_cuts(experiment: Experiment, mesh: Mapping[str, int], where: str = "train.mesh.") -> None:
    """Raises ConfigError if the sizes of a mesh don't divide what they cut: the length, or the heads.

    where: what the message puts before the name of an axis.
    """
    config = experiment.config
    lengths = bucket_lengths(experiment.task.length, experiment.train.length_buckets)
    cuts = [("sequence", "task.max_len", experiment.task.length)]
    cuts += [("sequence", "a length of train.length_buckets", length) for length in lengths]
    if "num_heads" in config.model:
        cuts += [("tensor", "model.num_heads", config.model.num_heads)]
    for axis, key, size in cuts:
        if size % mesh[axis]:
            raise ConfigError(f"{where}{axis}: got {mesh[axis]}, takes a divisor of {key}, which is {size}")


def _optimizer(
    config: Mapping[str, Any] | ConfigDict, num_steps: int, op: attention.Attention | None
) -> dict[str, Any]:
    config = config.to_dict() if isinstance(config, ConfigDict) else config
    model, blocks = config["model"], None
    if op is not None and issubclass(MODELS[model["name"]], Encoder):
        period, shared = len(attention.entries(op)), model["share_attention_params"]
        blocks = Blocks(model["num_layers"], period, scanned=model["scan_layers"], shared=shared)
    build_optimizer = lambda: optimizers.build(**config["optimizer"], num_steps=num_steps, blocks=blocks)
    optimizer, schedule = sections.construct("optimizer", config, build_optimizer)
    return {"optimizer": optimizer, "schedule": schedule}


def _remarks(experiment: Experiment, num_positions: int) -> Iterator[str]:
    """What hyperparameters do where it is not what their names promise."""
    warmup_steps, num_steps = experiment.config.optimizer.warmup_steps, experiment.config.train.num_steps
    if warmup_steps > num_steps:
        yield (
            f"optimizer.warmup_steps: {warmup_steps} is above train.num_steps {num_steps}, "
            "so the learning rate never reaches its peak"
        )
    for slot, op in {"attention": experiment.attention, **experiment.model_args}.items():
        if isinstance(op, attention.Attention):
            for part in (op, *(getattr(entry, "position", None) for entry in attention.entries(op))):
                for remark in getattr(part, "remarks", lambda _: ())(num_positions):
                    yield f"{slot}: {remark}"


def _check_together(experiment: Experiment) -> None:
    """Checks what no section can know alone, by tracing the model on abstract arrays."""
    config = experiment.config.to_dict()
    for key in ("batch_size", "eval_batch_size"):
        rows, most = config["train"][key], MAX_TOKENS // experiment.task.length
        if rows is not None and rows > most:
            raise ConfigError(
                f"train.{key}: got {rows}, takes at most {most} examples of {experiment.task.length} tokens"
            )
    try:
        outputs = sections.construct("model", config, lambda: trace(experiment))
    except ConfigError as error:
        if "segment_ids" not in str(error) or config["task"].get("packing") is not True:
            raise
        reason = str(error).removeprefix("model: ")
        raise ConfigError(f"task.packing: got True, takes False with this attention: {reason}") from error
    try:
        jax.eval_shape(experiment.task.metrics, outputs, experiment.task.example_batch(1))
    except (TypeError, ValueError) as error:
        shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(outputs))
        raise ConfigError(
            f"model.name: got {config['model']['name']!r}, whose outputs {shapes} do not fit task "
            f"{config['task']['name']}: {' '.join(str(error).split())}"
        ) from error
    if experiment.judged is not experiment.task:
        sums = lambda outputs, batch: reduce(experiment.judged.metrics(outputs, batch))
        judge = lambda: jax.eval_shape(sums, outputs, experiment.task.example_batch(1))
        listed = {f"train.metrics[{i}]": entry for i, entry in enumerate(config["train"]["metrics"])}
        sections.construct("train", config, parts.guarded(listed, judge))


@functools.cache  # a comparison checks the same keys many times
def _warn(message: str) -> None:
    logger.warning(message)


def trace(experiment: Experiment) -> Any:
    """The outputs, shapes instead of arrays, of one example's training-mode forward pass at the task's length.

    Raises:
      ConfigError: the model does not read what the task gives.
      ValueError, NotImplementedError: as the model's constructor and call do.
    """
    task = experiment.task
    sizes, batch = task.sizes(), task.example_batch(1)
    sections.check_call(experiment.config, jax.eval_shape(task.inputs, batch))
    model = nnx.eval_shape(lambda: experiment.model_fn(**sizes)(nnx.Rngs(0)))
    if experiment.model_args.get("scan_layers") and experiment.attention is not None:
        # Scanned layers run one program: two of each entry are refused what all are, without the plans of all.
        ops = [experiment.attention, *experiment.model_args.values()]
        few = 2 * math.lcm(*(len(attention.entries(op)) for op in ops if isinstance(op, attention.Attention)))
        counts = {key: experiment.model_args.get(key) for key in ("num_layers", "num_decoder_layers")}
        args = {**experiment.model_args, **{key: min(count, few) for key, count in counts.items() if count is not None}}
        model = nnx.eval_shape(lambda: dataclasses.replace(experiment, model_args=args).model_fn(**sizes)(nnx.Rngs(0)))
    graph, state = nnx.split(model)

    def forward(state: Any, batch: Any, rng: jax.Array) -> Any:
        model: Any = nnx.merge(graph, state)
        return model(**experiment.task.inputs(batch), deterministic=False, rngs=nnx.Rngs(dropout=rng))

    with kernels.quietly():  # there is no mesh here as there is when it trains
        return jax.eval_shape(forward, state, batch, jax.eval_shape(lambda: jax.random.key(0)))
