"""The classifier that attention replaced: bidirectional LSTMs."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.nn import AttentionPooling, BidirectionalLSTM, TokenEmbedding, masked_mean
from xformer.nn.check import check_dropout, check_rates, check_sizes, check_tokens
from xformer.nn.dropout import Dropout

Array = jax.Array


class BiLSTM(nnx.Module):
    """Classifies token sequences: embeddings, layers of two LSTMs each, pooling, one dense layer; no attention op.

    Of Yang et al. 2016, section 2.2, the encoder and the attention of one level. Padding changes nothing, and an
    example of nothing else gets finite logits.

    Args:
      vocab_size: token ids are in [0, vocab_size).
      num_classes: number of logits.
      max_len: longest input in tokens.
      num_layers: layers of LSTMs; each waits for every token of the one before.
      width: features of an embedding. hidden_dim: of an LSTM, half of those that a layer gives for a token.
      pooling: "attention", a mean of the tokens weighted by a trained query, or their plain "mean".
      dropout_rate: on embeddings, on what a layer gives, and on what is classified.
      remat: the backward pass keeps the states of the LSTMs alone and computes their gates again.
      dtype: of the computation; pooling and what comes after are float32. param_dtype: of the parameters.
      rngs: stream `params` draws the parameters.

    Raises:
      ValueError: an unknown choice, or a size or rate out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        max_len: int,
        *,
        num_layers: int = 1,
        width: int,
        hidden_dim: int,
        pooling: Literal["attention", "mean"] = "attention",
        dropout_rate: float = 0.0,
        remat: bool = False,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = {"num_layers": num_layers, "width": width, "hidden_dim": hidden_dim}
        check_sizes(vocab_size=vocab_size, num_classes=num_classes, max_len=max_len, **sizes)
        check_rates(dropout_rate=dropout_rate)
        if pooling not in ("attention", "mean"):
            raise ValueError(f"pooling must be 'attention' or 'mean', got {pooling!r}")
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.embed = TokenEmbedding(vocab_size, width, **dtypes)
        read = [width] + [2 * hidden_dim] * (num_layers - 1)
        self.layers = nnx.List([BidirectionalLSTM(size, hidden_dim, remat=remat, **dtypes) for size in read])
        own: dict[str, Any] = {"param_dtype": param_dtype, "rngs": rngs}
        self.pool = AttentionPooling(2 * hidden_dim, **own) if pooling == "attention" else masked_mean
        self.dropout = Dropout(dropout_rate)
        self.classify = nnx.Linear(2 * hidden_dim, num_classes, dtype=jnp.float32, **own)
        self.max_len, self.has_dropout = max_len, dropout_rate > 0

    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Classifies a batch.

        Args:
          inputs: int `[batch, length]` token ids.
          mask: bool `[batch, length]`, True where a token is real; None: all are.
          deterministic: no dropout. rngs: stream `dropout` draws its masks.

        Returns:
          float32 logits `[batch, num_classes]`.

        Raises:
          ValueError: inputs of another rank or longer than `max_len`, or dropout without `rngs`.
        """
        check_tokens("inputs", inputs, self.max_len)
        check_dropout(self.has_dropout, deterministic, rngs)
        drop: dict[str, Any] = {"deterministic": deterministic, "rngs": rngs}
        x_BxTxW = self.dropout(self.embed(inputs), **drop)
        for layer in self.layers:
            x_BxTxW = self.dropout(layer(x_BxTxW, mask)[0], **drop)
        pooled_BxW = self.pool(x_BxTxW.astype(jnp.float32), mask)
        return self.classify(self.dropout(pooled_BxW, **drop))
