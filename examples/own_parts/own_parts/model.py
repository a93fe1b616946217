"""A model: its positional arguments are sizes that the data gives, its keywords the keys of the `model` section."""

from __future__ import annotations

import jax
from flax import nnx

from xformer.attention import Attention
from xformer.nn import MultiHeadAttention, TokenEmbedding, masked_mean


class OneLayer(nnx.Module):
    """Embeds tokens, attends once and classifies the mean of the real ones."""

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        *,
        attention: Attention,
        width: int = 16,
        num_heads: int = 2,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed = TokenEmbedding(vocab_size, width, rngs=rngs)
        self.attend = MultiHeadAttention(num_heads, width, attention_fn=attention, rngs=rngs)
        self.classify = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(
        self, inputs: jax.Array, mask: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        x = self.embed(inputs)
        x = x + self.attend(x, mask, deterministic=deterministic, rngs=rngs)
        return self.classify(masked_mean(x, mask))
