"""What a trained model generates for a split: the texts beside their references, and what they score."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Scores:
    """What generated texts score.

    Attributes:
      metrics: by name, such as `bleu`.
      details: what else belongs to them, JSON-able, such as the signature of the program that computed them.
    """

    metrics: Mapping[str, float]
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Generated texts of a split, in its order.

    Attributes:
      split: its name.
      sources, references, texts: strings.
      scores: of all of them together.
    """

    split: str
    sources: Sequence[str]
    references: Sequence[str]
    texts: Sequence[str]
    scores: Scores

    @property
    def file(self) -> str:
        """The name of the file in a run's folder that keeps them."""
        return f"{self.split}_outputs.jsonl"

    @property
    def metrics(self) -> Mapping[str, float]:
        """The scores by name."""
        return self.scores.metrics

    @property
    def details(self) -> Mapping[str, Any]:
        """What belongs to the scores, see there."""
        return self.scores.details

    @property
    def content(self) -> str:
        """A line of JSON for each text: `source`, `reference` and `output`."""
        rows = zip(self.sources, self.references, self.texts, strict=True)
        names = ("source", "reference", "output")
        return "".join(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n" for row in rows)
