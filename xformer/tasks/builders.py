"""TFDS builders that write tokenised splits as array_record, without TensorFlow. Imported only to prepare data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from xformer.tasks import listops
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


def listops_config(name: str, task: listops.ListOps) -> TokenConfig:
    """The configuration that makes the splits of a ListOps task."""
    return TokenConfig(
        name=name,
        description=f"ListOps (Nangia & Bowman 2018), {task}",
        class_names=list("0123456789"),
        dtype=np.dtype(np.uint8),
        make=task.generate,
    )


class ListOpsBuilder(TokenBuilder, skip_registration=True):  # type: ignore[call-arg]
    """ListOps with the distribution of Long Range Arena, by preset: `ListOpsBuilder(config="listops_2k")`."""

    name = "listops"
    BUILDER_CONFIGS = [listops_config(preset, listops.ListOps(preset)) for preset in listops.PRESETS]  # noqa: RUF012


class ImdbBuilder(TokenBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Tokenised reviews."""

    name = "imdb"


class DocumentsBuilder(TokenBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Tokenised documents of the user's own."""

    name = "documents"


BUILDERS = {builder.name: builder for builder in (ListOpsBuilder, ImdbBuilder, DocumentsBuilder)}
