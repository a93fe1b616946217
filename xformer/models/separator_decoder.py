"""The decoder that reads source and target as one sequence (Liu et al. 2018, "Generating Wikipedia", section 4.2.3)."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from xformer.models.decoder import Caches, Decoder
from xformer.models.encoder import EncoderOptions
from xformer.nn import Logits
from xformer.nn.check import check_segments, check_sizes, check_tokens

Array = jax.Array


class SeparatorDecoder(Decoder):
    """Which token of a target comes next, given its source? A causal decoder of source, separator and target in a row.

    It is called as `EncoderDecoder` is, and half as large: no encoder, no cross-attention. The separator is the id 0
    that targets begin with. Within a row nothing stands between a source and its target, however much padding there
    is, so positions and blocks count through both. A source attends causally too, and the logits are those of the
    target alone. The paper's T-D has full attention; its T-DMCA alternates `Local` and `Compressed`, which a stack
    (`Layers`) describes.

    Args:
      vocab_size, max_len: token ids and longest length of sources.
      target_vocab_size: None: `vocab_size`, as both are one sequence.
      target_max_len: tokens of a target as it is read, the separator first; None: `max_len`.
      tie_embeddings: see Decoder.
      options: the keywords of Encoder. `attention` is for `max_len + target_max_len` positions.

    Raises:
      ValueError: as Decoder, or a `target_vocab_size` other than `vocab_size`.
      NotImplementedError: `attention` can't be causal.
    """

    def __init__(
        self,
        vocab_size: int,
        max_len: int,
        *,
        target_vocab_size: int | None = None,
        target_max_len: int | None = None,
        tie_embeddings: bool = True,
        **options: Unpack[EncoderOptions],
    ):
        check_sizes(max_len=max_len, target_max_len=target_max_len)
        if target_vocab_size not in (None, vocab_size):
            raise ValueError(f"target_vocab_size must be vocab_size {vocab_size} or None, got {target_vocab_size}")
        self.source_max_len = max_len
        self.target_max_len = max_len if target_max_len is None else target_max_len
        super().__init__(vocab_size, max_len + self.target_max_len, tie_embeddings=tie_embeddings, **options)

    @staticmethod
    def num_positions(max_len: int, pooling: str | None = None, target_max_len: int = 0) -> int:
        """The positions that attention sees of a source of `max_len` tokens with its target."""
        del pooling  # it has none
        return max_len + target_max_len

    def __call__(  # type: ignore[override]
        self,
        inputs: Array,
        mask: Array | None,
        decoder_inputs: Array,
        decoder_mask: Array | None = None,
        *,
        segment_ids: Array | None = None,
        decoder_segment_ids: Array | None = None,
        deterministic: bool = True,
        rngs: Any = None,
    ) -> Logits:
        """The logits at each token of the targets, for the next one; arguments and result as those of `EncoderDecoder`.

        Of pairs that share a row (`segment_ids`) each source is followed by its own target.

        Raises ValueError as `Encoder.encode` does, for sources or targets that are too long, or segments of one side.
        """
        check_segments(segment_ids, decoder_segment_ids)
        check_tokens("inputs", inputs, self.source_max_len)
        check_tokens("decoder_inputs", decoder_inputs, self.target_max_len)
        real_BxT = [
            jnp.ones(tokens.shape, bool) if own is None else own > 0
            for tokens, own in ((inputs, mask), (decoder_inputs, decoder_mask))
        ]
        segments_BxT: Any = (segment_ids, decoder_segment_ids)
        if segment_ids is None:
            segments_BxT = [jnp.ones(real.shape, jnp.int32) for real in real_BxT]
        order_BxT = in_one_row(segments_BxT, real_BxT)
        tokens_BxT, rows_real_BxT, rows_segments_BxT = (
            jnp.take_along_axis(jnp.concatenate(pair, axis=1), order_BxT, axis=1)
            for pair in ((inputs, decoder_inputs), real_BxT, segments_BxT)
        )
        hidden_BxTxW = self.encode(
            tokens_BxT,
            rows_real_BxT,
            segment_ids=None if segment_ids is None else rows_segments_BxT,
            deterministic=deterministic,
            rngs=rngs,
        )
        place_BxT = jnp.argsort(order_BxT, axis=1)[:, inputs.shape[1] :]
        return self.logits(jnp.take_along_axis(hidden_BxTxW, place_BxT[..., None], axis=1))

    def read(self, inputs: Array, mask: Array | None = None) -> Caches:
        """The caches after sources, with room for the longest target of each. Arguments as those of a call.

        Raises ValueError for a model with `scan_layers`: use `unrolled()`.
        """
        caches = super().init_caches(len(inputs), inputs.shape[1] + self.target_max_len)
        return super().decode(inputs, caches, mask)[1]

    def init_caches(self, batch: int, max_len: int | None = None) -> Caches:
        """No caches yet: what `read` gives are those of the first call of `decode`."""
        del batch, max_len
        return []

    def decode(  # type: ignore[override]
        self, inputs: Array, caches: Caches, mask: Array | None = None, *, context: Caches | None = None
    ) -> tuple[Logits, Caches]:
        """The logits at tokens of targets that follow those in the caches, and the caches after them.

        Args:
          inputs, mask: see `Decoder.decode`; one target of each source.
          caches: what the call before gave, or `init_caches`.
          context: what `read` gave of the sources; read in the first call only.
        """
        return super().decode(inputs, caches or context or [], mask)


def in_one_row(segments: Any, real: Any) -> Array:
    """Where each place of a row takes its token from: each segment's source, then its target, all padding at the end.

    Args:
      segments, real: of sources and targets, int and bool `[batch, length]` and `[batch, target_length]`; segments in
        ascending order, tokens in order within each.

    Returns:
      int32 `[batch, length + target_length]`, places in the concatenation of source and target.
    """
    key_BxT = jnp.concatenate([2 * segments[0], 2 * segments[1] + 1], axis=1)
    last = jnp.iinfo(key_BxT.dtype).max
    return jnp.argsort(jnp.where(jnp.concatenate(real, axis=1), key_BxT, last), axis=1, stable=True)
