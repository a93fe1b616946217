"""What tasks from one text to another share that read packages or the user's own files of sources and targets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from xformer.tasks import checks, parallel_files
from xformer.tasks.sequence_to_sequence import SequenceToSequence
from xformer.tasks.text import Source

FILES = "files"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelTexts(SequenceToSequence):
    """Pairs of a source and a target, from a data set that has a name or from the user's own files.

    source: a name in `SOURCES`, of which "files" are the user's own; None: "files" with a `path`, else the first.

    path: of "files" a table, `.tsv`, `.csv` or `.jsonl`, with a `source_field` and a `target_field`; or, with a
    `target_path`, a file of sources, whose targets are the lines of that. Else the folder of the data set; "": the
    folder of the task's name in the data directory.

    validation_path, test_path, validation_target_path, test_target_path: own files of those splits likewise, which are
    read as they are. A split without is cut off `path`, `validation_share` and `test_share` of its pairs by a hash,
    those that share a text together.

    keep_copies: pairs whose target is nearly their source are kept, not left out: where a text is often right as it is,
    as in spelling or simplification. Their number is in the data's info, `copies_kept`.
    """

    SOURCES: ClassVar[tuple[str, ...]]
    RATIO: ClassVar[float | None] = None
    """Pairs of own files of which one side is so many times as long as the other are left out; None: none."""

    source: str | None = None
    path: str = ""
    target_path: str | None = None
    validation_path: str | None = None
    validation_target_path: str | None = None
    test_path: str | None = None
    test_target_path: str | None = None
    source_field: str = "source"
    target_field: str = "target"
    validation_share: float = 0.05
    test_share: float = 0.05
    keep_copies: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is not None:
            checks.choice(self.name, "source", self.source, self.SOURCES)
        checks.shares(self.name, validation_share=self.validation_share, test_share=self.test_share)
        if not isinstance(self.keep_copies, bool):
            raise ValueError(f"{self.name}: keep_copies must be True or False, got {self.keep_copies!r}")
        for key in ("source_field", "target_field"):
            if not isinstance(getattr(self, key), str) or not getattr(self, key):
                raise ValueError(f"{self.name}: {key} must be a non-empty string, got {getattr(self, key)!r}")
        own = ("target_path", "validation_path", "validation_target_path", "test_path", "test_target_path")
        for key in own:
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{self.name}: {key} must be a non-empty string, or None, got {value!r}")
            if value is not None and self.chosen != FILES:
                raise ValueError(f"{self.name}: {key} is for one's own files, got {value!r}")
        if not isinstance(self.path, str):
            raise ValueError(f"{self.name}: path must be a string, got {self.path!r}")
        if self.chosen == FILES and not self.path:
            raise ValueError(f"{self.name}: source='files' needs a path, got ''")
        for split in ("validation", "test"):
            if getattr(self, f"{split}_target_path") is not None and getattr(self, f"{split}_path") is None:
                raise ValueError(f"{self.name}: {split}_target_path must be None where there is no {split}_path")

    @property
    def chosen(self) -> str:
        """The source, by its name."""
        return self.source or (FILES if self.path else self.SOURCES[0])

    @property
    def shares(self) -> dict[str, float]:
        """Of the splits that are cut off."""
        return {"validation": self.validation_share, "test": self.test_share}

    def _files(self) -> Source:
        """The user's own files. Raises ValueError as `parallel_files.source` does."""
        named = {
            "train": (self.path, self.target_path),
            "validation": (self.validation_path, self.validation_target_path),
            "test": (self.test_path, self.test_target_path),
        }
        expand = lambda path: None if path is None else Path(path).expanduser()
        files = {
            split: parallel_files.Files(Path(path).expanduser(), expand(target))
            for split, (path, target) in named.items()
            if path
        }
        fields = self.source_field, self.target_field
        return parallel_files.source(files, fields, self.shares, self.RATIO, self.keep_copies)
