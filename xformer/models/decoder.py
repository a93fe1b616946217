"""The decoder: a language model that tells each next token from those before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.attention import Attention
from xformer.models.encoder import Encoder, EncoderOptions
from xformer.nn import Logits
from xformer.nn.cache import AnyCache
from xformer.nn.cached_rows import check_length
from xformer.nn.context import ContextKeys

Array = jax.Array
Caches = list[AnyCache]
"""What decoding keeps, one for each layer."""


class Decoder(Encoder):
    """Which token comes next? The blocks of `Encoder` with causal attention (Radford et al. 2018; 2019, section 2.3).

    `attention` is made causal, that of every entry of a stack; an op that can't be refuses. The logits at a token are
    its last vector times an output table: the embedding's own, not scaled (Press and Wolf 2017), or one of its own.

    Args:
      vocab_size, max_len: see Encoder.
      tie_embeddings: the output table is that of the embedding.
      options: the keywords of Encoder.

    Raises:
      ValueError: as Encoder.
      NotImplementedError: `attention` can't be causal.
    """

    def __init__(
        self, vocab_size: int, max_len: int, *, tie_embeddings: bool = True, **options: Unpack[EncoderOptions]
    ):
        options = {**options, "attention": make_causal(options["attention"])}
        super().__init__(vocab_size, max_len, **options)
        width, param_dtype, rngs = options["width"], options.get("param_dtype", jnp.float32), options["rngs"]
        init = nnx.initializers.normal(stddev=width**-0.5)
        own = None if tie_embeddings else nnx.Param(init(rngs.params(), (vocab_size, width), param_dtype))
        self.output_table: nnx.Param | None = own

    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        segment_ids: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Logits:
        """The logits at each token, for the next one.

        Args:
          inputs: int `[batch, length]` token ids.
          mask: bool `[batch, length]`, True where a token is real; None: all are.
          segment_ids: int `[batch, length]` of packed documents, each in one piece; see `Encoder.encode`. What an op
            counts in blocks (Local, BigBird) it counts from the beginning of the row, whatever the documents.
          deterministic: no dropout.
          rngs: stream `dropout` draws the dropout masks.

        Returns:
          `Logits` `[batch, length, vocab_size]`; those at t are for token t + 1.
        """
        return self.logits(self.encode(inputs, mask, segment_ids=segment_ids, deterministic=deterministic, rngs=rngs))

    def init_caches(self, batch: int, max_len: int | None = None) -> Caches:
        """Empty caches for decoding up to `max_len` tokens of each sequence, the model's own longest by default.

        Raises ValueError for a model with `scan_layers`: decode with `unrolled()`, the same model.
        """
        max_len = self.max_len if max_len is None else max_len
        if self.scan_layers:
            raise ValueError("decoding needs the blocks in a list, got scan_layers=True: use model.unrolled()")
        return [block.attention.init_cache(batch, max_len) for block in self.blocks]

    def decode(
        self,
        inputs: Array,
        caches: Caches,
        mask: Array | None = None,
        *,
        context: Sequence[ContextKeys] | None = None,
    ) -> tuple[Logits, Caches]:
        """The logits at tokens that follow those in the caches, and the caches after them.

        Token by token or many at once, the logits are those of one call with all tokens.

        Args:
          inputs: int `[batch, new]` token ids.
          caches: what `init_caches` or the call before gave.
          mask: bool `[batch, new]`, True at real tokens, which come first in each row; None: all are. The others are
            forgotten: the next token takes their place.
          context: what each layer's cross-attention reads; None where there is none.

        Raises:
          ValueError: tokens beyond the caches, where that is known when tracing; else their logits are NaN.
        """
        x_BxTxW = self.embed_tokens(inputs)
        length, max_len = caches[0].length, caches[0].max_len
        if self.token_types is not None:
            x_BxTxW += self.token_types(jnp.zeros_like(inputs))
        x_BxTxW = check_length(x_BxTxW[:, :, None], length, max_len)[:, :, 0]
        if self.positions is not None:
            places = length.reshape(-1, 1) + jnp.arange(inputs.shape[1], dtype=jnp.int32)
            x_BxTxW += self.positions.at(places, min(max_len, self.max_len))
        if self.embedding_norm is not None:
            x_BxTxW = self.embedding_norm(x_BxTxW)
        following: Caches = []
        read = [None] * len(caches) if context is None else context
        for block, cache, keys in zip(self.blocks, caches, read, strict=True):
            x_BxTxW, after = block(x_BxTxW, mask, cache=cache, context=keys)
            following.append(after)
        if self.final_norm is not None:
            x_BxTxW = self.final_norm(x_BxTxW)
        return self.logits(x_BxTxW.astype(jnp.float32)), following

    def logits(self, hidden: Array) -> Logits:
        """The logits of vectors float32 `[batch, length, width]`."""
        table: Any = self.embed.table if self.output_table is None else self.output_table
        return Logits(hidden, table[...].astype(jnp.float32))


def make_causal(attention: Attention) -> Attention:
    """The op with `causal=True`, or the stack with every entry causal. NotImplementedError where one can't be."""
    return attention if attention.causal else dataclasses.replace(attention, causal=True)
