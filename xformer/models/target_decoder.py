"""The decoder of an encoder-decoder: a language model that reads another sequence besides."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import jax
from flax import nnx

from xformer.attention import Attention, Shape, entries
from xformer.checks import ArgumentError
from xformer.models import cross_attention as cross
from xformer.models.decoder import Decoder
from xformer.models.encoder import EncoderOptions
from xformer.nn import Logits
from xformer.nn.check import check_heads
from xformer.nn.context import Context, ContextKeys

Array = jax.Array


class TargetDecoder(Decoder):
    """`Decoder` whose blocks attend to a context between self-attention and feed-forward layer.

    Args:
      vocab_size, max_len, tie_embeddings: see Decoder.
      cross_attention: the op of the attention to the context, or a stack of them; made for `context_len` positions.
      context_len: tokens of the longest context.
      options: the keywords of Encoder; `attention` is that of the decoder to its own tokens.

    Raises:
      ValueError: as Decoder, or a `cross_attention` that can't read another sequence, see `cross_attention.check`.
    """

    SLOT: ClassVar[str] = "decoder_attention"

    def __init__(
        self,
        vocab_size: int,
        max_len: int,
        *,
        cross_attention: Attention,
        context_len: int,
        tie_embeddings: bool = True,
        **options: Unpack[EncoderOptions],
    ):
        num_heads, num_kv_heads = options["num_heads"], options.get("num_kv_heads")
        head_dim = check_heads(options["width"], num_heads, num_kv_heads, options.get("head_dim"))
        cross.check(cross_attention, context_len, num_heads, head_dim, num_kv_heads)
        if options.get("scan_layers"):
            period, own = len(entries(options["attention"])), len(entries(cross_attention))
            if own not in (1, period):
                raise ArgumentError(
                    cross.SLOT,
                    f"{cross.SLOT} must have 1 entry or {period}, as decoder_attention, for scan_layers, got {own}",
                )
            shape = Shape(1, max_len, context_len, num_heads, head_dim, num_kv_heads)
            if any(op.plans(shape, options["num_layers"]) is not None for op in entries(cross_attention)):
                what = f"{cross.SLOT} must be the same in all layers for scan_layers, got {cross_attention}"
                raise ArgumentError(cross.SLOT, what)
        self._cross_attention = cross_attention
        super().__init__(vocab_size, max_len, tie_embeddings=tie_embeddings, **options)

    @property
    def cross_attention(self) -> Attention:
        return self._cross_attention

    def context_keys(self, context: Context) -> list[ContextKeys]:
        """The keys and values that each layer makes of a context, for `decode`. ValueError with `scan_layers`."""
        if self.scan_layers:
            raise ValueError("decoding needs the blocks in a list, got scan_layers=True: use model.unrolled()")
        return [block.cross_attention.context_keys(context) for block in self.blocks]

    def __call__(  # type: ignore[override]
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        context: Context,
        segment_ids: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Logits:
        """The logits at each token, for the next one; arguments as those of Decoder, and the `context`."""
        given: dict[str, Any] = {"segment_ids": segment_ids, "deterministic": deterministic, "rngs": rngs}
        return self.logits(self.encode(inputs, mask, context=context, **given))
