"""A residual convolutional network: what a model of images without attention does for the same compute."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.nn.check import check_rates, check_sizes
from xformer.nn.dropout import Dropout

Array = jax.Array
KERNEL = (3, 3)
MOST_GROUPS = 8  # of a norm


class ConvNet(nnx.Module):
    """Classifies images by pre-activation residual blocks (He et al. 2016b, figure 4e) and the mean over all places.

    It has no attention. Each stage but the first begins with a convolution of stride 2, which halves the sides. Norms
    are of groups of channels (Wu and He 2018), so that an example's logits don't depend on others.

    Args:
      num_classes: number of logits.
      image_height, image_width, num_channels: of the images.
      widths: channels of each stage.
      num_blocks: blocks of a stage, of two convolutions of 3 x 3 each.
      dropout_rate: on what the last layer reads.
      dtype: of the computation, but the last layer is float32. param_dtype: of the parameters.
      rngs: stream `params` draws the parameters.

    Raises:
      ValueError: a size below 1, or a rate out of range.
    """

    def __init__(
        self,
        num_classes: int,
        image_height: int,
        image_width: int,
        num_channels: int,
        *,
        widths: tuple[int, ...] = (32, 64, 128),
        num_blocks: int = 1,
        dropout_rate: float = 0.0,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes(num_classes=num_classes, image_height=image_height, image_width=image_width)
        check_sizes(num_channels=num_channels, num_blocks=num_blocks)
        check_rates(dropout_rate=dropout_rate)
        if not widths:
            raise ValueError("widths must have at least one stage, got ()")
        for index, width in enumerate(widths):
            check_sizes(**{f"widths[{index}]": width})
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.stem = nnx.Conv(num_channels, widths[0], KERNEL, **options)
        self.down = nnx.List(
            nnx.Conv(before, after, KERNEL, strides=2, **options) for before, after in itertools.pairwise(widths)
        )
        self.stages = nnx.List(nnx.List(ResidualBlock(width, **options) for _ in range(num_blocks)) for width in widths)
        self.norm = _norm(widths[-1], **options)
        self.dropout = Dropout(dropout_rate)
        self.classify = nnx.Linear(widths[-1], num_classes, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
        self.image_shape = (image_height, image_width, num_channels)

    def __call__(self, images: Array, *, deterministic: bool = True, rngs: nnx.Rngs | None = None) -> Array:
        """Classifies a batch.

        Args:
          images: float `[batch, image_height, image_width, num_channels]`.
          deterministic: no dropout. rngs: stream `dropout` draws the dropout mask.

        Returns:
          float32 logits `[batch, num_classes]`.

        Raises:
          ValueError: images of another shape, or that are no floats.
        """
        if images.shape[1:] != self.image_shape or not jnp.issubdtype(images.dtype, jnp.floating):
            wanted = ", ".join(map(str, self.image_shape))
            raise ValueError(f"images must be floats [batch, {wanted}], got {images.dtype}{list(images.shape)}")
        x_BxHxWxC = self.stem(images)
        for index, stage in enumerate(self.stages):
            if index:
                x_BxHxWxC = self.down[index - 1](x_BxHxWxC)
            for block in stage:
                x_BxHxWxC = block(x_BxHxWxC)
        pooled_BxC = nnx.relu(self.norm(x_BxHxWxC)).mean(axis=(1, 2))
        return self.classify(self.dropout(pooled_BxC, deterministic=deterministic, rngs=rngs))


class ResidualBlock(nnx.Module):
    """Norm, ReLU and a convolution, twice, added to the input, `[batch, height, width, channels]`."""

    def __init__(self, width: int, **options: Any):
        self.first_norm, self.second_norm = _norm(width, **options), _norm(width, **options)
        self.first, self.second = (nnx.Conv(width, width, KERNEL, **options) for _ in range(2))

    def __call__(self, x: Array) -> Array:
        hidden = self.first(nnx.relu(self.first_norm(x)))
        return x + self.second(nnx.relu(self.second_norm(hidden)))


def _norm(width: int, **options: Any) -> nnx.GroupNorm:
    return nnx.GroupNorm(width, num_groups=math.gcd(width, MOST_GROUPS), **options)
