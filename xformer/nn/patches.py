"""Images as sequences of patches, and vectors for their places in the grid."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.nn.check import check_sizes
from xformer.nn.embedding import SinusoidalPositions
from xformer.nn.tokens import flatten

Array = jax.Array


class PatchEmbedding(nnx.Module):
    """One vector for each square patch of an image: its pixels through a dense layer (Dosovitskiy et al. 2021, eq. 1).

    That is a convolution whose stride is its size. Patches are in row-major order, and so are the pixels of each.

    Args:
      patch_size: side of a patch in pixels, a divisor of the height and the width of the images.
      num_channels: numbers of a pixel.
      width: features of a vector.
      dtype: of the computation; param_dtype: of the parameters.
      rngs: stream `params` draws the kernel, `[patch_size * patch_size * num_channels, width]`.
    """

    def __init__(
        self,
        patch_size: int,
        num_channels: int,
        width: int,
        *,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes(patch_size=patch_size, num_channels=num_channels, width=width)
        features = patch_size**2 * num_channels
        self.projection = nnx.Linear(features, width, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.patch_size = patch_size

    def __call__(self, images: Array) -> Array:
        """Maps images float `[batch, height, width, num_channels]` to `[batch, patches, features]`."""
        batch, height, width, channels = images.shape
        size = self.patch_size
        tiles = images.reshape(batch, height // size, size, width // size, size, channels)
        patches_BxNxP = jnp.swapaxes(tiles, 2, 3).reshape(batch, -1, size**2 * channels)
        return self.projection(flatten(patches_BxNxP)).reshape(*patches_BxNxP.shape[:2], -1)


class SinusoidalGrid(nnx.Module):
    """Fixed vectors for places in a grid: one half of the features tells the row, the other the column.

    Each half is that of `SinusoidalPositions`, as in the plainer Vision Transformer of Beyer et al. 2022, section 3. A
    token before the grid (a class token) has zeros.

    Args:
      columns: places of a row.
      num_prefix_tokens: tokens before the grid.
      width: features of a vector, at least 2.
      dtype: of the vectors.
    """

    def __init__(self, columns: int, num_prefix_tokens: int, width: int, *, dtype: Dtype = jnp.float32):
        check_sizes(columns=columns, width=width // 2)
        self.columns, self.num_prefix_tokens = columns, num_prefix_tokens
        self.by_row = SinusoidalPositions(width - width // 2, dtype=dtype)
        self.by_column = SinusoidalPositions(width // 2, dtype=dtype)

    def __call__(self, length: int) -> Array:
        """Vectors of the first `length` positions, `[length, width]`, row by row."""
        places = max(length - self.num_prefix_tokens, 0)
        rows = -(-places // self.columns)
        by_row = jnp.repeat(self.by_row(rows), self.columns, axis=0)
        by_column = jnp.tile(self.by_column(self.columns), (rows, 1))
        grid = jnp.concatenate([by_row, by_column], axis=1)[:places]
        return jnp.pad(grid, ((length - places, 0), (0, 0)))


class LearnedGrid(nnx.Module):
    """One trained vector for each place of a grid, and for each token before it (Dosovitskiy et al. 2021, section 3.1).

    They lie as the grid does, so that they can be interpolated for another one (section 3.2).

    Args:
      rows, columns: of the grid.
      num_prefix_tokens: tokens before the grid.
      width: features of a vector.
      scale: vectors are multiplied by sqrt(width), as those of `LearnedPositions` are.
      dtype: of the vectors; param_dtype: of the parameters.
      rngs: stream `params` draws `grid`, `[rows, columns, width]`, and `prefix`, `[num_prefix_tokens, width]`.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        num_prefix_tokens: int,
        width: int,
        *,
        scale: bool = True,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes(rows=rows, columns=columns, width=width)
        draw = lambda *shape: nnx.Param(nnx.initializers.normal(width**-0.5)(rngs.params(), shape, param_dtype))
        self.grid = draw(rows, columns, width)
        self.prefix: Any = draw(num_prefix_tokens, width) if num_prefix_tokens else None
        self.dtype, self.factor = dtype, width**0.5 if scale else 1.0

    def __call__(self, length: int) -> Array:
        """Vectors of the first `length` positions, `[length, width]`, row by row. ValueError above their number."""
        grid = self.grid[...]
        table = grid.reshape(-1, grid.shape[-1])
        if self.prefix is not None:
            table = jnp.concatenate([self.prefix[...], table])
        if length > len(table):
            raise ValueError(f"length must be at most {len(table)}, the places of the grid, got {length}")
        return table[:length].astype(self.dtype) * self.factor
