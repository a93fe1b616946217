"""Classification of the user's own documents."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, ClassVar

from xformer.tasks import checks, reading
from xformer.tasks.splits import hash_split, normal
from xformer.tasks.text import Source, Texts, TextTask, digest

logger = logging.getLogger(__name__)

_READING = "2"  # what the same files are read as; another number where that changes, so that they are read anew


@dataclasses.dataclass(frozen=True)
class Documents(TextTask):
    """Documents with a label from files: `.jsonl` or `.csv` / `.tsv` with two fields, or a folder `LABEL/*.txt`.

    path: the documents to train on. A split without a file of its own is cut from them by a hash of the text, so equal
    texts stay in one split: `validation_share` and `test_share` of each class. Labels are strings or ints, white space
    around them left out; class 0 is the first in order (of number if all are whole numbers, else of characters).
    """

    name: ClassVar[str] = "documents"

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
            optional = key in ("validation_path", "test_path")
            if not (isinstance(value, str) and value) and not (optional and value is None):
                raise ValueError(f"documents: {key} must be a non-empty string, got {value!r}")
        checks.shares("documents", validation_share=self.validation_share, test_share=self.test_share)

    @property
    def _paths(self) -> dict[str, Path]:
        paths = {"train": self.path, "validation": self.validation_path, "test": self.test_path}
        return {split: Path(path).expanduser() for split, path in paths.items() if path}

    def _source(self, data_dir: str | Path | None) -> Source:
        parts: list[bytes | str] = [
            _READING,
            self.text_field,
            self.label_field,
            str((self.validation_share, self.test_share)),
        ]
        for split, path in self._paths.items():
            for file in reading.files(path):
                name = file.relative_to(path).as_posix() if path.is_dir() else path.suffix
                parts += [split, name, file.read_bytes()]
        return Source(", ".join(str(path) for path in self._paths.values()), digest(*parts), self._read)

    def _read(self) -> Texts:
        for path in self._paths.values():
            if others := reading.left_out(path):
                logger.warning(
                    "documents: %d files in %s are not LABEL/*.txt and are left out, first %s",
                    len(others), path, others[0],
                )  # fmt: skip
        found = {split: reading.read(path, self.text_field, self.label_field) for split, path in self._paths.items()}
        class_names = _ordered({label for _, _, label in found["train"]})
        if len(class_names) < 2:
            raise ValueError(f"documents: {self.path} has one class only, {class_names[0]!r}; two or more are needed")
        facts: dict[str, Any] = {}
        train_texts = {normal(text) for _, text, _ in found["train"]}
        for split in found.keys() - {"train"}:
            for place, _, label in found[split]:
                if label not in class_names:
                    known = ", ".join(class_names[:20])
                    raise ValueError(f"documents: {place}: label {label!r} is not in the training documents ({known})")
            facts[f"{split}_texts_in_train"] = sum(normal(text) in train_texts for _, text, _ in found[split])

        shares = {"validation": self.validation_share, "test": self.test_share}
        to_cut = {split: share for split, share in shares.items() if split not in found}
        documents = found["train"]
        indices = hash_split([text for _, text, _ in documents], [label for _, _, label in documents], to_cut)
        found |= {split: [documents[index] for index in chosen] for split, chosen in indices.items()}
        for split in ("train", *shares):
            if not found[split]:
                raise ValueError(f"documents: {len(documents)} documents in {self.path} are too few to cut off {split}")
        number = {label: index for index, label in enumerate(class_names)}
        splits = {
            split: ([text for _, text, _ in found[split]], [number[label] for _, _, label in found[split]])
            for split in ("train", *shares)
        }
        return Texts(splits, class_names, facts)


def _ordered(labels: set[str]) -> list[str]:
    """Whole numbers by value, anything else by character."""
    try:
        return sorted(labels, key=lambda label: (int(label), label))
    except ValueError:
        return sorted(labels)
