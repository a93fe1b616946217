"""Classes, labels or numbers of the user's own documents."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, get_args

from xformer.tasks import checks, labels
from xformer.tasks.classification import Classification, ClassWeights
from xformer.tasks.family import Family
from xformer.tasks.origin import Origin
from xformer.tasks.own_files import OwnFiles
from xformer.tasks.text import Source


@dataclasses.dataclass(frozen=True)
class Documents(OwnFiles):
    """Documents with a label from files: `.jsonl` or `.csv` / `.tsv` with two fields, or a folder `LABEL/*.txt`.

    path: the documents to train on. A split without a file of its own is cut from them by a hash of the text, so equal
    texts stay in one split: `validation_share` and `test_share`, of each class where there are classes. White space
    around labels is left out.

    kind: what a label is. "classes": one of them, a string or an int. "labels": any number of them, a list in JSON, or
    one string with `separator` between them. "number": a number. Folders have classes only.

    class_weights: "balanced": in the loss every class counts the same, however few documents it has; for classes.
    """

    name: ClassVar[str] = "documents"

    kind: labels.Kind = "classes"
    separator: str = ";"
    class_weights: ClassWeights = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice(self.name, "kind", self.kind, get_args(labels.Kind))
        checks.choice(self.name, "class_weights", self.class_weights, get_args(ClassWeights))
        if self.class_weights != "none" and self.kind != "classes":
            raise ValueError(f"{self.name}: class_weights must be 'none' for kind={self.kind!r}, got 'balanced'")
        if not (isinstance(self.separator, str) and self.separator):
            raise ValueError(f"{self.name}: separator must be a non-empty string, got {self.separator!r}")

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        return (Origin("your own documents", "yours", "as many as you have", given={"path": "FILE"}),)

    @property
    def family(self) -> Family:
        return Classification(self.class_weights) if self.kind == "classes" else self._labels().family

    def _labels(self) -> labels.Labels:
        return labels.make(self.kind, self.separator)

    @property
    def _options(self) -> list[str]:
        if self.kind == "classes":
            return []
        return [self.kind, self.separator] if self.kind == "labels" else [self.kind]

    def _source(self, data_dir: str | Path | None) -> Source:
        for path in self._paths.values():
            if self.kind != "classes" and path.is_dir():
                raise ValueError(
                    f"kind: got {self.kind!r}, takes 'classes' for a folder LABEL/*.txt, which {path} is; .jsonl, .csv "
                    "and .tsv take every kind"
                )
        return super()._source(data_dir)
