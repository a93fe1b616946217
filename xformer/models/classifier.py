"""The encoder classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.models.encoder import Encoder, EncoderOptions, Pooling
from xformer.nn import masked_mean
from xformer.nn.check import check_rates, check_sizes, check_tokens
from xformer.nn.dropout import Dropout
from xformer.nn.feed_forward import ACTIVATIONS

Array = jax.Array
Head = Literal["linear", "tanh", "gelu", "gelu_exact", "relu", "silu"]
HEADS: dict[str, Callable[[Array], Array]] = {
    "tanh": nnx.tanh,
    **{name: ACTIVATIONS[name] for name in ("gelu", "gelu_exact", "relu", "silu")},
}


class EncoderClassifier(Encoder):
    """Classifies token sequences: an encoder, pooling, one dense layer.

    An example of nothing but padding gets finite logits.

    Args:
      vocab_size, max_len: see Encoder.
      num_classes: number of logits.
      pooling: what is classified: "mean" of the real tokens, "attention", their mean weighted by a trained query (Yang
        et al. 2016, equations 5 to 7), "cls", a trained vector in front of them, "first", the first token, which the
        tokenizer puts there, or "last", the last real token, as for causal attention.
      head: "linear", one dense layer; or the activation of a dense layer before it, of `width` features ("tanh": BERT's
        pooler, Devlin et al. 2019, section 4.1).
      head_dropout_rate: on what the last layer reads. head_bias: whether that layer has a bias.
      chunk_len: a text is read in chunks of so many tokens, each by itself, with its own positions; what is classified
        is the mean, plain or weighted, over the real tokens of all chunks, or over the first or last vectors of those
        that have any. Attention and positions are then made for `chunk_len`. None: the text is read as a whole.
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
        pooling: Pooling = "mean",
        chunk_len: int | None = None,
        head: Head = "linear",
        head_dropout_rate: float = 0.0,
        head_bias: bool = True,
        **options: Unpack[EncoderOptions],
    ):
        check_sizes(num_classes=num_classes, **({} if chunk_len is None else {"chunk_len": chunk_len}))
        self.chunk_len, self.longest = chunk_len, max_len
        super().__init__(vocab_size, max_len if chunk_len is None else min(max_len, chunk_len), pooling, **options)
        param_dtype, rngs = options.get("param_dtype", jnp.float32), options["rngs"]
        if head != "linear" and head not in HEADS:
            raise ValueError(f"head must be one of linear, {', '.join(HEADS)}, got {head!r}")
        check_rates(head_dropout_rate=head_dropout_rate)
        dense: dict[str, Any] = {"dtype": jnp.float32, "param_dtype": param_dtype, "rngs": rngs}
        self.head = head
        self.dense = None if head == "linear" else nnx.Linear(options["width"], options["width"], **dense)
        self.head_dropout = Dropout(head_dropout_rate)
        self.has_dropout = self.has_dropout or head_dropout_rate > 0
        self.classify = nnx.Linear(options["width"], num_classes, use_bias=head_bias, **dense)

    @staticmethod
    def num_positions(max_len: int, pooling: str | None = None, chunk_len: int | None = None) -> int:
        """The positions that attention sees of an input of `max_len` tokens; the CLS vector is one more."""
        return Encoder.num_positions(max_len if chunk_len is None else min(max_len, chunk_len), pooling)

    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        token_types: Array | None = None,
        global_tokens: Array | None = None,
        parents: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Classifies a batch; the arguments are those of `Encoder.encode`.

        Returns:
          float32 logits `[batch, num_classes]`.
        """
        given: dict[str, Any] = {"token_types": token_types, "global_tokens": global_tokens, "parents": parents}
        options: dict[str, Any] = {"deterministic": deterministic, "rngs": rngs}
        if self.chunk_len is not None:
            pooled_BxW = self._pool_chunks(inputs, mask, given, options)
        else:
            pooled_BxW = self.pool(self.encode(inputs, mask, **given, **options), mask)
        if self.dense is not None:
            pooled_BxW = HEADS[self.head](self.dense(pooled_BxW))
        return self.classify(self.head_dropout(pooled_BxW, **options))

    def _pool_chunks(self, inputs: Array, mask: Array | None, given: dict[str, Any], options: dict[str, Any]) -> Array:
        """One vector an example, `[batch, width]`, of chunks encoded as so many more examples."""
        check_tokens("inputs", inputs, self.longest)
        batch, length = inputs.shape
        mask = jnp.ones(inputs.shape, bool) if mask is None else mask > 0
        if given["parents"] is not None:
            raise ValueError("parents cannot be had with chunk_len: trees reach from chunk to chunk")
        padding = ((0, 0), (0, -length % self.max_len))
        cut: Any = lambda x: None if x is None else jnp.pad(x, padding).reshape(-1, self.max_len)
        mask_CxT = cut(mask)
        chunked = {name: cut(x) for name, x in given.items()}
        encoded_CxTxW = self.encode(cut(inputs), mask_CxT, **chunked, **options)
        if self.pooling in ("mean", "attention"):
            return self.pool(encoded_CxTxW.reshape(batch, -1, encoded_CxTxW.shape[-1]), mask_CxT.reshape(batch, -1))
        one_BxNxW = self.pool(encoded_CxTxW, mask_CxT).reshape(batch, -1, encoded_CxTxW.shape[-1])
        return masked_mean(one_BxNxW, mask_CxT.any(axis=1).reshape(batch, -1))
