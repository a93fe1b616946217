"""The Vision Transformer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.attention import Attention, Shaw2D, entries
from xformer.checks import ArgumentError
from xformer.models.classifier import EncoderClassifier, Head
from xformer.models.encoder import Encoder, EncoderOptions
from xformer.nn.check import check_sizes
from xformer.nn.patches import LearnedGrid, PatchEmbedding, SinusoidalGrid

Array = jax.Array


class VisionTransformer(EncoderClassifier):
    """Classifies images: patches as tokens, in rows from the top, an encoder, pooling, one dense layer.

    With a class token, learned positions and MLPs of 4 x width it is that of Dosovitskiy et al. 2021, section 3.1; the
    defaults, the mean of the patches and fixed positions in two dimensions, are those of Beyer et al. 2022. An op
    attends to patches in row-major order, so that a window or a block is a part of a row, or some rows.

    Args:
      num_classes: number of logits.
      image_height, image_width, num_channels: of the images.
      patch_size: side of a patch in pixels; it divides height and width.
      pooling: "mean" of the patches, or "cls", a trained vector in front of them.
      head, head_dropout_rate: see EncoderClassifier.
      options: the keywords of Encoder. `position_embedding` "sinusoidal" is one in two dimensions (`SinusoidalGrid`),
        "learned" has a vector for each place. `scale_embeddings` scales learned positions, not patches.

    Raises:
      ValueError: as Encoder; a patch size that does not divide the image; or a `Shaw2D` for another grid.
    """

    FIXED_ARGUMENTS: ClassVar[tuple[str, ...]] = ("vocab_size", "max_len", "chunk_len")

    def __init__(
        self,
        num_classes: int,
        image_height: int,
        image_width: int,
        num_channels: int,
        *,
        patch_size: int = 4,
        pooling: Literal["mean", "cls"] = "mean",
        head: Head = "linear",
        head_dropout_rate: float = 0.0,
        **options: Unpack[EncoderOptions],
    ):
        check_sizes(image_height=image_height, image_width=image_width, num_channels=num_channels)
        check_sizes(patch_size=patch_size)
        if image_height % patch_size or image_width % patch_size:
            raise ArgumentError(
                "patch_size",
                f"patch_size must divide the images' height {image_height} and width {image_width}, got {patch_size}",
            )
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling must be 'mean' or 'cls', got {pooling!r}")
        self.image_shape, self.patch_size = (image_height, image_width, num_channels), patch_size
        self.columns, self.num_prefix_tokens = image_width // patch_size, int(pooling == "cls")
        _check_grid(options["attention"], self.columns, self.num_prefix_tokens)
        num_patches = (image_height // patch_size) * self.columns
        self.tokens_per_example = num_patches  # what a result counts as tokens; a class token is none of the image's
        super().__init__(
            patch_size**2 * num_channels,
            num_classes,
            num_patches,
            pooling=pooling,
            head=head,
            head_dropout_rate=head_dropout_rate,
            **options,
        )

    @staticmethod
    def num_positions(  # type: ignore[override]
        max_len: int, pooling: str | None = None, patch_size: int = 4, num_channels: int = 1
    ) -> int:
        """The positions that attention sees of an image of `max_len` values; the class token is one more."""
        return Encoder.num_positions(max_len // (max(patch_size, 1) ** 2 * num_channels), pooling)

    def make_embedding(self, vocab_size: int, width: int, **vectors: Any) -> nnx.Module:
        """Of the `vocab_size` numbers of a patch."""
        del vocab_size
        vectors.pop("scale")
        return PatchEmbedding(self.patch_size, self.image_shape[2], width, **vectors)

    def make_positions(self, kind: Any, num_positions: int, width: int, **options: Any) -> nnx.Module | None:
        if offset := options.pop("offset"):
            raise ArgumentError("position_offset", f"position_offset must be 0 for patches of images, got {offset}")
        before = self.num_prefix_tokens
        if kind == "sinusoidal":
            return SinusoidalGrid(self.columns, before, width, dtype=options["dtype"])
        if kind != "learned":
            return super().make_positions(kind, num_positions, width, **options)
        return LearnedGrid((num_positions - before) // self.columns, self.columns, before, width, **options)

    def check_inputs(self, inputs: Array) -> None:
        if inputs.shape[1:] != self.image_shape or not jnp.issubdtype(inputs.dtype, jnp.floating):
            height, width, channels = self.image_shape
            raise ValueError(
                f"images must be floats [batch, {height}, {width}, {channels}], got {inputs.dtype}{list(inputs.shape)}"
            )

    def __call__(  # type: ignore[override]
        self, images: Array, *, deterministic: bool = True, rngs: nnx.Rngs | None = None
    ) -> Array:
        """Classifies a batch.

        Args:
          images: float `[batch, image_height, image_width, num_channels]`, with values about 0 and about as large as 1.
          deterministic: no dropout.
          rngs: stream `dropout` draws the dropout masks.

        Returns:
          float32 logits `[batch, num_classes]`.
        """
        return super().__call__(images, deterministic=deterministic, rngs=rngs)


def _check_grid(attention: Attention, columns: int, num_prefix_tokens: int) -> None:
    """Raises ArgumentError for a position term of another grid."""
    ops = entries(attention)
    for index, op in enumerate(ops):
        position = getattr(op, "position", None)
        if not isinstance(position, Shaw2D):
            continue
        path = f"attention.layers[{index}].position" if len(ops) > 1 else "attention.position"
        for key, needed in (("columns", columns), ("num_prefix_tokens", num_prefix_tokens)):
            if (got := getattr(position, key)) != needed:
                what = "patches of a row" if key == "columns" else "class tokens"
                raise ArgumentError(f"{path}.{key}", f"{path}.{key} must be {needed}, the {what}, got {got}")
