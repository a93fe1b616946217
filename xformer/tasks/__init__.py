"""Tasks: a data source, its batches, the loss and the metrics.

A task is a frozen dataclass of its options: `task.prepare()` makes the data once, `task.open()` gives it back ready to
train on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xformer.checks import did_you_mean
from xformer.lookup import Table
from xformer.tasks.chorales import Chorales, NextPitches
from xformer.tasks.classification import Classification
from xformer.tasks.dataset import Preprocessing, TaskData, load_preprocessing
from xformer.tasks.documents import Documents
from xformer.tasks.family import Family
from xformer.tasks.image import Image
from xformer.tasks.images import ImageClasses
from xformer.tasks.imdb import Imdb
from xformer.tasks.interface import Task
from xformer.tasks.language_model import LanguageModel
from xformer.tasks.linux_docs import LinuxDocs
from xformer.tasks.listops import ListOps
from xformer.tasks.location import DataMissing, data_root, default_data_dir
from xformer.tasks.masked_lm import MaskedLM
from xformer.tasks.masked_tokens import MaskedTokens
from xformer.tasks.metric import Judged, Metric
from xformer.tasks.multi_label import MultiLabel
from xformer.tasks.needle import Needle, Order
from xformer.tasks.next_tokens import NextTokens
from xformer.tasks.origin import Origin
from xformer.tasks.outputs import Outputs, Scores
from xformer.tasks.pathfinder import Pathfinder
from xformer.tasks.recall import Recall
from xformer.tasks.regression import Regression
from xformer.tasks.retrieval import Retrieval
from xformer.tasks.sentiment import Sentiment
from xformer.tasks.sequence_to_sequence import SequenceToSequence
from xformer.tasks.sizes import Sizes
from xformer.tasks.summarization import Summarization
from xformer.tasks.tagging import Tagging
from xformer.tasks.target_tokens import TargetTokens
from xformer.tasks.token_classification import TokenClassification
from xformer.tasks.translation import Translation
from xformer.tasks.treebank import Treebank

TASKS: Table[type[Task]] = Table(
    {
        "listops": ListOps,
        "imdb": Imdb,
        "sentiment": Sentiment,
        "linux_docs": LinuxDocs,
        "documents": Documents,
        "retrieval": Retrieval,
        "tagging": Tagging,
        "treebank": Treebank,
        "needle": Needle,
        "order": Order,
        "recall": Recall,
        "pathfinder": Pathfinder,
        "image": Image,
        "images": ImageClasses,
        "masked_lm": MaskedLM,
        "language_model": LanguageModel,
        "chorales": Chorales,
        "translation": Translation,
        "summarization": Summarization,
    },
    kind=Task,
)
"""The tasks by the name a config gives them."""


def build(config: Mapping[str, Any], path: str = "task") -> Task:
    """The task of `{"name": ..., **options}`, the options being those of its class.

    A name is one of `TASKS` or `"package.module:Class"`. An option that is a mapping with a name is another task, such
    as the `source` of `masked_lm`; `path` is what messages call this one.

    Raises ValueError for a name or an option that doesn't exist, or a value that an option doesn't take.
    """
    options = dict(config)
    name = options.pop("name", None)
    task = TASKS.find(f"{path}.name", name)
    allowed = [field.name for field in dataclasses.fields(task) if field.init]
    for key in options:
        if key not in allowed:
            raise ValueError(
                f"{path}.{key} is no option of {name}; allowed: {', '.join(allowed)}{did_you_mean(key, allowed)}"
            )
        if isinstance(options[key], Mapping) and "name" in options[key]:
            options[key] = build(options[key], f"{path}.{key}")
    return task(**options)


__all__ = [
    "TASKS",
    "Chorales",
    "Classification",
    "DataMissing",
    "Documents",
    "Family",
    "Image",
    "ImageClasses",
    "Imdb",
    "Judged",
    "LanguageModel",
    "LinuxDocs",
    "ListOps",
    "MaskedLM",
    "MaskedTokens",
    "Metric",
    "MultiLabel",
    "Needle",
    "NextPitches",
    "NextTokens",
    "Order",
    "Origin",
    "Outputs",
    "Pathfinder",
    "Preprocessing",
    "Recall",
    "Regression",
    "Retrieval",
    "Scores",
    "Sentiment",
    "SequenceToSequence",
    "Sizes",
    "Summarization",
    "Tagging",
    "TargetTokens",
    "Task",
    "TaskData",
    "TokenClassification",
    "Translation",
    "Treebank",
    "build",
    "data_root",
    "default_data_dir",
    "load_preprocessing",
]
