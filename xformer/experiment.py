"""From a config to the objects that train: the only place that sees a config."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from xformer import attention, schema, tasks
from xformer.models import EncoderClassifier
from xformer.schema import ConfigError, Parameter
from xformer.train import TrainConfig, Trainer, optimizers
from xformer.train.parallel import make_layout

T = TypeVar("T")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# Arguments that another section or the data decides.
MODEL_ELSEWHERE = ("vocab_size", "num_classes", "max_len", "attention", "dtype", "param_dtype", "rngs")
ATTENTION_ELSEWHERE = ("layer",)  # the model counts its layers
OPTIMIZER_ELSEWHERE = ("num_steps",)
DERIVED = {"head_dim": "num_heads"}  # what a message may speak of, and the key that decides it
ASSUMED_SIZES = {"vocab_size": 256, "num_classes": 10}  # where there is no data yet to tell
SECTIONS = ("attention", "model", "task", "optimizer", "train")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that a run is made of.

    Attributes:
      config: the complete checked config; building from it again gives an equal experiment.
      model_args: the arguments of the model that neither the data nor `attention` decide.
    """

    name: str
    seed: int
    attention: attention.Attention
    task: Any
    optimizer: optax.GradientTransformation
    schedule: Callable[[int], Any]
    train: TrainConfig
    model_args: Mapping[str, Any]
    config: ConfigDict

    def model_fn(self, *, vocab_size: int, num_classes: int, max_len: int) -> Callable[[nnx.Rngs], nnx.Module]:
        """The function that makes the freshly initialised model for data of these sizes."""

        def make(rngs: nnx.Rngs) -> nnx.Module:
            dtype = DTYPES[self.train.dtype]
            elsewhere = {"attention": self.attention, "dtype": dtype, "rngs": rngs}
            return EncoderClassifier(vocab_size, num_classes, max_len, **elsewhere, **self.model_args)

        return make

    def trainer(
        self, workdir: str | Path, data_dir: str | Path | None = None, progress: Callable[[str], None] | None = None
    ) -> Trainer:
        """The trainer of this experiment in `workdir`, its data prepared and opened.

        Raises:
          DataMissing: the data is not there and can't be made; the message says how to get it.
        """
        # The user's own files are read here; what is wrong with them is a wrong `task` section.
        _construct("task", self.config.to_dict(), lambda: self.task.prepare(data_dir, progress=progress))
        data = self.task.open(data_dir)
        sizes = {"vocab_size": data.vocab_size, "num_classes": data.num_classes, "max_len": data.max_len}
        return Trainer(
            model_fn=self.model_fn(**sizes),
            data=data,
            task=self.task,
            optimizer=self.optimizer,
            schedule=self.schedule,
            train=self.train,
            workdir=Path(workdir),
            seed=self.seed,
            name=self.name,
            attention=self.config.attention.name,
            config=as_json(self.config),
        )


