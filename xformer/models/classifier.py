"""The encoder classifier."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.models.encoder import Encoder, EncoderOptions
from xformer.nn import masked_mean
from xformer.nn.check import check_sizes

Array = jax.Array


class EncoderClassifier(Encoder):
    """Classifies token sequences: an encoder, pooling, one dense layer.

    An example of nothing but padding gets finite logits.

    Args:
      vocab_size, max_len: see Encoder.
      num_classes: number of logits.
      pooling: what is classified: "mean" of the real tokens, or "cls", a trained vector put in front of them.
      chunk_len: a text is read in chunks of so many tokens, each by itself, with its own positions; what is classified
        is the mean over the real tokens of all chunks, or over the CLS vectors of those that have any. Attention and
        positions are then made for `chunk_len`. None: the text is read as a whole.
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
        chunk_len: int | None = None,
        **options: Unpack[EncoderOptions],
    ):
        check_sizes(num_classes=num_classes, **({} if chunk_len is None else {"chunk_len": chunk_len}))
        self.chunk_len, self.longest = chunk_len, max_len
        super().__init__(vocab_size, max_len if chunk_len is None else min(max_len, chunk_len), pooling, **options)
        param_dtype, rngs = options.get("param_dtype", jnp.float32), options["rngs"]
        self.classify = nnx.Linear(options["width"], num_classes, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)

    @staticmethod
    def num_positions(max_len: int, pooling: str | None = None, chunk_len: int | None = None) -> int:
        """The positions that attention sees of an input of `max_len` tokens; the CLS vector is one more."""
        return Encoder.num_positions(max_len if chunk_len is None else min(max_len, chunk_len), pooling)

    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        global_tokens: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Classifies a batch; the arguments are those of `Encoder.encode`.

        Returns:
          float32 logits `[batch, num_classes]`.
        """
        if self.chunk_len is not None:
            return self.classify(self._pool_chunks(inputs, mask, global_tokens, deterministic, rngs))
        encoded_BxTxW = self.encode(inputs, mask, global_tokens=global_tokens, deterministic=deterministic, rngs=rngs)
        return self.classify(self.pool(encoded_BxTxW, mask))

    def _pool_chunks(
        self,
        inputs: Array,
        mask: Array | None,
        global_tokens: Array | None,
        deterministic: bool,
        rngs: nnx.Rngs | None,
    ) -> Array:
        """One vector an example, `[batch, width]`, of chunks encoded as so many more examples."""
        if inputs.ndim != 2 or inputs.shape[1] > self.longest:
            raise ValueError(f"inputs must be [batch, length] with length up to {self.longest}, got {inputs.shape}")
        batch, length = inputs.shape
        mask = jnp.ones(inputs.shape, bool) if mask is None else mask > 0
        padding = ((0, 0), (0, -length % self.max_len))
        cut: Any = lambda x: None if x is None else jnp.pad(x, padding).reshape(-1, self.max_len)
        chunks_CxT, mask_CxT, global_CxT = cut(inputs), cut(mask), cut(global_tokens)
        encoded_CxTxW = self.encode(
            chunks_CxT, mask_CxT, global_tokens=global_CxT, deterministic=deterministic, rngs=rngs
        )
        if self.cls is None:
            return masked_mean(encoded_CxTxW.reshape(batch, -1, encoded_CxTxW.shape[-1]), mask_CxT.reshape(batch, -1))
        cls_BxNxW = encoded_CxTxW[:, 0].reshape(batch, -1, encoded_CxTxW.shape[-1])
        return masked_mean(cls_BxNxW, mask_CxT.any(axis=1).reshape(batch, -1))
