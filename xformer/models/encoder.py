"""The trunk that all encoders share: embeddings, blocks and a final norm. A model adds its head."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Required, Self, TypedDict, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer import layer_terms
from xformer.attention import Attention, Shape, entries, tree_paths
from xformer.checks import ArgumentError, check_integer
from xformer.nn import (
    Activation,
    AttentionPooling,
    EncoderBlock,
    NormType,
    TokenEmbedding,
    make_positions,
    masked_mean,
    stack,
)
from xformer.nn.check import check_dropout, check_heads, check_rates, check_sizes, check_tokens
from xformer.nn.context import Context
from xformer.nn.dropout import Dropout
from xformer.nn.norm import make_norm
from xformer.nn.params import has_params

Array = jax.Array
Pooling = Literal["mean", "attention", "cls", "first", "last"]
MAX_LAYERS = 2048  # each is built and traced by itself: a slip of the finger must not take hours


class EncoderOptions(TypedDict, total=False):
    """The keywords of `Encoder`, for the `**options` that a model hands on to it."""

    attention: Required[Attention]
    num_layers: Required[int]
    width: Required[int]
    num_heads: Required[int]
    mlp_dim: Required[int]
    dropout_rate: float
    attention_dropout_rate: float
    hidden_dropout_rate: float | None
    norm: Literal["pre", "post"]
    norm_type: NormType
    norm_epsilon: float
    activation: Activation
    qk_norm: bool
    num_experts: int
    experts_per_token: int
    expert_capacity: float
    balance_weight: float
    global_projections: bool
    position_embedding: Literal["sinusoidal", "learned", "none"]
    position_offset: int
    num_token_types: int
    depth_embedding: Literal["sinusoidal", "learned", "none"]
    max_depth: int
    scale_embeddings: bool
    embedding_norm: bool
    share_attention_params: bool
    remat: bool
    scan_layers: bool
    num_kv_heads: int | None
    head_dim: int | None
    share_qk: bool
    dtype: Dtype
    param_dtype: Dtype
    rngs: Required[nnx.Rngs]


class Encoder(nnx.Module):
    """Maps token sequences to vectors: embeddings, `num_layers` encoder blocks and, after pre-norm blocks, a norm.

    Layer i attends with `attention.at_layer(i)`; relative and rotary positions are part of `attention`. With
    `xformer.attention.Layers` the layers attend differently. What stands in padding changes nothing. Neither does how
    much padding there is, except in bidirectional BigBird, whose pattern is a function of the padded length.

    `pooling="cls"` puts a trained vector in front: token t then stands at position t + 1, for position embeddings and
    for attention, which sees length + 1 positions.

    Args:
      vocab_size: token ids are in [0, vocab_size).
      max_len: longest input in tokens, not counting the CLS vector.
      pooling: what `pool` makes one vector of: "mean" of the real tokens, "attention", their mean weighted by a trained
        query (Yang et al. 2016, equations 5 to 7), "cls", "first", the first token, which the tokenizer puts there, or
        "last", the last real token. None: `pool` is not called.
      attention: an `xformer.attention` op.
      num_layers: number of blocks. width, num_heads, mlp_dim, num_kv_heads, head_dim, share_qk, norm, norm_type,
        norm_epsilon, activation, qk_norm, num_experts, experts_per_token, expert_capacity, balance_weight,
        global_projections: see EncoderBlock.
      dropout_rate: on embeddings and in blocks. attention_dropout_rate: on attention weights.
        hidden_dropout_rate: inside feed-forward layers; None: as `dropout_rate`.
      position_embedding: "sinusoidal", "learned" or "none"; added to the token embeddings.
      position_offset: rows of learned positions before the first token's; above 0, real tokens alone are counted, as
        RoBERTa does (Liu et al. 2019, whose tables have 2 such rows).
      num_token_types: kinds of tokens, each with a vector that is added to the token embeddings (BERT's segments:
        Devlin et al. 2019, section 3); 0: none.
      depth_embedding: likewise of how deep a token is in its tree, "sinusoidal", "learned" or "none" (absolute
        structural positions of Wang et al. 2019, who merge them with those in the sequence by a layer; here they are
        added). A root has depth 1, what is in no tree 0.
      max_depth: tokens that are deeper in their tree count as their ancestor at that depth, for position terms too.
      scale_embeddings: vectors of tokens and learned positions are multiplied by sqrt(width).
      embedding_norm: a norm of the sum of the embeddings, before their dropout.
      share_attention_params: one set of the op's own parameters for all layers (Linformer's layerwise sharing); with
        `Layers`, one for all layers of an entry.
      remat: the backward pass keeps only the input of each block and computes the rest of it again.
      scan_layers: the blocks are one, with parameters `[num_layers, ...]`, scanned over: compile time does not grow
        with depth. Parameters, random blocks and results of each layer are those of the unrolled model. With `Layers`
        there is one such block for each entry, and `num_layers` is a multiple of the number of entries.
      dtype: of the computation, but what comes after the last block is float32. param_dtype: of the parameters.
      rngs: stream `params` draws the parameters. No random state stays in the model.

    Raises:
      ValueError: an unknown choice, a size or rate out of range, an op made for fewer positions, a causal op with a CLS
        vector, which would see no token, a number of layers that does not fit the entries, or nothing to share.
    """

    SLOT: ClassVar[str] = "attention"  # what messages call the op

    def __init__(
        self,
        vocab_size: int,
        max_len: int,
        pooling: Pooling | None = None,
        *,
        attention: Attention,
        num_layers: int,
        width: int,
        num_heads: int,
        mlp_dim: int,
        dropout_rate: float = 0.0,
        attention_dropout_rate: float = 0.0,
        hidden_dropout_rate: float | None = None,
        norm: Literal["pre", "post"] = "pre",
        norm_type: NormType = "layer",
        norm_epsilon: float = 1e-6,
        activation: Activation = "gelu",
        qk_norm: bool = False,
        num_experts: int = 1,
        experts_per_token: int = 1,
        expert_capacity: float = 1.25,
        balance_weight: float = 0.01,
        global_projections: bool = False,
        position_embedding: Literal["sinusoidal", "learned", "none"] = "sinusoidal",
        position_offset: int = 0,
        num_token_types: int = 0,
        depth_embedding: Literal["sinusoidal", "learned", "none"] = "none",
        max_depth: int = 16,
        scale_embeddings: bool = True,
        embedding_norm: bool = False,
        share_attention_params: bool = False,
        remat: bool = False,
        scan_layers: bool = False,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        share_qk: bool = False,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_sizes(vocab_size=vocab_size, max_len=max_len, num_layers=num_layers)
        self.heads = (num_heads, check_heads(width, num_heads, num_kv_heads, head_dim), num_kv_heads)
        check_rates(dropout_rate=dropout_rate, attention_dropout_rate=attention_dropout_rate)
        check_rates(hidden_dropout_rate=hidden_dropout_rate or 0.0)
        check_integer("num_token_types", num_token_types, at_least=0)
        check_integer("max_depth", max_depth)
        if num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers must be at most {MAX_LAYERS}, got {num_layers}")
        if pooling not in (*get_args(Pooling), None):
            raise ValueError(f"pooling must be one of {', '.join(map(repr, get_args(Pooling)))}, got {pooling!r}")
        num_positions = Encoder.num_positions(max_len, pooling)
        self.period, cross = len(entries(attention)), self.cross_attention
        shared = share_attention_params and not any(map(has_params, entries(cross) if cross is not None else ()))
        _check_attention(self.SLOT, attention, num_positions, num_layers, pooling, scan_layers, shared)

        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        vectors: dict[str, Any] = {"scale": scale_embeddings, **dtypes, "rngs": rngs}
        self.embed: Any = self.make_embedding(vocab_size, width, **vectors)
        self.cls = nnx.Param(jax.random.normal(rngs.params(), (width,), param_dtype)) if pooling == "cls" else None
        self.positions: Any = self.make_positions(
            position_embedding, num_positions, width, offset=position_offset, **vectors
        )
        self.token_types = TokenEmbedding(num_token_types, width, **vectors) if num_token_types else None
        self.depths: Any = _make_depths(depth_embedding, max_depth + 1, width, **vectors)
        make_own_norm = lambda: make_norm(norm_type, width, epsilon=norm_epsilon, **dtypes, rngs=rngs)
        self.embedding_norm = make_own_norm() if embedding_norm else None
        self.dropout = Dropout(dropout_rate)

        def make_block(rngs: nnx.Rngs, layer: int = 0) -> EncoderBlock:
            return EncoderBlock(
                width,
                num_heads,
                mlp_dim,
                attention_fn=attention.at_layer(layer),
                cross_attention_fn=None if cross is None else cross.at_layer(layer),
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                share_qk=share_qk,
                global_projections=global_projections,
                norm=norm,
                norm_type=norm_type,
                norm_epsilon=norm_epsilon,
                activation=activation,
                qk_norm=qk_norm,
                num_experts=num_experts,
                experts_per_token=experts_per_token,
                expert_capacity=expert_capacity,
                balance_weight=balance_weight,
                dropout_rate=dropout_rate,
                attention_dropout_rate=attention_dropout_rate,
                hidden_dropout_rate=hidden_dropout_rate,
                **dtypes,
                rngs=rngs,
            )

        self.blocks: Any
        if scan_layers:
            stacked = stack.make_stacked(
                make_block, num_layers, period=self.period, rngs=rngs, shared=share_attention_params
            )
            self.blocks = nnx.List(stacked) if self.period > 1 else stacked[0]
        else:
            self.blocks = nnx.List(
                stack.make_blocks(make_block, num_layers, period=self.period, rngs=rngs, shared=share_attention_params)
            )
        # Post-norm blocks end on a norm of their own.
        self.final_norm = make_own_norm() if norm == "pre" else None
        pooled = pooling == "attention"
        self.weighted_mean = AttentionPooling(width, param_dtype=param_dtype, rngs=rngs) if pooled else None
        self.attention, self.num_layers, self.max_len = attention, num_layers, max_len
        self.share_attention_params, self.remat, self.scan_layers = share_attention_params, remat, scan_layers
        self.pooling, self.position_offset, self.max_depth = pooling, position_offset, max_depth
        self.has_dropout = max(dropout_rate, attention_dropout_rate, hidden_dropout_rate or 0.0) > 0

    @property
    def cross_attention(self) -> Attention | None:
        """The op that attends to another sequence, or a stack; a model whose blocks do that overrides it."""
        return None

    @staticmethod
    def num_positions(max_len: int, pooling: str | None = None) -> int:
        """The positions that attention sees of an input of `max_len` tokens; the CLS vector is one more."""
        return max_len + (pooling == "cls")

    # What a model of other inputs than token ids overrides.

    def make_embedding(self, vocab_size: int, width: int, **vectors: Any) -> nnx.Module:
        """What `embed_tokens` calls; `vectors` are the keywords of `TokenEmbedding`."""
        return TokenEmbedding(vocab_size, width, **vectors)

    def make_positions(self, kind: Any, num_positions: int, width: int, **options: Any) -> nnx.Module | None:
        """What gives the vectors that are added for positions; see `xformer.nn.make_positions`."""
        return make_positions(kind, num_positions, width, **options)

    def check_inputs(self, inputs: Array) -> None:
        """Raises ValueError for inputs of a shape that the model does not read."""
        check_tokens("inputs", inputs, self.max_len)

    def embed_tokens(self, inputs: Array) -> Array:
        """The vectors of token ids `[batch, length]`, without positions; a model with ids of its own overrides it."""
        return self.embed(inputs)

    def encode(
        self,
        inputs: Array,
        mask: Array | None = None,
        *,
        token_types: Array | None = None,
        global_tokens: Array | None = None,
        segment_ids: Array | None = None,
        parents: Array | None = None,
        context: Context | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """The vectors that the last layer gives.

        Args:
          inputs: int `[batch, length]` token ids.
          mask: bool `[batch, length]`, True where a token is real; None: all are.
          token_types: int `[batch, length]` below `num_token_types`; None: all are 0. A CLS vector has none.
          global_tokens: bool `[batch, length]`, True at tokens that attend to all and are attended by all, for ops that
            tell them apart (`Longformer`); a CLS vector is one of them. None: the op's own.
          segment_ids: int `[batch, length]` of packed documents, each in one piece: tokens of different segments do not
            attend to each other, and position embeddings count from 0 in each. None: a row is one document.
          parents: int `[batch, length]`, the place of each token's parent in its tree, negative at roots, for
            `depth_embedding` and position terms that read trees; other models leave them aside. Of padding any number;
            a CLS vector is in no tree.
          deterministic: no dropout.
          rngs: stream `dropout` draws all the dropout masks of this call.

        Returns:
          float32 `[batch, length, width]`; with a CLS vector `[batch, 1 + length, width]`, its own first.

        Raises:
          ValueError: inputs of another rank or longer than `max_len`, dropout without `rngs`, token types that the
            model does not have, or no `parents` where it needs them.
        """
        self.check_inputs(inputs)
        check_dropout(self.has_dropout, deterministic, rngs)
        if token_types is not None and self.token_types is None:
            raise ValueError("token_types must be None where num_token_types is 0, got an array")
        paths_BxTxN = self._paths(parents, mask)
        x_BxTxW = self.embed_tokens(inputs)
        if self.token_types is not None:
            no_types = jnp.zeros(x_BxTxW.shape[:2], jnp.int32)
            x_BxTxW += self.token_types(no_types if token_types is None else token_types)
        if self.cls is not None:
            x_BxTxW = jnp.pad(x_BxTxW, ((0, 0), (1, 0), (0, 0))).at[:, 0].set(self.cls[...].astype(x_BxTxW.dtype))
            first = lambda x: None if x is None else jnp.pad(x, ((0, 0), (1, 0)), constant_values=1)
            mask, global_tokens = first(mask), first(global_tokens)
            paths_BxTxN = None if paths_BxTxN is None else jnp.pad(paths_BxTxN, ((0, 0), (1, 0), (0, 0)))
        if self.positions is not None:
            if segment_ids is not None:
                x_BxTxW += self.positions.at(positions_in_segments(segment_ids), self.max_len)
            elif self.position_offset and mask is not None:
                real_BxT = jnp.cumsum(mask > 0, axis=1, dtype=jnp.int32)
                x_BxTxW += self.positions.at(jnp.maximum(real_BxT - 1, 0), x_BxTxW.shape[1])
            else:
                x_BxTxW += self.positions(x_BxTxW.shape[1])
        if self.depths is not None and paths_BxTxN is not None:
            x_BxTxW += self.depths.at((paths_BxTxN > 0).sum(-1), self.max_depth + 1)
        if self.embedding_norm is not None:
            x_BxTxW = self.embedding_norm(x_BxTxW)
        x_BxTxW = self.dropout(x_BxTxW, deterministic=deterministic, rngs=rngs)
        keys = None
        if self.has_dropout and not deterministic and rngs is not None:
            keys = jax.random.split(rngs.dropout(), self.num_layers)
        if self.scan_layers:
            length = x_BxTxW.shape[1]
            plans = self.attention.plans(Shape(len(inputs), length, length, *self.heads), self.num_layers)
            plans = stack.plans_by_block(self.attention, plans)
            x_BxTxW, terms = stack.scan_blocks(
                self.stacked_blocks,
                self.num_layers,
                x_BxTxW,
                mask,
                keys=keys,
                deterministic=deterministic,
                plans=plans,
                shared=self.share_attention_params,
                remat=self.remat,
                global_tokens=global_tokens,
                segment_ids=segment_ids,
                paths=paths_BxTxN,
                context=context,
            )
        else:
            x_BxTxW, terms = stack.run_blocks(
                self.blocks,
                x_BxTxW,
                mask,
                keys=keys,
                deterministic=deterministic,
                remat=self.remat,
                global_tokens=global_tokens,
                segment_ids=segment_ids,
                paths=paths_BxTxN,
                context=context,
            )
        layer_terms.sow(self, terms)
        if self.final_norm is not None:
            x_BxTxW = self.final_norm(x_BxTxW)
        return x_BxTxW.astype(jnp.float32)

    def _paths(self, parents: Array | None, mask: Array | None) -> Array | None:
        """The way to each token from its root, int32 `[batch, length, max_depth]`; None where nothing reads it."""
        if self.depths is None and not self.attention.reads_trees:
            return None
        if parents is None:
            raise ValueError(
                "parents: positions in trees (depth_embedding, shaw_tree) need the parents of the tokens, which task "
                "treebank gives; got None"
            )
        return tree_paths(parents, self.max_depth, mask)

    def pool(self, x: Array, mask: Array | None) -> Array:
        """One vector for each example of what `encode` gave, `[batch, width]`, as `pooling` says."""
        if self.pooling == "last":
            place_BxT = jnp.where(True if mask is None else mask > 0, jnp.arange(x.shape[1]), 0)
            last_B = jnp.broadcast_to(place_BxT, x.shape[:2]).max(axis=1)
            return jnp.take_along_axis(x, last_B[:, None, None], axis=1)[:, 0]
        if self.weighted_mean is not None:
            return self.weighted_mean(x, mask)
        return x[:, 0] if self.pooling in ("cls", "first") else masked_mean(x, mask)

    @property
    def stacked_blocks(self) -> list[EncoderBlock]:
        """The scanned blocks, one for each entry of `attention`."""
        return list(self.blocks) if self.period > 1 else [self.blocks]

    def unrolled(self) -> Self:
        """The same model with its blocks in a list, `blocks[i]`, and nothing recomputed: to look at layer by layer."""
        model = nnx.merge(*nnx.split(self))
        if self.scan_layers:
            shared = self.share_attention_params
            blocks = stack.unstack_blocks(model.stacked_blocks, self.num_layers, self.attention, shared=shared)
            model.blocks = nnx.List(blocks)
        model.scan_layers = model.remat = False
        return model


def _make_depths(kind: Any, num_depths: int, width: int, **vectors: Any) -> nnx.Module | None:
    try:
        return make_positions(kind, num_depths, width, **vectors)
    except ValueError:
        raise ValueError(f"depth_embedding must be 'sinusoidal', 'learned' or 'none', got {kind!r}") from None


def positions_in_segments(segment_ids: Array) -> Array:
    """Places counted from 0 in each run of equal ids, int32 `[batch, length]`, from int `[batch, length]`."""
    place_T = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts_BxT = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return place_T - jax.lax.cummax(jnp.where(starts_BxT, place_T, 0), axis=1)


def _check_attention(
    slot: str,
    attention: Attention,
    num_positions: int,
    num_layers: int,
    pooling: str | None,
    scan: bool,
    share: bool,
) -> None:
    if pooling in ("cls", "first") and attention.causal:
        raise ArgumentError(
            "pooling",
            f"pooling must be 'mean', 'attention' or 'last' where attention is causal, got {pooling!r}: its vector "
            "stands in front of the tokens and would see none of them",
        )
    ops = entries(attention)
    for index, op in enumerate(ops):
        path = f"{slot}.layers[{index}]" if len(ops) > 1 else slot
        for key, part in ((path, op), (f"{path}.position", getattr(op, "position", None))):
            if (longest := getattr(part, "max_len", None)) is not None and longest < num_positions:
                raise ArgumentError(
                    f"{key}.max_len",
                    f"{key}.max_len must be at least {num_positions}, the positions of the model, got {longest}",
                )
    if num_layers < len(ops):
        raise ValueError(f"num_layers must be at least {len(ops)}, the entries of attention, got {num_layers}")
    if scan and num_layers % len(ops):
        raise ValueError(
            f"num_layers must be a multiple of {len(ops)}, the entries of attention, for scan_layers, got {num_layers}"
        )
    if share and not any(map(has_params, ops)):
        raise ValueError(f"share_attention_params must be False where attention has no parameters, got {attention}")
