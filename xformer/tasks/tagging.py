"""Token classification, generated: which operator does each token of a ListOps expression belong to?"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from xformer.tasks import baseline
from xformer.tasks.dataset import TaskData
from xformer.tasks.family import Family
from xformer.tasks.listops import ListOps, PresetName
from xformer.tasks.listops_trees import SYMBOLS
from xformer.tasks.location import Progress
from xformer.tasks.ragged import Ragged
from xformer.tasks.token_classification import NO_LABEL, TokenClassification

CLASS_NAMES = ["MIN", "MAX", "MED", "SM"]
_FIRST_OPERATOR, _CLOSE = (SYMBOLS.index(symbol) + 1 for symbol in ("[MIN", "]"))  # ids


@dataclasses.dataclass(frozen=True)
class Tagging(ListOps):
    """The expressions of ListOps, each token with the operator whose list it stands in: the innermost open bracket.

    A digit and an opening bracket belong to the operator around them, a closing bracket to the one that it closes, and
    the first token to none: it has no label. Which bracket is open depends on all the tokens before, so no model that
    sees a token alone, or a bag of tokens, can tell. Options and expressions are those of `ListOps`.
    """

    name: ClassVar[str] = "tagging"

    preset: PresetName = "listops_128"

    @property
    def family(self) -> Family:
        return TokenClassification()

    @property
    def class_names(self) -> list[str]:
        return CLASS_NAMES

    def generate(self, *, num_workers: int | None = None, progress: Progress = None) -> dict[str, Ragged]:
        expressions = super().generate(num_workers=num_workers, progress=progress)
        return {split: tagged(examples) for split, examples in expressions.items()}

    def baseline(self, data: TaskData) -> dict[str, Any]:
        return baseline.scores(self, data)


def tagged(examples: Ragged) -> Ragged:
    """The expressions with a label for each token in place of their value."""
    labels = np.full(examples.tokens.size, NO_LABEL, np.int32)
    open_operators: list[int] = []
    # Expressions are whole, so no bracket is open where the next one begins.
    for index, token in enumerate(examples.tokens.tolist()):
        if open_operators:
            labels[index] = open_operators[-1]
        if token == _CLOSE:
            open_operators.pop()
        elif token >= _FIRST_OPERATOR:
            open_operators.append(token - _FIRST_OPERATOR)
    return dataclasses.replace(examples, labels=labels, label_offsets=examples.offsets)
