"""The next token at every place of a text."""

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
from xformer.tasks.packing import EDGE
from xformer.tasks.token_classification import NO_LABEL
from xformer.tasks.vocab import Vocabulary

Array = jax.Array
FIRST_CONTEXT = 16  # tokens: the shortest contexts that a result tells apart


@dataclasses.dataclass(frozen=True)
class NextTokens(Family):
    """Softmax over the vocabulary at each token: outputs [batch, length, vocabulary], `xformer.nn.Logits` or a float
    array; targets int32 [batch, length], `NO_LABEL` where nothing is asked.

    `loss` is in nats a token, the end of a document being one, `accuracy` the share that is named right, `perplexity`
    exp(loss). With the bytes of the text that the tokens spell (UTF-8),

      bits_per_byte = loss / ln 2 x tokens / bytes

    which compares models with different vocabularies. A batch has `bytes`, float32 [batch]: those that its targets
    spell; and `segment_ids`, int32 [batch, length], 0 at padding.
    """

    better: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"bits_per_byte": "min", "loss": "min", "accuracy": "max", "perplexity": "min"}
    )
    guesser: ClassVar[str] = "knows how often each token stands in the training split, and no more"
    extras: ClassVar[tuple[str, ...]] = ("bytes",)
    end_id: ClassVar[int] = EDGE

    def targets(self, batch_size: int, length: int, num_outputs: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, length), jnp.int32)

    def metrics(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Metric]:
        """`loss` and `accuracy` of each row: float32 [batch], means over its targets, weighted by their number; and
        `spelt`: [2] sums of the tokens asked and of their bytes.

        A target that is no token makes the row's loss NaN where it can't be refused.

        Raises:
          ValueError: targets that are no integers or don't match outputs, and outside of jit one that is no token.
        """
        loss, correct, weights = self._by_token(outputs, batch)
        total = weights.sum(axis=1)
        mean = lambda values: (jnp.where(weights > 0, weights * values, 0).sum(axis=1) / _divisor(total), total)
        spelt = jnp.stack([total.sum(), (batch["bytes"] * (batch["weights"] > 0)).sum()])
        return {"loss": mean(loss), "accuracy": mean(correct), "spelt": spelt}

    def _by_token(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[Array, Array, Array]:
        """Loss, whether it is named right, and weight of each place, float32 [batch, length]."""
        targets = batch["targets"]
        in_parts = hasattr(outputs, "scores")
        vectors, num_tokens = (outputs.hidden, outputs.vocab_size) if in_parts else (outputs, outputs.shape[-1])
        if targets.shape != vectors.shape[:2] or vectors.ndim != 3:
            raise ValueError(f"targets must be [batch, length] as outputs {vectors.shape}, got {targets.shape}")
        weights = jnp.where(targets == NO_LABEL, 0, family.spread(batch["weights"], targets))
        targets, wrong = class_targets(targets, num_tokens, weights > 0)
        if in_parts:
            hidden = jnp.where((weights > 0)[..., None], vectors, 0)  # what is not finite there adds nothing
            loss, best = dataclasses.replace(outputs, hidden=hidden).scores(targets)
            correct = (best == targets).astype(jnp.float32)
        else:
            loss, correct = cross_entropy(family.clear(outputs, weights), targets)
        return jnp.where(wrong, jnp.nan, loss), jnp.where(wrong, jnp.nan, correct), weights

    def finish(self, sums: Sums) -> dict[str, float]:
        found = super().finish(sums)
        tokens, count = np.asarray(sums["spelt"], np.float64)
        with np.errstate(over="ignore"):  # a diverging run has no finite perplexity
            perplexity = float(np.exp(found["loss"]))
        return {"bits_per_byte": bits_per_byte(found["loss"] * tokens, count), **found, "perplexity": perplexity}

    def records(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Array]:
        """Of each row `context_nats` and `context_tokens`, float32 [batch, contexts]: sums of the loss and numbers of
        targets by how many tokens of their document the model has seen: up to 16, 32, 64, ...
        """
        loss, _, weights = self._by_token(outputs, batch)
        segments, length = batch["segment_ids"], batch["targets"].shape[1]
        place = jnp.arange(length)
        starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
        seen = place - jax.lax.cummax(jnp.where(starts, place, 0), axis=1) + 1
        bounds = jnp.asarray(_bounds(length))
        member = jax.nn.one_hot(jnp.searchsorted(bounds, seen), len(bounds)) * (weights > 0)[..., None]
        nats = jnp.einsum("btc,bt->bc", member, jnp.where(weights > 0, loss, 0))
        return {"context_nats": nats, "context_tokens": member.sum(axis=1)}

    def details(self, records: Mapping[str, np.ndarray], class_names: Sequence[str]) -> dict[str, Any]:
        """`by_context`: the loss in nats and the number of tokens by how many tokens the model has seen before."""
        del class_names
        nats, tokens = (np.asarray(records[name], np.float64) for name in ("context_nats", "context_tokens"))
        bounds = [FIRST_CONTEXT * 2**index for index in range(tokens.shape[1])]
        found = {}
        for bound, total, count in zip(bounds, nats.sum(axis=0), tokens.sum(axis=0), strict=True):
            if count:
                found[f"up to {bound}"] = {"loss": round(float(total / count), 6), "tokens": int(count)}
        return {"by_context": found}

    def spell(self, label: Any, class_names: Sequence[str]) -> str:
        """Texts have no label of their own."""
        del label, class_names
        return "no label"

    def predict(self, outputs: Any) -> Array:
        """Raises ValueError: it has no prediction for a text."""
        raise ValueError("a language model has no class for a text: run.generate(texts, max_tokens=...) continues it")

    def prompts(self, vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
        """The ids that a model reads of the beginnings of documents."""
        return [[EDGE, *ids] for ids in vocabulary.encode_batch(texts)]

    def guess(self, labels: np.ndarray, num_outputs: int, center: float = 0.0, scale: float = 1.0) -> np.ndarray:
        del center, scale
        return family.log_shares(np.bincount(labels, minlength=num_outputs))


def bits_per_byte(nats: float, count: float) -> float:
    """The bits of so many nats for each of `count` bytes; NaN where there is none."""
    return nats / math.log(2) / count if count else math.nan


def _bounds(length: int) -> np.ndarray:
    """The longest contexts that are counted together, each twice the one before: 16, 32, ... to `length` or more."""
    number = max(math.ceil(math.log2(max(length, 1) / FIRST_CONTEXT)), 0) + 1
    return FIRST_CONTEXT * 2 ** np.arange(number)


def _divisor(total: Array) -> Array:
    return jnp.where(total > 0, total, 1)
