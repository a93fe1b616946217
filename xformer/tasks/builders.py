"""A TFDS builder that writes tokenised splits as array_record, without TensorFlow. Imported only to prepare data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from xformer.tasks.ragged import Ragged


@dataclasses.dataclass(kw_only=True)
class TokenConfig(tfds.core.BuilderConfig):
    """A data set under a name: its classes, the dtype of its ids, and the function that makes its splits."""

    class_names: list[str]
    dtype: np.dtype
    make: Callable[[], dict[str, Ragged]]


class TokenBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Examples of `tokens`, ids from 1 of any number, and `label`; kept in the order in which they are made."""

    name = "tokens"
    VERSION = tfds.core.Version("1.0.0")
    builder_config: TokenConfig

    def _info(self) -> tfds.core.DatasetInfo:
        config = self.builder_config
        return tfds.core.DatasetInfo(
            builder=self,
            description=config.description or "Tokenised examples with a label.",
            features=tfds.features.FeaturesDict(
                {
                    # Bytes: writing a Sequence of int32 is fifty times slower, reading it ten times.
                    "tokens": tfds.features.Tensor(shape=(None,), dtype=config.dtype, encoding="bytes"),
                    "label": tfds.features.ClassLabel(names=config.class_names),
                }
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        return {split: self._generate_examples(examples) for split, examples in self.builder_config.make().items()}

    def _generate_examples(self, examples: Ragged) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in range(len(examples)):
            yield index, {"tokens": examples[index], "label": int(examples.labels[index])}


def builder_class(name: str, config: TokenConfig) -> type[TokenBuilder]:
    """The builder of the data set `name`, which any task may choose, with this one configuration."""
    # A configuration that the class doesn't list makes TFDS warn.
    members = {"name": name, "BUILDER_CONFIGS": [config], "__module__": __name__}
    return type("TokenBuilder", (TokenBuilder,), members, skip_registration=True)
