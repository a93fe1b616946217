"""The run that a run starts from where a comparison has `pretrain`: masked language modelling on its own texts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from xformer import schema
from xformer.checks import check_integer
from xformer.models import MODELS, Encoder
from xformer.schema import ConfigError

FOLDER = "pretrain"
"""Where it lies, in the folder of the run that starts from it."""

MODEL = TASK = "masked_lm"


@dataclasses.dataclass(frozen=True)
class Pretrain:
    """How the runs of a comparison are pretrained, each by itself (Amos et al. 2024, "Never train from scratch").

    What is None is as in the run that follows: its attention, model, optimizer and data order are those of pretraining
    too.

    Attributes:
      num_steps: optimizer steps, the same for all.
      train_flops: instead of `num_steps`, training FLOPs of each pretraining: it takes the steps that they pay for.
      batch_size: texts of a step.
      learning_rate, warmup_steps, weight_decay: of the optimizer.
      dropout_rate: of the model.
      mask_share: hidden tokens of a text.
      eval_every: steps between evaluations and checkpoints; the best is what is started from.
    """

    num_steps: int | None = None
    train_flops: float | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    warmup_steps: int | None = None
    weight_decay: float | None = None
    dropout_rate: float | None = None
    mask_share: float = 0.15
    eval_every: int | None = None

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.train_flops is None):
            got = f"{self.num_steps} and {self.train_flops:g}" if self.num_steps is not None else "neither"
            raise ValueError(f"num_steps, pretrain.train_flops: got {got}, takes one of the two")
        if self.train_flops is not None and not 0 < self.train_flops < math.inf:
            raise ValueError(f"train_flops: got {self.train_flops:g}, takes a number above 0")
        for name in ("num_steps", "batch_size", "eval_every"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))


def complete(section: Any) -> dict[str, Any]:
    """The `pretrain` section of a comparison with every key. Raises ConfigError for one that is wrong."""
    given = schema.as_mapping("pretrain", section)
    checked = schema.check_keys("pretrain", given, schema.parameters(Pretrain), "a comparison's pretrain")
    try:
        Pretrain(**checked)
    except ValueError as error:
        raise ConfigError(f"pretrain.{error}") from None
    return checked


def config_of(run: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the pretraining of a run; where FLOPs decide its steps, with as many as the run has.

    Args:
      run: its complete config, as plain dicts.
      section: the complete `pretrain` section.

    Raises:
      ConfigError: its model has no encoder to pretrain.
    """
    name, given = run["model"]["name"], Pretrain(**section)
    model_class: Any = MODELS[name]
    if not (isinstance(model_class, type) and issubclass(model_class, Encoder)):
        raise ConfigError(f"pretrain: got the model {name!r}, takes one that derives from {Encoder.__module__}.Encoder")
    takes = schema.parameters(MODELS[MODEL])
    model = {key: value for key, value in run["model"].items() if key in takes} | {"name": MODEL}
    if run["model"].get("pooling") == "attention":  # of the tokens' vectors, which a masked language model has as well
        model["pooling"] = "mean"
    source = dict(run["task"])
    if (chunk_len := run["model"].get("chunk_len")) is not None:  # attention is made for so many tokens
        if source.get("max_len") is None:
            raise ConfigError(
                f"pretrain: model.chunk_len is {chunk_len}, but the task {source['name']} has no max_len to cut at"
            )
        source["max_len"] = min(source["max_len"], chunk_len)
    steps = {
        "num_steps": given.num_steps or run["train"]["num_steps"],
        "num_epochs": None,
        "init_from": None,
        "init_strict": False,
        "init_positions": "copy",
    }
    others: dict[str, Any] = {"select_metric": None, "select_mode": None, "metrics": (), "callbacks": ()}
    every = {} if given.eval_every is None else dict.fromkeys(("eval_every", "checkpoint_every"), given.eval_every)
    own = lambda *keys: {key: value for key in keys if (value := getattr(given, key)) is not None}
    return {
        **run,
        "name": f"{run['name']}-{FOLDER}"[: schema.MAX_NAME],
        "model": model | own("dropout_rate"),
        "task": {"name": TASK, "source": source, "mask_share": given.mask_share},
        "optimizer": run["optimizer"] | own("learning_rate", "warmup_steps", "weight_decay"),
        "train": run["train"] | steps | others | every | own("batch_size"),
    }
