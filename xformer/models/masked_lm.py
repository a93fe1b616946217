"""The encoder that names hidden tokens: masked language modelling."""

from __future__ import annotations

from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.models.encoder import Encoder, EncoderOptions
from xformer.nn import at_places
from xformer.nn.check import check_sizes
from xformer.nn.norm import LayerNorm

Array = jax.Array


class MaskedLanguageModel(Encoder):
    """Which token stands at a hidden place? An encoder and the head of BERT (Devlin et al. 2019, section 3.1).

    The head is a dense layer, GELU and a layer norm; its result times the transposed embedding table, plus a bias, are
    the logits. What is embedded at a hidden place is a vector of its own, `mask_vector`, and no row of the table: so
    all parameters of the encoder have the paths and shapes of those of `EncoderClassifier` and `TwoTower` for the same
    texts, and `train.init_from` takes them over.

    Args:
      vocab_size: number of ids, that of the mask included: it is the last, `vocab_size - 1`, and has no logit.
      max_len: see Encoder.
      pooling: "cls": a trained vector stands in front, as in a classifier with that pooling. "mean": none does.
      options: the keywords of Encoder.

    Raises:
      ValueError: as Encoder, or a `vocab_size` below 2.
    """

    def __init__(
        self,
        vocab_size: int,
        max_len: int,
        *,
        pooling: Literal["mean", "cls"] = "mean",
        **options: Unpack[EncoderOptions],
    ):
        check_sizes(vocab_size=vocab_size - 1)
        super().__init__(vocab_size - 1, max_len, pooling, **options)
        self.mask_id = vocab_size - 1
        width, param_dtype, rngs = options["width"], options.get("param_dtype", jnp.float32), options["rngs"]
        init = nnx.initializers.normal(stddev=width**-0.5)
        self.mask_vector = nnx.Param(init(rngs.params(), (width,), param_dtype))
        self.transform = nnx.Linear(width, width, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
        self.transform_norm = LayerNorm(width, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(vocab_size - 1, param_dtype))

    def embed_tokens(self, inputs: Array) -> Array:
        """The vectors of token ids, scaled as those of the table are, and that of the mask for its id."""
        masked_BxT = inputs == self.mask_id
        x_BxTxW = self.embed(jnp.where(masked_BxT, 0, inputs))
        mask_W = self.mask_vector[...].astype(x_BxTxW.dtype) * x_BxTxW.shape[-1] ** 0.5
        return jnp.where(masked_BxT[..., None], mask_W, x_BxTxW)

    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        places: Array | None = None,
        global_tokens: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Logits at some places of each text, or at all.

        Args:
          inputs: int `[batch, length]` token ids, that of the mask where a token is hidden.
          mask: bool `[batch, length]`, True where a token is real, hidden ones too; None: all are.
          places: int `[batch, places]`, the positions of `inputs` whose logits are wanted; None: all of them.
          global_tokens: see `Encoder.encode`.
          deterministic: no dropout.
          rngs: stream `dropout` draws the dropout masks.

        Returns:
          float32 `[batch, places, vocab_size - 1]`.
        """
        x_BxTxW = self.encode(inputs, mask, global_tokens=global_tokens, deterministic=deterministic, rngs=rngs)
        x_BxTxW = x_BxTxW if self.cls is None else x_BxTxW[:, 1:]
        x_BxPxW = self.transform_norm(nnx.gelu(self.transform(at_places(x_BxTxW, places))))
        table_VxW = self.embed.table[...].astype(jnp.float32)
        return jnp.einsum("bpw,vw->bpv", x_BxPxW, table_VxW) + self.bias[...].astype(jnp.float32)
