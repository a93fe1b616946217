"""The arrays of our model out of a folder, one at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from xformer.attention import entries
from xformer.tree_paths import BLOCKS, Blocks
from xformer.weights.errors import WeightsError
from xformer.weights.family import Architecture, Family
from xformer.weights.folder import Folder
from xformer.weights.layout import Entry, Shape

TRUNK = r"(embed|positions|token_types|embedding_norm|blocks|final_norm)(/|$)"


class Tensors:
    """What a folder has for each array of a model of ours.

    Args:
      folder: the opened folder.
      family: that of its config.
      architecture: the model, as the folder has it or with another head or attention.

    Attributes:
      entries: our path -> where it comes from, for every array that the folder has.

    Raises:
      WeightsError: an array of the trunk is missing.
    """

    def __init__(self, folder: Folder, family: Family, architecture: Architecture):
        self.folder, self._zero = folder, family.zero
        options, period = architecture.options, len(entries(architecture.op))
        scanned, shared = (options.get(key, False) for key in ("scan_layers", "share_attention_params"))
        self._blocks = Blocks(options["num_layers"], period, scanned=scanned, shared=shared)
        self.entries: dict[str, tuple[Entry, str]] = {}
        for entry in family.entries(architecture):
            found = next((name for name in _names(entry, family.prefix) if name in folder.tensors), None)
            if found is not None:
                self.entries[entry.ours] = (entry, found)
            elif re.match(TRUNK, entry.ours):
                raise WeightsError(f"{folder.path}: {entry.theirs[0]} is missing, which its config.json asks for")
        copies = {copy for entry, _ in self.entries.values() for copy in entry.copies}
        self._known = {name for _, name in self.entries.values()} | copies
        self._ignored = re.compile("|".join((r"(^|\.)(position|token_type)_ids$", *family.ignored)))

    def is_zero(self, path: str) -> bool:
        """Whether our array of this path is zero, as the models there have nothing in its place."""
        return self._zero is not None and re.search(self._zero, path) is not None

    @property
    def unused(self) -> list[str]:
        """Names of tensors that no array of ours is made of, constants aside."""
        return sorted(name for name in self.folder.tensors if not (name in self._known or self._ignored.search(name)))

    def layers(self, path: str) -> list[str]:
        """The paths that our array of this path is made of: its own, or of stacked layers those of each.

        Empty where the folder has nothing for it.
        """
        paths = [path]
        if self._is_stack(path):
            layers, rest = self._blocks.layers(path)
            paths = [f"{BLOCKS}/{layer}/{rest}" for layer in layers]
        elif path.startswith(f"{BLOCKS}/") and self._blocks.scanned:
            layers, rest = self._blocks.layers(path)
            paths = [f"{BLOCKS}/{layers[0]}/{rest}"]
        return paths if all(part in self.entries for part in paths) else []

    def _is_stack(self, path: str) -> bool:
        return path.startswith(f"{BLOCKS}/") and self._blocks.scanned and not self._blocks.is_shared(path)

    def misfit(self, path: str, shape: Shape) -> str | None:
        """What is wrong with the shapes of the tensors for our array of this path and shape; None if they fit."""
        own = shape[1:] if self._is_stack(path) else shape
        return next(filter(None, (self._misfit(part, own) for part in self.layers(path))), None)

    def _misfit(self, path: str, shape: Shape) -> str | None:
        entry, name = self.entries[path]
        there, needed = self.folder.shape(name), entry.layout.shape(shape)
        if there == needed:
            return None
        return f"{self.folder.tensors[name].file}: {name} must have shape {list(needed)}, got {list(there)}"

    def read(self, path: str, shape: Shape) -> np.ndarray:
        """Our array of this path, in the dtype that it is stored in.

        Raises:
          WeightsError: its shape there is another, or it can't be read.
        """
        if (wrong := self.misfit(path, shape)) is not None:
            raise WeightsError(wrong)
        parts = self.layers(path)
        if not self._is_stack(path):
            return self._read(parts[0], shape)
        stacked: np.ndarray | None = None
        for index, part in enumerate(parts):
            x = self._read(part, shape[1:])
            stacked = np.empty(shape, x.dtype) if stacked is None else stacked
            stacked[index] = x
        assert stacked is not None
        return stacked

    def _read(self, path: str, shape: Shape) -> np.ndarray:
        entry, name = self.entries[path]
        return entry.layout.ours(self.folder.read(name), shape)


def _names(entry: Entry, prefix: str) -> Sequence[str]:
    """A file of a trunk alone leaves the prefix out."""
    return [*entry.theirs, *(name.removeprefix(prefix) for name in entry.theirs)]
