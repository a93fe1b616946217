"""The encoder classifier."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.attention import Attention
from xformer.nn import EncoderBlock, LearnedPositions, TokenEmbedding, masked_mean, sinusoidal_positions
from xformer.nn.params import own_max_len

Array = jax.Array


class EncoderClassifier(nnx.Module):
    """Classifies token sequences: embeddings, `num_layers` encoder blocks, pooling, one dense layer.

    Layer i attends with `attention.at_layer(i)`; relative and rotary positions are part of `attention`. Padding never
    changes the logits, and an example of nothing but padding gets finite ones.

    `pooling="mean"` averages the real tokens. `pooling="cls"` classifies from a trained vector put in front: token t
    then stands at position t + 1, for position embeddings and for attention, which sees length + 1 positions.
    (BigBird's first block is global, so there the CLS vector sees all tokens and all see it.)

    Args:
      vocab_size: token ids are in [0, vocab_size).
      num_classes: number of logits.
      max_len: longest input in tokens, not counting the CLS vector.
      attention: an `xformer.attention` op.
      num_layers: number of blocks. width, num_heads, mlp_dim, num_kv_heads, norm: see EncoderBlock.
      dropout_rate: on embeddings and in blocks. attention_dropout_rate: on attention weights.
      pooling: "mean" or "cls".
      position_embedding: "sinusoidal", "learned" or "none"; added to the token embeddings.
      share_attention_params: one set of the op's own parameters for all layers (Linformer's layerwise sharing).
      dtype: of the computation, but logits and pooling are float32. param_dtype: of the parameters.
      rngs: stream `params` draws the parameters. No random state stays in the model.

    Raises:
      ValueError: an unknown choice, a size or rate out of range, heads that don't divide the width, or an op made for
        fewer positions.
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        max_len: int,
        *,
        attention: Attention,
        num_layers: int,
        width: int,
        num_heads: int,
        mlp_dim: int,
        dropout_rate: float = 0.0,
        attention_dropout_rate: float = 0.0,
        pooling: Literal["mean", "cls"] = "mean",
        norm: Literal["pre", "post"] = "pre",
        position_embedding: Literal["sinusoidal", "learned", "none"] = "sinusoidal",
        share_attention_params: bool = False,
        num_kv_heads: int | None = None,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = {"vocab_size": vocab_size, "num_classes": num_classes, "max_len": max_len, "num_layers": num_layers}
        sizes |= {"width": width, "num_heads": num_heads, "mlp_dim": mlp_dim}
        sizes |= {} if num_kv_heads is None else {"num_kv_heads": num_kv_heads}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        for name, rate in {"dropout_rate": dropout_rate, "attention_dropout_rate": attention_dropout_rate}.items():
            if not 0 <= rate < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {rate}")
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling must be 'mean' or 'cls', got {pooling!r}")
        if position_embedding not in ("sinusoidal", "learned", "none"):
            raise ValueError(
                f"position_embedding must be 'sinusoidal', 'learned' or 'none', got {position_embedding!r}"
            )
        num_positions = max_len + (pooling == "cls")
        if (op_max_len := own_max_len(attention)) is not None and op_max_len < num_positions:
            raise ValueError(f"attention's max_len must be at least {num_positions}, the model's, got {op_max_len}")

        self.embed = TokenEmbedding(vocab_size, width, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        if pooling == "cls":
            self.cls = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (width,), param_dtype))
        if position_embedding == "learned":
            self.learned_positions = LearnedPositions(num_positions, width, param_dtype=param_dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout_rate)
        self.blocks = nnx.List(
            EncoderBlock(
                width,
                num_heads,
                mlp_dim,
                attention_fn=attention.at_layer(i),
                num_kv_heads=num_kv_heads,
                norm=norm,
                dropout_rate=dropout_rate,
                attention_dropout_rate=attention_dropout_rate,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )
            for i in range(num_layers)
        )
        if share_attention_params:
            for block in self.blocks:
                block.attention.attention_fn.params = self.blocks[0].attention.attention_fn.params
        if norm == "pre":  # post-norm blocks end on a norm of their own
            self.final_norm = nnx.LayerNorm(width, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.classify = nnx.Linear(width, num_classes, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
        self.max_len = max_len
        self.pooling = pooling
        self.norm = norm
        self.position_embedding = position_embedding
        self.has_dropout = dropout_rate > 0 or attention_dropout_rate > 0

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
          deterministic: no dropout.
          rngs: stream `dropout` draws all the dropout masks of this call.

        Returns:
          float32 logits `[batch, num_classes]`.
        """
        if inputs.ndim != 2 or inputs.shape[1] > self.max_len:
            raise ValueError(f"inputs must be [batch, length] with length up to {self.max_len}, got {inputs.shape}")
        if mask is not None and mask.shape != inputs.shape:
            raise ValueError(f"mask must have the shape of inputs, {inputs.shape}, got {mask.shape}")
        if self.has_dropout and not deterministic and rngs is None:
            raise ValueError("deterministic=False needs rngs with a stream 'dropout', got rngs=None")
        x_BxTxW = self.embed(inputs)
        if self.pooling == "cls":
            x_BxTxW = jnp.pad(x_BxTxW, ((0, 0), (1, 0), (0, 0))).at[:, 0].set(self.cls[...].astype(x_BxTxW.dtype))
            mask = None if mask is None else jnp.pad(mask, ((0, 0), (1, 0)), constant_values=1)
        _, length, width = x_BxTxW.shape
        if self.position_embedding == "sinusoidal":
            x_BxTxW += jnp.asarray(sinusoidal_positions(length, width), x_BxTxW.dtype)
        elif self.position_embedding == "learned":
            x_BxTxW += self.learned_positions(length).astype(x_BxTxW.dtype)
        x_BxTxW = self.dropout(x_BxTxW, deterministic=deterministic, rngs=rngs)
        for block in self.blocks:
            x_BxTxW = block(x_BxTxW, mask, deterministic=deterministic, rngs=rngs)
        if self.norm == "pre":
            x_BxTxW = self.final_norm(x_BxTxW)
        x_BxTxW = x_BxTxW.astype(jnp.float32)
        return self.classify(x_BxTxW[:, 0] if self.pooling == "cls" else masked_mean(x_BxTxW, mask))
