"""What tasks on the user's own files share: where the files are, their splits, and what is read from them."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from xformer.tasks import checks, reading
from xformer.tasks.labels import Labels
from xformer.tasks.reading import Document
from xformer.tasks.splits import hash_split, normal
from xformer.tasks.text import Source, Texts, TextTask, digest

logger = logging.getLogger(__name__)

_READING = "2"  # what the same files are read as; another number where that changes, so that they are read anew


@dataclasses.dataclass(frozen=True)
class OwnFiles(TextTask):
    """Labelled texts from files; what the fields mean is said at `Documents`."""

    name: ClassVar[str]
    may_be_empty: ClassVar[tuple[str, ...]] = ()  # keys that may be "" where a task needs no file

    path: str = ""
    validation_path: str | None = None
    test_path: str | None = None
    validation_share: float = 0.1
    test_share: float = 0.1
    text_field: str = "text"
    label_field: str = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("path", "validation_path", "test_path", "text_field", "label_field"):
            value = getattr(self, key)
            optional = value is None and key in ("validation_path", "test_path")
            if not (isinstance(value, str) and (value or key in self.may_be_empty)) and not optional:
                raise ValueError(f"{self.name}: {key} must be a non-empty string, got {value!r}")
        checks.shares(self.name, validation_share=self.validation_share, test_share=self.test_share)

    @abc.abstractmethod
    def _labels(self) -> Labels:
        """The reader of labels, which has read nothing yet."""

    @property
    def _second_field(self) -> str | None:
        """The field of the second text, where examples have two."""
        return None

    @property
    def _options(self) -> list[str]:
        """What else decides how the files are read; empty for what the first version could read."""
        return []

    @property
    def _paths(self) -> dict[str, Path]:
        paths = {"train": self.path, "validation": self.validation_path, "test": self.test_path}
        return {split: Path(path).expanduser() for split, path in paths.items() if path}

    def _source(self, data_dir: str | Path | None) -> Source:
        shares = str((self.validation_share, self.test_share))
        parts: list[bytes | str] = [_READING, self.text_field, self.label_field, shares, *self._options]
        for split, path in self._paths.items():
            for file in reading.files(path):
                name = file.relative_to(path).as_posix() if path.is_dir() else path.suffix
                parts += [split, name, file.read_bytes()]
        return Source(", ".join(str(path) for path in self._paths.values()), digest(*parts), self._read)

    def _read(self) -> Texts:
        labels = self._labels()
        read = lambda path: reading.read(path, self.text_field, self.label_field, self._second_field, labels.parse)
        for path in self._paths.values():
            if others := reading.left_out(path):
                logger.warning(
                    "%s: %d files in %s are not LABEL/*.txt and are left out, first %s",
                    self.name, len(others), path, others[0],
                )  # fmt: skip
        found = {split: read(path) for split, path in self._paths.items()}
        labels.fit(self.path, found["train"])
        facts: dict[str, Any] = {}
        train_texts = {_whole_text(document) for document in found["train"]}
        for split in found.keys() - {"train"}:
            for document in found[split]:
                labels.check(document)
            facts[f"{split}_texts_in_train"] = sum(_whole_text(document) in train_texts for document in found[split])

        if several := _texts_with_several_labels(found.values()):
            facts["texts_with_several_labels"] = several
            logger.warning("%s: %d texts stand there more than once, with different labels", self.name, several)

        shares = {"validation": self.validation_share, "test": self.test_share}
        documents = found["train"]
        strata = [labels.stratum(document.label) for document in documents]
        texts = [document.text if document.second is None else _whole_text(document) for document in documents]
        indices = hash_split(texts, strata, {split: share for split, share in shares.items() if split not in found})
        found |= {split: [documents[index] for index in chosen] for split, chosen in indices.items()}
        for split in ("train", *shares):
            if not found[split]:
                raise ValueError(f"{len(documents)} documents in {self.path} are too few to cut off {split}")
        labels.measure([document.label for document in found["train"]])
        splits = {
            split: ([document.text for document in found[split]], labels.encode([d.label for d in found[split]]))
            for split in ("train", *shares)
        }
        second = {split: _second(found[split]) for split in splits} if self._second_field is not None else None
        return Texts(splits, labels.class_names, facts, second, labels.center, labels.scale)


def _texts_with_several_labels(splits: Iterable[Sequence[Document]]) -> int:
    labels: dict[str, set[Any]] = {}
    for document in itertools.chain.from_iterable(splits):
        labels.setdefault(_whole_text(document), set()).add(document.label)
    return sum(len(given) > 1 for given in labels.values())


def _whole_text(document: Document) -> str:
    """What copies of a document, or of a pair, have in common."""
    return normal(document.text) if document.second is None else f"{normal(document.text)}\n{normal(document.second)}"


def _second(documents: Sequence[Document]) -> list[str]:
    return [document.second or "" for document in documents]