def as_config(values: Mapping[str, Any]) -> ConfigDict:
    """Nested dicts as a ConfigDict that keeps their order (which is that of a comparison's variants)."""
    inner = {key: as_config(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return ConfigDict(inner, sort_keys=False)


def as_json(config: Mapping | ConfigDict) -> dict[str, Any]:
    """The config as `config.json` holds it: plain dicts, lists for tuples. Building from it again changes nothing."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping | ConfigDict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(config)


def build(config: Mapping | ConfigDict) -> Experiment:
    """Checks a config, fills in its defaults and builds the experiment; nothing is computed.

    Raises:
      ConfigError: one line that names the key, what it got and what it takes.
    """
    checked = resolve(config)
    experiment = Experiment(
        name=checked["name"],
        seed=checked["seed"],
        attention=_construct("attention", checked, lambda: attention.build(checked["attention"])),
        task=_construct("task", checked, lambda: tasks.build(checked["task"])),
        train=_construct("train", checked, lambda: TrainConfig(**checked["train"])),
        **_optimizer(checked),
        model_args=checked["model"],
        config=as_config(checked),
    )
    _check_together(experiment)
    return experiment


def resolve(config: Mapping | ConfigDict) -> dict[str, Any]:
    """Checks the name, type and choices of every key, section by section, and fills in the defaults."""
    given = config.to_dict() if isinstance(config, ConfigDict) else schema.as_mapping("config", config)
    if "variants" in given:
        raise ConfigError("--config: this is a comparison; run it with xformer compare")
    sections = {name: Parameter(Any) for name in SECTIONS}
    takes = {"name": Parameter(str), "seed": Parameter(int, 0), **sections}
    checked = schema.check_keys("", given, takes, "an experiment")
    if not 0 <= checked["seed"] < 2**32:
        raise ConfigError(f"seed: got {checked['seed']}, takes an integer from 0 to 2**32 - 1")
    positions = {"position": attention.POSITIONS}
    checked["attention"] = schema.check_named(
        "attention", checked["attention"], attention.ATTENTIONS, exclude=ATTENTION_ELSEWHERE, nested=positions
    )
    checked["task"] = schema.check_named("task", checked["task"], tasks.TASKS)
    for section, constructor, elsewhere in (
        ("model", EncoderClassifier, MODEL_ELSEWHERE),
        ("optimizer", optimizers.build, OPTIMIZER_ELSEWHERE),
        ("train", TrainConfig, ()),
    ):
        keys = schema.as_mapping(section, checked[section])
        takes = schema.parameters(constructor, exclude=elsewhere)
        checked[section] = schema.check_keys(section, keys, takes, f"the {section} section")
    return checked


def _construct(section: str, config: Mapping[str, Any], make: Callable[[], T]) -> T:
    """Calls what may refuse; its refusal is a wrong config, under the first key that the message speaks of."""
    try:
        return make()
    except (OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split()) or "the machine has not that much memory"
        raise ConfigError(f"{section}: a size is out of reach: {reason}") from error
    except (ValueError, NotImplementedError) as error:
        if isinstance(error, ConfigError):
            raise
        message = " ".join(str(error).split())
        path = _blame(section, config[section], message)
        if path == section == "model":  # the model meets the other sections' values
            others = ("attention", "task", "train")
            path = next((found for other in others if (found := _blame(other, config[other], message)) != other), path)
        raise ConfigError(f"{path}: {message.removeprefix(path.rpartition('.')[2] + ': ')}") from error


def _blame(path: str, section: Mapping[str, Any], message: str) -> str:
    """The dotted key of the first word of a message that is a key here or in an inner section; else `path` itself."""
    inner = {key: value for key, value in section.items() if isinstance(value, Mapping)}
    for word in re.findall(r"\w+", message):
        word = DERIVED.get(word, word)
        if word in section and word != "name":
            return f"{path}.{word}"
        for key, keys in inner.items():
            if word in keys and word != "name":
                return f"{path}.{key}.{word}"
    return path


def check_devices(experiment: Experiment) -> None:
    """Raises ConfigError if the mesh does not fit this machine's devices, or the batch, heads or length the mesh."""
    config = experiment.config
    layout = _construct("train", config.to_dict(), lambda: make_layout(experiment.train))
    cuts = (("tensor", "model.num_heads", config.model.num_heads), ("sequence", "task.max_len", experiment.task.length))
    for axis, key, size in cuts:
        shards = layout.mesh.shape[axis]
        if size % shards:
            raise ConfigError(f"train.mesh.{axis}: got {shards}, takes a divisor of {key}, which is {size}")


def _optimizer(config: Mapping[str, Any]) -> dict[str, Any]:
    num_steps = config["train"]["num_steps"]
    build_optimizer = lambda: optimizers.build(**config["optimizer"], num_steps=num_steps)
    optimizer, schedule = _construct("optimizer", config, build_optimizer)
    return {"optimizer": optimizer, "schedule": schedule}


def _check_together(experiment: Experiment) -> None:
    """Checks what no section can know alone, by tracing the model on abstract arrays."""
    config = experiment.config.to_dict()
    warmup_steps, num_steps = config["optimizer"]["warmup_steps"], config["train"]["num_steps"]
    if warmup_steps > num_steps:
        _warn(
            f"optimizer.warmup_steps: {warmup_steps} is above train.num_steps {num_steps}, "
            "so the learning rate never reaches its peak"
        )
    outputs = _construct("model", config, lambda: trace(experiment))
    batch = {"targets": jax.ShapeDtypeStruct((1,), jnp.int32), "weights": jax.ShapeDtypeStruct((1,), jnp.float32)}
    metrics = sorted(jax.eval_shape(experiment.task.metrics, outputs, batch))
    schema.check("train.select_metric", experiment.train.select_metric, Literal[tuple(metrics)])


@functools.cache  # a comparison builds the same base many times
def _warn(message: str) -> None:
    logger.warning(message)


def trace(experiment: Experiment) -> Any:
    """The logits, shapes instead of arrays, of one example's training-mode forward pass at the task's length."""
    length = experiment.task.length
    make = experiment.model_fn(**ASSUMED_SIZES, max_len=length)
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, state = nnx.split(model)

    def forward(state: Any, inputs: jax.Array, rng: jax.Array) -> jax.Array:
        rngs = nnx.Rngs(dropout=rng)
        return nnx.merge(graph, state)(inputs, inputs > 0, deterministic=False, rngs=rngs)

    inputs = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.eval_shape(forward, state, inputs, jax.eval_shape(lambda: jax.random.key(0)))
