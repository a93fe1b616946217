"""A TFDS builder that writes tokenised splits as array_record, without TensorFlow. Imported only to prepare data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from xformer.tasks import chunks
from xformer.tasks.location import Progress
from xformer.tasks.ragged import Ragged


@dataclasses.dataclass(kw_only=True)
class TokenConfig(tfds.core.BuilderConfig):
    """A data set under a name: its classes, the dtype of its ids, and the function that makes its splits.

    labels: the feature that holds an example's label, None for one class. second: each example has two documents.
    progress: gets a line every few seconds.
    """

    class_names: list[str]
    dtype: np.dtype
    make: Callable[[], dict[str, Ragged]]
    labels: Any = None
    second: bool = False
    progress: Progress = None


class TokenBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Examples of `tokens` (and `tokens2`), ids from 1 of any number, and `label`; in the order they are made in."""

    name = "tokens"
    VERSION = tfds.core.Version("1.0.0")
    builder_config: TokenConfig

    def _info(self) -> tfds.core.DatasetInfo:
        config = self.builder_config
        # Bytes: writing a Sequence of int32 is fifty times slower, reading it ten times.
        ids = lambda: tfds.features.Tensor(shape=(None,), dtype=config.dtype, encoding="bytes")
        label = tfds.features.ClassLabel(names=config.class_names) if config.labels is None else config.labels
        return tfds.core.DatasetInfo(
            builder=self,
            description=config.description or "Tokenised examples with a label.",
            features=tfds.features.FeaturesDict(
                {"tokens": ids(), **({"tokens2": ids()} if config.second else {}), "label": label}
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        return {split: self._generate_examples(examples) for split, examples in self.builder_config.make().items()}

    def _generate_examples(self, examples: Ragged) -> Iterator[tuple[int, dict[str, Any]]]:
        say = chunks.every_few_seconds(self.builder_config.progress, f"{self.name}: COUNT of {len(examples):,} written")
        for index in range(len(examples)):
            say(index)
            example = {"tokens": examples[index], "label": _label(examples, index)}
            if examples.tokens2 is not None and examples.offsets2 is not None:
                example["tokens2"] = examples.tokens2[examples.offsets2[index] : examples.offsets2[index + 1]]
            yield index, example


def label_feature(examples: Ragged, class_names: list[str]) -> Any:
    """The TFDS feature that holds a label of these examples: a class, an array of fixed shape, or a sequence."""
    labels = examples.labels
    if examples.label_offsets is not None:
        return tfds.features.Tensor(shape=(None,), dtype=labels.dtype, encoding="bytes")
    if labels.dtype.kind in "iu" and labels.ndim == 1:
        return tfds.features.ClassLabel(names=class_names)
    return tfds.features.Tensor(shape=labels.shape[1:], dtype=labels.dtype)


def _label(examples: Ragged, index: int) -> Any:
    label = examples.label(index)
    return int(label) if label.dtype.kind in "iu" and label.ndim == 0 else label


def builder_class(name: str, config: TokenConfig) -> type[TokenBuilder]:
    """The builder of the data set `name`, which any task may choose, with this one configuration."""
    # A configuration that the class doesn't list makes TFDS warn.
    members = {"name": name, "BUILDER_CONFIGS": [config], "__module__": __name__}
    return type("TokenBuilder", (TokenBuilder,), members, skip_registration=True)
