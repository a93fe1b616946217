"""The encoder that names hidden tokens: masked language modelling."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.models.encoder import Encoder, EncoderOptions
from xformer.nn import Activation, at_places
from xformer.nn.check import check_sizes
from xformer.nn.feed_forward import ACTIVATIONS, GATED
from xformer.nn.norm import make_norm

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
      mask_token: "vector", as above; or "row": the mask is an ordinary id, with a row of the table and a logit.
      tie_embeddings: the output table is that of the embedding; False: one of its own.
      head_activation: after the head's dense layer. head_epsilon: what its norm adds to the variance.
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
        mask_token: Literal["vector", "row"] = "vector",
        tie_embeddings: bool = True,
        head_activation: Activation = "gelu",
        head_epsilon: float = 1e-6,
        **options: Unpack[EncoderOptions],
    ):
        if mask_token not in ("vector", "row"):
            raise ValueError(f"mask_token must be 'vector' or 'row', got {mask_token!r}")
        if head_activation not in ACTIVATIONS or head_activation in GATED:
            raise ValueError(f"head_activation must be gelu, gelu_exact, relu or silu, got {head_activation!r}")
        num_logits = vocab_size - (mask_token == "vector")
        check_sizes(vocab_size=num_logits)
        super().__init__(num_logits, max_len, pooling, **options)
        self.mask_id = vocab_size - 1 if mask_token == "vector" else None
        width, param_dtype, rngs = options["width"], options.get("param_dtype", jnp.float32), options["rngs"]
        init = nnx.initializers.normal(stddev=width**-0.5)
        vector = nnx.Param(init(rngs.params(), (width,), param_dtype)) if mask_token == "vector" else None
        self.mask_vector: nnx.Param | None = vector
        self.transform = nnx.Linear(width, width, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
        head: dict[str, Any] = {"dtype": jnp.float32, "param_dtype": param_dtype, "rngs": rngs}
        self.transform_norm = make_norm("layer", width, epsilon=head_epsilon, **head)
        self.bias = nnx.Param(jnp.zeros(num_logits, param_dtype))
        own = None if tie_embeddings else nnx.Param(init(rngs.params(), (num_logits, width), param_dtype))
        self.output_table: nnx.Param | None = own
        self.head_activation = head_activation

    def embed_tokens(self, inputs: Array) -> Array:
        """The vectors of token ids, scaled as those of the table are, and that of the mask for its id."""
        if self.mask_vector is None:
            return self.embed(inputs)
        masked_BxT: Array = jnp.asarray(inputs == self.mask_id)
        x_BxTxW = self.embed(jnp.where(masked_BxT, 0, inputs))
        mask_vector: Any = self.mask_vector
        mask_W = jnp.asarray(mask_vector[...], x_BxTxW.dtype) * self.embed.factor
        return jnp.where(masked_BxT[..., None], mask_W, x_BxTxW)

    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        places: Array | None = None,
        token_types: Array | None = None,
        global_tokens: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Logits at some places of each text, or at all.

        Args:
          inputs: int `[batch, length]` token ids, that of the mask where a token is hidden.
          mask: bool `[batch, length]`, True where a token is real, hidden ones too; None: all are.
          places: int `[batch, places]`, the positions of `inputs` whose logits are wanted; None: all of them.
          token_types, global_tokens: see `Encoder.encode`.
          deterministic: no dropout.
          rngs: stream `dropout` draws the dropout masks.

        Returns:
          float32 `[batch, places, vocab_size - 1]`; with `mask_token` "row" `vocab_size`.
        """
        given: dict[str, Any] = {"token_types": token_types, "global_tokens": global_tokens}
        x_BxTxW = self.encode(inputs, mask, **given, deterministic=deterministic, rngs=rngs)
        x_BxTxW = x_BxTxW if self.cls is None else x_BxTxW[:, 1:]
        hidden_BxPxW = self.transform(at_places(x_BxTxW, places))
        x_BxPxW = self.transform_norm(ACTIVATIONS[self.head_activation](hidden_BxPxW))
        table: Any = self.embed.table if self.output_table is None else self.output_table
        table_VxW = table[...].astype(jnp.float32)
        return jnp.einsum("bpw,vw->bpv", x_BxPxW, table_VxW) + self.bias[...].astype(jnp.float32)
