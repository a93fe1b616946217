"""Translation before the Transformer: LSTMs, and attention to what they made of the source."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer.nn import BidirectionalLSTM, Logits, TokenEmbedding
from xformer.nn.additive_attention import AdditiveAttention, Annotations
from xformer.nn.check import check_dropout, check_rates, check_segments, check_sizes, check_tokens
from xformer.nn.dropout import Dropout
from xformer.nn.recurrent import begins

Array = jax.Array


class State(NamedTuple):
    """What the decoder knows of a target so far; the cache of decoding.

    Attributes:
      memory, output: of its LSTM, `[batch, hidden_dim]`.
      begun: bool `[batch]`, False before the first token, when the source gives the state.
    """

    memory: Array
    output: Array
    begun: Array


class Source(NamedTuple):
    """What the decoder reads of a source: its tokens, and the state that a target begins with."""

    annotations: Annotations
    memory: Array
    output: Array


class Seq2SeqLSTM(nnx.Module):
    """Which token of a target comes next, given its source? The model of Bahdanau et al. 2015, with LSTM cells.

    Layers of bidirectional LSTMs read the source (section 3.2). The decoder's LSTM begins with what the last layer read
    backwards to the first token (appendix A.2.2), reads at each token its embedding and, by additive attention with
    the state before, the source; logits come from a maxout layer of all three (Goodfellow et al. 2013). What stands in
    the padding of either side changes nothing.

    Args:
      vocab_size, max_len: token ids and longest length of sources.
      target_vocab_size, target_max_len: of targets; None: as the sources'.
      num_layers: of the encoder.
      width: features of an embedding, and of the attention's sums. hidden_dim: of an LSTM.
      shared_embeddings: one table of vectors for the tokens of both sides.
      tie_embeddings: the output table is that of the target's embedding.
      dropout_rate: on embeddings, on what a layer gives, and on what logits are made of.
      remat: the backward pass keeps the states of the LSTMs alone and computes the rest again.
      dtype: of the computation; logits are float32. param_dtype: of the parameters. rngs: stream `params`.

    Raises:
      ValueError: a size or rate out of range, or `shared_embeddings` with vocabularies of two sizes.
    """

    def __init__(
        self,
        vocab_size: int,
        max_len: int,
        *,
        target_vocab_size: int | None = None,
        target_max_len: int | None = None,
        num_layers: int = 1,
        width: int,
        hidden_dim: int,
        shared_embeddings: bool = True,
        tie_embeddings: bool = True,
        dropout_rate: float = 0.0,
        remat: bool = False,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes(vocab_size=vocab_size, max_len=max_len, target_vocab_size=target_vocab_size)
        check_sizes(target_max_len=target_max_len, num_layers=num_layers, width=width, hidden_dim=hidden_dim)
        check_rates(dropout_rate=dropout_rate)
        target_vocab_size = vocab_size if target_vocab_size is None else target_vocab_size
        if shared_embeddings and target_vocab_size != vocab_size:
            raise ValueError(
                "shared_embeddings must be False where vocabularies differ, got "
                f"{vocab_size} and {target_vocab_size} ids"
            )
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.embed = TokenEmbedding(vocab_size, width, **dtypes)
        self.target_embed = self.embed if shared_embeddings else TokenEmbedding(target_vocab_size, width, **dtypes)
        read = [width] + [2 * hidden_dim] * (num_layers - 1)
        self.layers = nnx.List([BidirectionalLSTM(size, hidden_dim, remat=remat, **dtypes) for size in read])
        self.start = nnx.Linear(hidden_dim, 2 * hidden_dim, **dtypes)
        self.attention = AdditiveAttention(hidden_dim, 2 * hidden_dim, width, **dtypes)
        self.cell = nnx.OptimizedLSTMCell(width + 2 * hidden_dim, hidden_dim, **dtypes)
        self.maxout = nnx.Linear(width + 3 * hidden_dim, 2 * width, **dtypes)
        init = nnx.initializers.normal(stddev=width**-0.5)
        own = None if tie_embeddings else nnx.Param(init(rngs.params(), (target_vocab_size, width), param_dtype))
        self.output_table: nnx.Param | None = own
        self.dropout = Dropout(dropout_rate)
        self.max_len, self.target_max_len = max_len, max_len if target_max_len is None else target_max_len
        self.hidden_dim, self.remat, self.dtype, self.has_dropout = hidden_dim, remat, dtype, dropout_rate > 0

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
        """The logits at each token of the targets, for the next one; arguments and result as those of `EncoderDecoder`.

        Raises:
          ValueError: inputs of another rank or too long, dropout without `rngs`, or segments of one side only.
        """
        check_segments(segment_ids, decoder_segment_ids)
        check_dropout(self.has_dropout, deterministic, rngs)
        check_tokens("decoder_inputs", decoder_inputs, self.target_max_len)
        drop: dict[str, Any] = {"deterministic": deterministic, "rngs": rngs}
        backward, source = self._encode(inputs, mask, segment_ids, drop)
        by_token: dict[str, Array] = {}
        if segment_ids is not None and decoder_segment_ids is not None:
            own_BxTxJ = decoder_segment_ids[:, :, None] == segment_ids[:, None]
            first_BxTx1 = jnp.argmax(own_BxTxJ, axis=-1)[..., None]
            memory, output = self._begin(jnp.take_along_axis(backward, first_BxTx1, axis=1))
            by_token = {"allowed": own_BxTxJ, "memory": memory, "output": output, "begins": begins(decoder_segment_ids)}
        embedded = self.dropout(self.target_embed(decoder_inputs), **drop)
        state = self.init_caches(len(inputs))
        hidden, _ = self._read_target(embedded, decoder_mask, state, source, by_token)
        return self._logits(self.dropout(hidden, **drop))

    def read(self, inputs: Array, mask: Array | None = None) -> Source:
        """The encoder's pass over sources, int and bool `[batch, length]`, for `decode`."""
        return self._encode(inputs, mask, None, {"deterministic": True})[1]

    def init_caches(self, batch: int, max_len: int | None = None) -> State:
        """The state before the first token of so many targets; it is as large for any length."""
        del max_len
        zeros = jnp.zeros((batch, self.hidden_dim), self.dtype)
        return State(zeros, zeros, jnp.zeros(batch, bool))

    def decode(
        self, inputs: Array, caches: State, mask: Array | None = None, *, context: Source
    ) -> tuple[Logits, State]:
        """The logits at tokens of targets that follow those read before, and the state after them.

        Args:
          inputs: int `[batch, new]` token ids. There may be several targets of each source, one after the other.
          caches: what `init_caches` or the call before gave.
          mask: bool `[batch, new]`, True at real tokens, which come first; None: all are.
          context: what `read` gave of the sources.
        """
        hidden, state = self._read_target(self.target_embed(inputs), mask, caches, context, {})
        return self._logits(hidden), state

    def unrolled(self) -> Self:
        """The model itself: its layers are in lists."""
        return self

    def _encode(
        self, inputs: Array, mask: Array | None, segment_ids: Array | None, drop: dict[str, Any]
    ) -> tuple[Array, Source]:
        """(what the last layer read backwards, `[batch, length, hidden_dim]`; what the decoder reads)."""
        check_tokens("inputs", inputs, self.max_len)
        x_BxTxW = self.dropout(self.embed(inputs), **drop)
        for layer in self.layers:
            x_BxTxW, (_, (_, first_BxH)) = layer(x_BxTxW, mask, segment_ids)
            x_BxTxW = self.dropout(x_BxTxW, **drop)
        memory, output = self._begin(first_BxH)
        return x_BxTxW[..., self.hidden_dim :], Source(self.attention.annotations(x_BxTxW, mask), memory, output)

    def _begin(self, backward: Array) -> list[Array]:
        """Memory and output of the decoder before a target, from what was read backwards to its source's beginning."""
        return jnp.split(jnp.tanh(self.start(backward)), 2, axis=-1)

    def _read_target(
        self, embedded: Array, mask: Array | None, state: State, source: Source, by_token: dict[str, Array]
    ) -> tuple[Array, State]:
        """What logits are made of at each token, `[batch, length, width]`, and the state after the last.

        by_token: of targets that share rows, at each of their tokens: `allowed` tokens of the source, and the `memory`
        and `output` that a target `begins` with.
        """
        batch, length = embedded.shape[:2]
        real_BxT = jnp.ones((batch, length), bool) if mask is None else mask > 0
        graphdef, params = nnx.split((self.attention, self.cell))
        again = batch // len(source.memory)
        first = State(jnp.repeat(source.memory, again, 0), jnp.repeat(source.output, again, 0), jnp.ones(batch, bool))

        def step(state: State, token: dict[str, Array]) -> tuple[State, tuple[Array, Array]]:
            attention, cell = nnx.merge(graphdef, params)
            state = _choose(state.begun, state, first)
            if "begins" in token:
                state = _choose(token["begins"], State(token["memory"], token["output"], state.begun), state)
            read_BxD = attention(state.output, source.annotations, token.get("allowed"))
            given = jnp.concatenate([token["embedded"], read_BxD], axis=-1)
            (memory, output), _ = cell((state.memory, state.output), given)
            after = _choose(token["real"], State(memory, output, jnp.ones_like(state.begun)), state)
            return after, (read_BxD, output)

        if self.remat:
            step = jax.checkpoint(step, prevent_cse=False)
        tokens = {"embedded": embedded, "real": real_BxT, **by_token}
        by_time = lambda tree: jax.tree.map(lambda x: x.swapaxes(0, 1), tree)
        after, found = jax.lax.scan(step, state, by_time(tokens))
        pairs = self.maxout(jnp.concatenate([embedded, *by_time(found)], axis=-1))
        return pairs.reshape(batch, length, -1, 2).max(axis=-1), after

    def _logits(self, hidden: Array) -> Logits:
        table: Any = self.target_embed.table if self.output_table is None else self.output_table
        return Logits(hidden.astype(jnp.float32), table[...].astype(jnp.float32))


def _choose(where: Array, chosen: State, other: State) -> State:
    """The one state of some rows and the other of the rest; where: bool `[batch]`."""
    pick = lambda x, y: jnp.where(where.reshape(-1, *[1] * (x.ndim - 1)), x, y)
    return State(*map(pick, chosen, other))
