"""What is kept of each example of the test split: `test_examples.npz`, for tests between runs and a look at errors."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xformer.train import workdir as folders

FILE = "test_examples.npz"


class Kept:
    """Collects rows of evaluated batches, in whatever order they come."""

    def __init__(self) -> None:
        self._index: list[np.ndarray] = []
        self._metrics: list[Mapping[str, np.ndarray]] = []
        self._records: list[Mapping[str, np.ndarray]] = []

    def add(self, examples: Mapping[str, Any]) -> None:
        """Adds the fetched `examples` of an evaluation step."""
        self._index.append(np.asarray(examples["index"]))
        self._metrics.append(examples["metrics"])
        self._records.append(examples["records"])

    def arrays(self) -> dict[str, np.ndarray]:
        """By metric float32 [2, examples], values and weights; the task's records [examples, ...]; fillers left out."""
        index = np.concatenate(self._index)
        real = index >= 0
        order = np.argsort(index[real], kind="stable")
        join = lambda parts, name: np.concatenate([np.asarray(part[name]) for part in parts])[real][order]
        metrics = {name: join(self._metrics, name).T for name in self._metrics[0]}
        return metrics | {name: join(self._records, name) for name in self._records[0]}


def write(workdir: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the file whole or not at all."""
    content = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez(content, **named)
    folders.write_bytes(workdir / FILE, content.getvalue())
