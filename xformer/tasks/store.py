"""Prepared data on disk: written once, whole or not at all, and read back by memory map.

A directory `DATA_DIR/NAME/KEY/VERSION` is a TFDS data set in array_record (`tfds.builder_from_directory` reads it) with
four additions: the vocabulary, what is known about the data, the same tokens as flat arrays, which open at once, and
checksums of all files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xformer.tasks import checksums, vocab
from xformer.tasks.location import DataMissing, Progress, data_root
from xformer.tasks.ragged import Ragged

VERSION = "1.0.0"
FACTS = "facts.json"
INCOMPLETE = "incomplete."  # how the names of folders begin that are not whole yet
_VOCABULARY = "vocabulary.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised splits, not truncated, their vocabulary, the names of labels 0, 1, ..., and JSON-able facts.

    Labels that are numbers have no names, but a `center` and a `scale`: a model learns (label - center) / scale.

    Raises ValueError if an integer label is no class; in a sequence of labels, -1 stands for none.
    """

    splits: dict[str, Ragged]
    vocabulary: vocab.Vocabulary
    class_names: list[str]
    facts: dict[str, Any]
    center: float = 0.0
    scale: float | None = None

    def __post_init__(self) -> None:
        for split, examples in self.splits.items():
            if examples.labels.dtype.kind not in "iu":
                continue
            least = 0 if examples.label_offsets is None else -1
            wrong = examples.labels[(examples.labels < least) | (examples.labels >= len(self.class_names))]
            if wrong.size:
                raise ValueError(f"label {wrong[0]} of the {split} split is not in 0..{len(self.class_names) - 1}")

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the texts and of the labels of each split: "train texts", "train labels", ..."""
        return {
            f"{split} {name}": digest
            for split, examples in self.splits.items()
            for name, digest in examples.digests().items()
        }


def directory(data_dir: str | Path | None, name: str, key: str) -> Path:
    """Where the data set lies once it is prepared."""
    return data_root(data_dir) / name / key / VERSION


def write(target: Path, make: Callable[[], Corpus], progress: Progress = None) -> None:
    """Makes and writes a corpus unless `target` (from `directory`) is there.

    Atomic: a directory beside it is filled and then renamed. A second process waits for the first and finds it done;
    where files can't be locked, both work and one result stays. Raises DataMissing if the packages of the `data` extra
    are missing.
    """
    if target.exists():
        return
    if any("\udc80" <= char <= "\udcff" for char in str(target)):
        raise DataMissing(  # array_record takes no other names
            f"{target.parts[-3]}: the data directory {str(target.parents[2])!a} is no UTF-8; choose another with "
            "--data_dir or $XFORMER_DATA"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / ".lock") as alone:
        if target.exists():
            return
        if alone:  # what a process left that was killed
            for left in target.parent.glob(f"{INCOMPLETE}*"):
                shutil.rmtree(left, ignore_errors=True)
        corpus = make()
        scratch = Path(tempfile.mkdtemp(prefix=INCOMPLETE, dir=target.parent))
        try:
            scratch.chmod(target.parent.stat().st_mode)  # mkdtemp's own is for one user only
            filled = _write_array_record(scratch, target, corpus, progress)
            for split, examples in corpus.splits.items():
                examples.save(filled, split)
            corpus.vocabulary.save(filled / _VOCABULARY)
            facts: dict[str, Any] = {
                "class_names": corpus.class_names,
                "splits": list(corpus.splits),
                "facts": corpus.facts,
                "digests": corpus.digests,
            }
            if corpus.scale is not None:
                facts |= {"center": corpus.center, "scale": corpus.scale}
            (filled / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            checksums.write(filled)
            try:
                filled.rename(target)
            except OSError:
                if not target.exists():
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def read(target: Path) -> Corpus:
    """The corpus that `write` left. Raises DataMissing if there is none, or if it is not as it was written."""
    try:
        facts = json.loads((target / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if target.exists():
            raise _damaged(target, f"{FACTS} is missing") from None
        raise DataMissing(
            f"{target.parts[-3]}: no prepared data in {target}; prepare it with the task's prepare()"
        ) from None
    except ValueError as error:
        raise _damaged(target, f"{FACTS}: {error}") from error
    if changed := checksums.differences(target, ".json"):  # the arrays have digests of their own
        raise _damaged(target, ", ".join(changed))
    try:
        splits = {split: Ragged.load(target, split) for split in facts["splits"]}
        numbers = {key: facts[key] for key in ("center", "scale") if key in facts}
        known = {**facts["facts"], "data_version": target.name}
        corpus = Corpus(splits, vocab.load(target / _VOCABULARY), facts["class_names"], known, **numbers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(target, str(error)) from error
    expected = facts.get("digests", corpus.digests)  # data prepared by an older version has none
    if changed := [name for name, digest in corpus.digests.items() if expected.get(name) != digest]:
        raise _damaged(target, f"{', '.join(changed)} changed since")
    return corpus


def check(target: Path) -> None:
    """Reads every file once. Raises DataMissing as `read` does, also for files that only TFDS reads."""
    if (changed := checksums.differences(target)) is None:
        read(target)
    elif changed:
        raise _damaged(target, ", ".join(changed))


def _damaged(target: Path, what: str) -> DataMissing:
    return DataMissing(f"{target.parts[-3]}: the prepared data in {target} is damaged ({what}); delete that folder, "
                       "and it is made again")  # fmt: skip


def token_dtype(vocabulary: vocab.Vocabulary) -> np.dtype:
    """The smallest unsigned dtype that holds every id."""
    return np.min_scalar_type(vocabulary.size - 1)


def _write_array_record(scratch: Path, target: Path, corpus: Corpus, progress: Progress) -> Path:
    try:
        import tensorflow_datasets as tfds

        from xformer.tasks import builders
    except ImportError as error:
        raise DataMissing(f"preparing data needs the data extra (pip install 'xformer-jax[data]'): {error}") from error
    name, key = target.parts[-3:-1]
    first = next(iter(corpus.splits.values()))
    config = builders.TokenConfig(
        name=key,
        class_names=corpus.class_names,
        dtype=token_dtype(corpus.vocabulary),
        make=lambda: corpus.splits,
        labels=builders.label_feature(first, corpus.class_names),
        second=first.tokens2 is not None,
        progress=progress,
    )
    make = builders.builder_class(name, config)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints about downloads that don't happen
            builder = make(config=config, data_dir=scratch, file_format="array_record")
            builder.download_and_prepare()
    except Exception as error:  # array_record reports a full disk as a RuntimeError or ValueError
        line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise OSError(f"{name}: the data can't be written to {target.parent}: {line}") from error
    return Path(builder.data_dir)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Waits until no other process holds the lock. Gives False on a file system without locks."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # the rename decides
            yield False
        else:
            yield True
