"""The token at each of some hidden places of a text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import family
from xformer.tasks.classification import class_targets, cross_entropy
from xformer.tasks.family import Family, Metric, Sums
from xformer.tasks.token_classification import NO_LABEL

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class MaskedTokens(Family):
    """Softmax over the vocabulary at hidden places: outputs float [batch, places, vocabulary], targets int32 [batch,
    places], `NO_LABEL` where an example has fewer places.

    `loss` is in nats a hidden token, `accuracy` the share that is named right, `perplexity` exp(loss). With the tokens
    and the characters of the texts as they are read, cut at `max_len`,

      bits_per_character = loss / ln 2 x tokens / characters

    is the bits that all their characters would take if every token were as hard to tell as a hidden one. So it compares
    models with different vocabularies, and no model by another share of hidden tokens.

    A batch has `characters`, float32 [batch]: those of each text; `inputs` says how many tokens it has.
    """

    better: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"bits_per_character": "min", "loss": "min", "accuracy": "max", "perplexity": "min"}
    )
    guesser: ClassVar[str] = "knows how often each token stands in the training split, and no more"
    extras: ClassVar[tuple[str, ...]] = ("characters",)

    def targets(self, batch_size: int, length: int, num_outputs: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, length), jnp.int32)

    def metrics(self, outputs: Array, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """`loss` and `accuracy` of each example: float32 [batch], means over its hidden places, weighted by their
        number; and `read`: [2] sums of the tokens and characters read.

        Raises:
          ValueError: targets that are no integers or don't match outputs, and outside of jit one that is no token.
        """
        targets, num_tokens = batch["targets"], outputs.shape[-1]
        if targets.shape != outputs.shape[:-1]:
            raise ValueError(f"targets must be [batch, places] as outputs {outputs.shape}, got {targets.shape}")
        weights = jnp.where(targets == NO_LABEL, 0, family.spread(batch["weights"], targets))
        targets, wrong = class_targets(targets, num_tokens, weights > 0)
        loss, correct = cross_entropy(family.clear(outputs, weights), targets)
        loss, correct = (jnp.where(wrong, jnp.nan, values) for values in (loss, correct))
        total = weights.sum(axis=1)
        mean = lambda values: ((weights * values).sum(axis=1) / jnp.where(total > 0, total, 1), total)
        read = jnp.stack([(batch["inputs"] > 0).sum(axis=1).astype(jnp.float32), batch["characters"]])
        return {"loss": mean(loss), "accuracy": mean(correct), "read": (read * batch["weights"]).sum(axis=1)}

    def finish(self, sums: Sums) -> dict[str, float]:
        found = super().finish(sums)
        tokens, characters = np.asarray(sums["read"], np.float64)
        with np.errstate(over="ignore"):  # a diverging run has no finite perplexity
            perplexity = float(np.exp(found["loss"]))
        bits = found["loss"] / math.log(2) * tokens / characters if characters else math.nan
        return {"bits_per_character": float(bits), **found, "perplexity": perplexity}

    def spell(self, label: Any, class_names: Sequence[str]) -> str:
        """Texts have no label of their own."""
        del label, class_names
        return "no label"

    def predict(self, outputs: Array) -> Array:
        """Raises ValueError: it is no model for users' questions."""
        raise ValueError(
            "a masked language model has no prediction for a text: fine-tune it (train.init_from), or call run.model "
            "on inputs with hidden places"
        )

    def guess(self, labels: np.ndarray, num_outputs: int, center: float = 0.0, scale: float = 1.0) -> np.ndarray:
        del center, scale
        return family.log_shares(np.bincount(labels, minlength=num_outputs))
