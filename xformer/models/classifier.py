"""The encoder classifier."""

from __future__ import annotations

from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.models.encoder import Encoder, EncoderOptions
from xformer.nn.check import check_sizes

Array = jax.Array


class EncoderClassifier(Encoder):
    """Classifies token sequences: an encoder, pooling, one dense layer.

    An example of nothing but padding gets finite logits.

    Args:
      vocab_size, max_len: see Encoder.
      num_classes: number of logits.
      pooling: what is classified: "mean" of the real tokens, or "cls", a trained vector put in front of them.
      options: the keywords of Encoder.

    Raises:
      ValueError: as Encoder, or a number of classes below 1.
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        max_len: int,
        *,
        pooling: Literal["mean", "cls"] = "mean",
        **options: Unpack[EncoderOptions],
    ):
        check_sizes(num_classes=num_classes)
        super().__init__(vocab_size, max_len, pooling, **options)
        param_dtype, rngs = options.get("param_dtype", jnp.float32), options["rngs"]
        self.classify = nnx.Linear(options["width"], num_classes, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Classifies a batch; the arguments are those of `Encoder.encode`.

        Returns:
          float32 logits `[batch, num_classes]`.
        """
        encoded_BxTxW = self.encode(inputs, mask, deterministic=deterministic, rngs=rngs)
        return self.classify(self.pool(encoded_BxTxW, mask))
