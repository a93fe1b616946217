"""From one sequence to another: each next token of a target, given its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xformer.tasks import family
from xformer.tasks.family import Metric, Sums
from xformer.tasks.next_tokens import NextTokens
from xformer.tasks.vocab import Vocabulary

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TargetTokens(NextTokens):
    """Softmax over the vocabulary at each token of a target: outputs and targets as those of `NextTokens`.

    `perplexity` is exp of the mean cross entropy of a token, the end of a target being one, and `accuracy` the share
    that is named right. `loss` is what training minimises, in nats a token: with `label_smoothing` the cross entropy of
    targets that are smoothed so (Szegedy et al. 2016, section 7; Vaswani et al. 2017, section 5.4), which is not that
    of `perplexity`. What a model generates is judged elsewhere, see `Task.generated`.
    """

    better: ClassVar[Mapping[str, str]] = MappingProxyType({"perplexity": "min", "loss": "min", "accuracy": "max"})
    guesser: ClassVar[str] = "knows how often each token stands in the training targets, and no more"
    extras: ClassVar[tuple[str, ...]] = ()

    label_smoothing: float = 0.0

    def metrics(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """`loss` and `accuracy` of each row, float32 [batch], means over its targets, weighted by their number; and
        `nats`: [2] sums of the cross entropy and of the targets. Raises ValueError as `NextTokens` does.
        """
        nats, correct, weights = self._by_token(outputs, batch)
        total = weights.sum(axis=1)
        summed = lambda values: jnp.where(weights > 0, weights * values, 0).sum(axis=1)
        mean = lambda values: (summed(values) / jnp.where(total > 0, total, 1), total)
        loss = nats
        if self.label_smoothing:
            loss = nats + self.label_smoothing * _above_mean(outputs, jnp.maximum(batch["targets"], 0), weights)
        return {"loss": mean(loss), "accuracy": mean(correct), "nats": jnp.stack([summed(nats).sum(), total.sum()])}

    def finish(self, sums: Sums) -> dict[str, float]:
        found = family.Family.finish(self, sums)
        nats, count = np.asarray(sums["nats"], np.float64)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a diverging run has no finite perplexity
            return {"perplexity": float(np.exp(nats / count)), **found}

    def records(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Array]:
        """Nothing: what is generated of each example is kept in a file of its own."""
        del outputs, batch
        return {}

    def details(self, records: Mapping[str, np.ndarray], class_names: Sequence[str]) -> dict[str, Any]:
        del records, class_names
        return {}

    def predict(self, outputs: Any) -> Array:
        """Raises ValueError: it has no class for a text."""
        raise ValueError("this model has no class for a text: run.generate(texts, max_tokens=...) gives its target")

    def prompts(self, vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
        """The ids that a model reads of sources."""
        return vocabulary.encode_batch(texts)


def _above_mean(outputs: Any, targets: Array, weights: Array) -> Array:
    """The logits of targets less the mean of all, float32 [batch, length], 0 where nothing is asked."""
    if hasattr(outputs, "above_mean"):
        hidden = jnp.where((weights > 0)[..., None], outputs.hidden, 0)
        return dataclasses.replace(outputs, hidden=hidden).above_mean(targets)
    logits = family.clear(outputs, weights)
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - logits.mean(axis=-1)


def unlabelled(count: int) -> np.ndarray:
    """Labels of examples that have none, bool [count, 0]."""
    return np.zeros((count, 0), bool)
