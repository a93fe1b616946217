"""The encoder that classifies every token."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.models.encoder import Encoder, EncoderOptions
from xformer.nn import at_places
from xformer.nn.check import check_sizes

Array = jax.Array


class TokenClassifier(Encoder):
    """Classifies every token of a sequence (tagging): an encoder and one dense layer, the same at every position.

    Args:
      vocab_size, max_len: see Encoder.
      num_classes: number of logits of a token.
      options: the keywords of Encoder.

    Raises:
      ValueError: as Encoder, or a number of classes below 1.
    """

    def __init__(self, vocab_size: int, num_classes: int, max_len: int, **options: Unpack[EncoderOptions]):
        check_sizes(num_classes=num_classes)
        super().__init__(vocab_size, max_len, **options)
        param_dtype, rngs = options.get("param_dtype", jnp.float32), options["rngs"]
        self.classify = nnx.Linear(options["width"], num_classes, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        places: Array | None = None,
        token_types: Array | None = None,
        global_tokens: Array | None = None,
        parents: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Classifies tokens of a batch; the other arguments are those of `Encoder.encode`.

        Args:
          places: int `[batch, places]`, the positions that are classified; None: all of them.

        Returns:
          float32 logits `[batch, places, num_classes]`; those of padding are finite and mean nothing.
        """
        given: dict[str, Any] = {"token_types": token_types, "global_tokens": global_tokens, "parents": parents}
        encoded_BxTxW = self.encode(inputs, mask, **given, deterministic=deterministic, rngs=rngs)
        return self.classify(at_places(encoded_BxTxW, places))
