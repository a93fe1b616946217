"""What one family of models is: how its config reads, and which tensor is which array of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.attention import Attention, T5Bias, build, entries
from xformer.models import MODELS
from xformer.weights.errors import WeightsError
from xformer.weights.keys import Keys
from xformer.weights.layout import LINEAR, VECTOR, Entry, Layout

ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Names of activations there, and the same functions here."""

HEADS = {
    "masked_lm": "ForMaskedLM",
    "classifier": "ForSequenceClassification",
    "token_classifier": "ForTokenClassification",
    "decoder": "LMHeadModel",
}
"""Our models, and how the names of the classes end that are the same there."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model of ours, before any array of it exists.

    Attributes:
      model: its name in `MODELS`.
      vocab_size, max_len, num_classes: its sizes; None where it has no classes.
      attention: the section of its op, as in a config.
      options: the keys of the `model` section of a config.
    """

    model: str
    vocab_size: int
    max_len: int
    attention: Mapping[str, Any]
    options: Mapping[str, Any]
    num_classes: int | None = None

    @property
    def op(self) -> Attention:
        """The op, sized for the positions of the model. Raises ValueError as `xformer.attention.build` does."""
        return build(self.attention, self.max_len)

    def make(self, rngs: nnx.Rngs, dtype: Dtype = jnp.float32, param_dtype: Dtype = jnp.float32) -> nnx.Module:
        """The freshly initialised model. Raises ValueError as its constructor does."""
        sizes = {"vocab_size": self.vocab_size, "max_len": self.max_len}
        if self.num_classes is not None:
            sizes["num_classes"] = self.num_classes
        kwargs: dict[str, Any] = {"attention": self.op, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        return MODELS[self.model](**sizes, **self.options, **kwargs)  # type: ignore[call-arg]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
      names: model type in `config.json` -> how the names of its classes begin.
      prefix: how the names of the trunk's tensors begin; files of a trunk alone leave it out.
      models: which of our models there are.
      read: a config and one of `models` -> the architecture.
      entries: an architecture -> every array that a folder has.
      write: an architecture -> what a `config.json` says of it; `read` of that gives the same architecture.
      heads: our models that are classes there, and how the names of these end.
      zero: a pattern of our paths that a folder has nothing for, since there is nothing there: zeros. None: there are
        none.
      released: a config and the attention section that `read` gave -> the section of an op that computes what their
        code does, where that is something else than the paper's; None: it is not.
      equal_as_released_only: whether logits of every folder are theirs with that op alone.
      ignored: patterns of the names of tensors that are constants there.
    """

    names: Mapping[str, str]
    prefix: str
    models: Sequence[str]
    read: Callable[[Keys, str], Architecture]
    entries: Callable[[Architecture], list[Entry]]
    write: Callable[[Architecture], dict[str, Any]]
    heads: Mapping[str, str] = dataclasses.field(default_factory=lambda: HEADS)
    zero: str | None = None
    released: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] | None = None
    equal_as_released_only: bool = False
    ignored: Sequence[str] = ()

    def class_name(self, model_type: str, model: str) -> str | None:
        """The class there that is a model of ours; None where none is."""
        return self.names[model_type] + self.heads[model] if model in self.heads else None


def linear(ours: str, theirs: str, layout: Layout = LINEAR, *, older: str | None = None) -> list[Entry]:
    """A dense layer: its kernel and bias. `older`: another name, where the first is missing."""
    names = lambda part: (f"{theirs}.{part}", *([] if older is None else [f"{older}.{part}"]))
    return [Entry(f"{ours}/kernel", names("weight"), layout), Entry(f"{ours}/bias", names("bias"), VECTOR)]


def norm(ours: str, theirs: str) -> list[Entry]:
    """A layer norm: its scale and bias."""
    return [Entry(f"{ours}/scale", (f"{theirs}.weight",)), Entry(f"{ours}/bias", (f"{theirs}.bias",))]


def has_global_tokens(section: Mapping[str, Any]) -> bool:
    """Whether the op of an attention section tells global tokens apart; of a stack, whether all do.

    Raises ValueError and NotImplementedError as `xformer.attention.build` does.
    """
    return all(op.GLOBAL_TOKENS for op in entries(build(section)))


def has_t5_bias(section: Mapping[str, Any]) -> bool:
    """Whether the op of an attention section has T5's relative bias, which all layers share. Raises as `build` does."""
    return isinstance(getattr(build(section), "position", None), T5Bias)


def num_labels(keys: Keys) -> int:
    """The classes of a classification head: two, where the config does not say."""
    labels = keys.config.get("id2label")
    if labels is not None and not isinstance(labels, Mapping):
        raise WeightsError(f"{keys.path}: id2label must be an object of indices with names, got {labels!r:.80}")
    return len(labels) if isinstance(labels, Mapping) and labels else keys.integer("num_labels", 2)


def theirs(activation: str) -> str:
    """The name there of an activation of ours; ours where there is none."""
    return next((name for name, ours in ACTIVATIONS.items() if ours == activation), activation)
