"""Tasks: a data source, its batches, the loss and the metrics.

A task is a frozen dataclass of its options: `task.prepare()` makes the data once, `task.open()` gives it back ready to
train on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from xformer.checks import did_you_mean
from xformer.tasks.classification import Classification
from xformer.tasks.dataset import Preprocessing, TaskData, load_preprocessing
from xformer.tasks.documents import Documents
from xformer.tasks.family import Family
from xformer.tasks.imdb import Imdb
from xformer.tasks.interface import Task
from xformer.tasks.linux_docs import LinuxDocs
from xformer.tasks.listops import ListOps
from xformer.tasks.location import DataMissing, default_data_dir
from xformer.tasks.multi_label import MultiLabel
from xformer.tasks.regression import Regression
from xformer.tasks.retrieval import Retrieval
from xformer.tasks.sentiment import Sentiment
from xformer.tasks.sizes import Sizes
from xformer.tasks.tagging import Tagging
from xformer.tasks.token_classification import TokenClassification

TASKS: Mapping[str, type[Task]] = MappingProxyType(
    {
        "listops": ListOps,
        "imdb": Imdb,
        "sentiment": Sentiment,
        "linux_docs": LinuxDocs,
        "documents": Documents,
        "retrieval": Retrieval,
        "tagging": Tagging,
    }
)
"""The tasks by the name a config gives them."""


def build(config: Mapping[str, Any]) -> Task:
    """The task of `{"name": ..., **options}`, the options being those of its class.

    Raises ValueError for a name or an option that doesn't exist, or a value that an option doesn't take.
    """
    options = dict(config)
    name = options.pop("name", None)
    if name not in TASKS:
        raise ValueError(f"task.name must be one of {', '.join(TASKS)}, got {name!r}{did_you_mean(name, TASKS)}")
    allowed = [field.name for field in dataclasses.fields(TASKS[name])]
    for key in options:
        if key not in allowed:
            raise ValueError(
                f"task.{key} is no option of {name}; allowed: {', '.join(allowed)}{did_you_mean(key, allowed)}"
            )
    return TASKS[name](**options)


__all__ = [
    "TASKS",
    "Classification",
    "DataMissing",
    "Documents",
    "Family",
    "Imdb",
    "LinuxDocs",
    "ListOps",
    "MultiLabel",
    "Preprocessing",
    "Regression",
    "Retrieval",
    "Sentiment",
    "Sizes",
    "Tagging",
    "Task",
    "TaskData",
    "TokenClassification",
    "build",
    "default_data_dir",
    "load_preprocessing",
]
