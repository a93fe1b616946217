"""How an array of a PyTorch model lies in the array of ours that holds the same numbers, and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """One array of ours and the tensor, or the part of a tensor, that it is.

    Attributes:
      kind: "same": a table, as it is. "vector": ours may have several axes, `[heads, head_dim]`. "linear": a kernel
        `[*in, *out]` of ours and `[out, in]` there. "conv1d": a kernel that is `[in, out]` there too (GPT-2).
        "depthwise": `[heads, size]` of ours and `[heads, 1, size, 1]` there (Nystromformer's convolutions).
      inputs: axes of our kernel that are inputs.
      factor: what the numbers there are multiplied by.
      skip: rows of a table there that are before the first of ours, and written as zeros.
      part, parts: which piece of the tensor's last axis it is, and of how many equal ones (GPT-2's fused c_attn).
    """

    kind: Literal["same", "vector", "linear", "conv1d", "depthwise"] = "same"
    inputs: int = 1
    factor: float = 1.0
    skip: int = 0
    part: int = 0
    parts: int = 1

    def shape(self, ours: Shape) -> Shape:
        """The shape of the whole tensor there, of an array of ours of this shape."""
        if self.kind == "depthwise":
            return (ours[0], 1, ours[1], 1)
        if self.kind == "same":
            theirs = (ours[0] + self.skip, *ours[1:])
        elif self.kind == "vector":
            theirs = (math.prod(ours),)
        else:
            theirs = (math.prod(ours[: self.inputs]), math.prod(ours[self.inputs :]))
        theirs = (*theirs[:-1], theirs[-1] * self.parts)
        return theirs[::-1] if self.kind == "linear" else theirs

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """Our array of this shape, of the tensor there."""
        if self.kind == "depthwise":
            return theirs.reshape(shape)
        x = theirs.T if self.kind == "linear" else theirs[self.skip :]
        size = x.shape[-1] // self.parts
        part = x[..., self.part * size : (self.part + 1) * size].reshape(shape)
        return part if self.factor == 1 else part * np.asarray(self.factor, part.dtype)

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The tensor there, or the part of it, of our array."""
        ours = ours if self.factor == 1 else ours / np.asarray(self.factor, ours.dtype)
        if self.skip:
            return np.concatenate([np.zeros_like(ours, shape=(self.skip, *ours.shape[1:])), ours])
        piece = dataclasses.replace(self, parts=1).shape(ours.shape)
        return ours.reshape(piece[::-1]).T if self.kind == "linear" else ours.reshape(piece)


SAME, VECTOR, LINEAR, DEPTHWISE = Layout(), Layout("vector"), Layout("linear"), Layout("depthwise")
OUT = Layout("linear", inputs=2)  # of an attention layer's heads


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of our model and its names in a folder.

    Attributes:
      ours: its path in our model, such as `blocks/0/attention/query/kernel`.
      theirs: its name there; others that older files have follow. The first is written.
      layout: how it lies there.
      copies: more names, which are written with the same numbers, and not read.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME
    copies: tuple[str, ...] = ()
