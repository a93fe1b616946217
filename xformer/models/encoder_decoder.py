"""The encoder-decoder: from one sequence to another (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.attention import Attention, Full, entries
from xformer.models.decoder import Caches
from xformer.models.encoder import Encoder, EncoderOptions
from xformer.models.target_decoder import TargetDecoder
from xformer.nn import Logits
from xformer.nn.check import check_segments, check_sizes
from xformer.nn.context import Context, ContextKeys
from xformer.nn.params import has_params

Array = jax.Array


class EncoderDecoder(Encoder):
    """Which token of a target comes next, given its source? An encoder, and a decoder that attends to what it gives.

    Attention stands in three slots (section 3.2.3): `attention` of the source to itself; `decoder_attention` of the
    target to its own earlier tokens, made causal; `cross_attention` of the target to its source, which takes ops to
    which positions mean nothing (Full, Linformer, Linear, Performer, Compressed, without position terms), as a position
    of the one sequence is none of the other. What stands in the padding of either changes nothing.

    Args:
      vocab_size, max_len: token ids and longest length of sources.
      target_vocab_size, target_max_len: of targets; None: as the sources'.
      decoder_attention, cross_attention: an op, or a stack of them (`Layers`); None: Full.
      num_decoder_layers: None: `num_layers`, as many as the encoder has.
      shared_embeddings: one table of vectors for the tokens of both sides (section 3.4).
      tie_embeddings: the output table is that of the target's embedding.
      options: the keywords of Encoder, for both halves. `global_projections` and `num_token_types` are the encoder's
        alone; `share_qk` is for the attention of either to itself.

    What the encoder has has the paths and shapes of any `Encoder`, so that `train.init_from` takes it over.

    Raises:
      ValueError: as Encoder and TargetDecoder, or `shared_embeddings` with vocabularies of two sizes.
      NotImplementedError: `decoder_attention` can't be causal.
    """

    ATTENTION_SLOTS: ClassVar[Mapping[str, str]] = {
        "decoder_attention": "target_max_len",
        "cross_attention": "max_len",
    }
    """The further attention ops that it takes, and the size that says for how many positions each is made."""

    def __init__(
        self,
        vocab_size: int,
        max_len: int,
        *,
        target_vocab_size: int | None = None,
        target_max_len: int | None = None,
        decoder_attention: Attention | None = None,
        cross_attention: Attention | None = None,
        num_decoder_layers: int | None = None,
        shared_embeddings: bool = True,
        tie_embeddings: bool = True,
        **options: Unpack[EncoderOptions],
    ):
        check_sizes(target_vocab_size=target_vocab_size, target_max_len=target_max_len)
        check_sizes(num_decoder_layers=num_decoder_layers)
        target_vocab_size = vocab_size if target_vocab_size is None else target_vocab_size
        if shared_embeddings and target_vocab_size != vocab_size:
            sizes = f"{vocab_size} and {target_vocab_size} ids"
            raise ValueError(f"shared_embeddings must be False where vocabularies differ, got {sizes}")
        given: dict[str, Any] = {**options}
        if (pooling := given.get("pooling")) is not None:
            raise ValueError(f"pooling must be None, as all tokens of a source are read, got {pooling!r}")
        self.target_max_len = max_len if target_max_len is None else target_max_len
        of_source, of_target, of_both = options["attention"], decoder_attention or Full(), cross_attention or Full()
        alone = {"global_projections": False, "num_token_types": 0}
        decoder_options: dict[str, Any] = {**options, "attention": of_target, **alone}
        if num_decoder_layers is not None:
            decoder_options["num_layers"] = num_decoder_layers
        if options.get("share_attention_params"):  # where there is something to share
            own = any(map(has_params, entries(of_source)))
            decoder_options["share_attention_params"] = any(map(has_params, (*entries(of_target), *entries(of_both))))
            options = {**options, "share_attention_params": own or not decoder_options["share_attention_params"]}
        super().__init__(vocab_size, max_len, **options)
        self.target_decoder = TargetDecoder(
            target_vocab_size,
            self.target_max_len,
            cross_attention=of_both,
            context_len=max_len,
            tie_embeddings=tie_embeddings,
            **decoder_options,
        )
        if shared_embeddings:
            self.target_decoder.embed = self.embed
        self.dtype = options.get("dtype", jnp.float32)

    def __call__(
        self,
        inputs: Array,
        mask: Array | None,
        decoder_inputs: Array,
        decoder_mask: Array | None = None,
        *,
        segment_ids: Array | None = None,
        decoder_segment_ids: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Logits:
        """The logits at each token of the targets, for the next one.

        Args:
          inputs: int `[batch, length]` token ids of the sources; mask: bool likewise, True where a token is real; None:
            all are.
          decoder_inputs, decoder_mask: likewise `[batch, target_length]`, the targets as the decoder reads them, each
            token after the one that told it.
          segment_ids, decoder_segment_ids: int likewise: which of the pairs that share a row a token is of, where some
            do. A target reads the source of its own segment. None: a row is one pair.
          deterministic: no dropout.
          rngs: stream `dropout` draws the dropout masks.

        Returns:
          `Logits` `[batch, target_length, target_vocab_size]`; those at t are for token t + 1.

        Raises:
          ValueError: as `Encoder.encode`, or segments of one side only.
        """
        check_segments(segment_ids, decoder_segment_ids)
        given: dict[str, Any] = {"deterministic": deterministic, "rngs": rngs}
        hidden = self.encode(inputs, mask, segment_ids=segment_ids, **given).astype(self.dtype)
        segments = None
        if segment_ids is not None and decoder_segment_ids is not None:
            segments = decoder_segment_ids, segment_ids
        context = Context(hidden, mask, segments)
        return self.target_decoder(
            decoder_inputs, decoder_mask, context=context, segment_ids=decoder_segment_ids, **given
        )

    def read(self, inputs: Array, mask: Array | None = None) -> list[ContextKeys]:
        """The encoder's pass over sources, and the keys and values that each layer of the decoder makes of them, once.

        Arguments as those of a call. Raises ValueError for a model with `scan_layers`: use `unrolled()`.
        """
        hidden = self.encode(inputs, mask).astype(self.dtype)
        return self.target_decoder.context_keys(Context(hidden, mask))

    def init_caches(self, batch: int, max_len: int | None = None) -> Caches:
        """Empty caches for decoding up to `max_len` tokens of each target; see `Decoder.init_caches`."""
        return self.target_decoder.init_caches(batch, max_len)

    def decode(
        self, inputs: Array, caches: Caches, mask: Array | None = None, *, context: Sequence[ContextKeys]
    ) -> tuple[Logits, Caches]:
        """The logits at tokens of targets that follow those in the caches, and the caches after them.

        Args:
          inputs, caches, mask: see `Decoder.decode`. There may be several targets of each source, one after the other.
          context: what `read` gave of the sources.
        """
        return self.target_decoder.decode(inputs, caches, mask, context=context)

    def unrolled(self) -> Self:
        """The same model with its blocks in lists; see `Encoder.unrolled`."""
        model = super().unrolled()
        model.target_decoder = model.target_decoder.unrolled()
        return model
