"""The Attention contract: what every variant takes, returns, refuses and costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.call import Call, normalize
from xformer.attention.cost import Cost
from xformer.attention.dtypes import exact
from xformer.attention.engine import mesh_axes
from xformer.attention.engine.few_queries import CachedKeys
from xformer.attention.shape import Shape
from xformer.attention.signature import AttentionCallable, Options, Params

Array = jax.Array
CONSTANTS = "constants"  # the key of a call's params that holds what `Attention.constants` draws
Implementation = Literal["reference", "xla", "pallas", "splash", "cudnn"]


@dataclasses.dataclass(frozen=True)
class Attention(AttentionCallable):
    """Base of all variants: a frozen dataclass of hyperparameters that is called to attend.

    Subclasses say what they do in `attend`, and describe themselves in `init`, `pattern` and `cost`; what they cannot
    honour they list in `REFUSES`. `AttentionCallable.__call__` documents the arguments of a call.

    Positions count from 0 on the sides of queries and keys alike. In cross-attention an op that depends on positions (a
    window, BigBird, a position term, causal) therefore works when both lengths happen to be equal, position i of the
    one standing for position i of the other; with different lengths and no `query_offset` it raises ValueError.

    Attributes:
      causal: queries attend to no later position.
      implementation: None for the best one that supports the call (on accelerators a kernel that is known to be right;
        `xformer check-device` checks and times them), "xla" for the tiled engine, "reference" for plain dense
        arithmetic (it also supports forward-mode differentiation), "pallas" for the block-sparse kernels for GPUs,
        "splash" for JAX's kernel for TPUs, "cudnn" for cuDNN's flash attention. A kernel that can't do a call or is not
        on its platform raises NotImplementedError (`xformer.attention.kernels.interpreted` lets "pallas" and
        "splash" run on CPUs, right but slow).
    """

    REFUSES: ClassVar[Mapping[str, str]] = {}  # name of an argument of the call -> why the variant cannot honour it
    GLOBAL_TOKENS: ClassVar[bool] = False  # whether a call may say which tokens are global
    SHARES_QK: ClassVar[bool] = False  # whether queries and keys are to be one projection of the tokens

    causal: bool = dataclasses.field(default=False, kw_only=True)
    implementation: Implementation | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool | np.bool_):
            raise ValueError(f"{self._name}.causal must be True or False, got {self.causal!r}")
        if self.implementation is not None and self.implementation not in get_args(Implementation):
            choices = ", ".join(map(repr, get_args(Implementation)))
            raise ValueError(
                f"{self._name}.implementation must be None or one of {choices}, got {self.implementation!r}"
            )

    @property
    def reads_trees(self) -> bool:
        """Whether calls need `paths` or `distances`, for a position term."""
        return False

    @property
    def _name(self) -> str:
        return type(self).__name__

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """The op with sensible hyperparameters for inputs of up to `num_positions` positions.

        Args:
          num_positions: length of the longest input; a vector put in front of the tokens counts.
          overrides: constructor arguments; they win over what the length suggests.

        Raises:
          ValueError, NotImplementedError: as the constructor does.
        """
        return cls(**overrides)

    def attend_with(self, query: Array, key: Array, value: Array, options: Options) -> Array:
        op, call = self._prepare(query, key, value, options)
        if options.module is not None:
            raise NotImplementedError(
                f"{self._name} never holds the attention weights; pass xformer.nn.AttentionFn({self._name}(...)) as "
                "attention_fn to sow them"
            )
        attend = functools.partial(by_example, op.attend)
        return call.restore(mesh_axes.automatic(attend, call, op.with_constants(options.params or {}, call)))

    def attend_with_lse(self, query: Array, key: Array, value: Array, options: Options) -> tuple[Array, Array]:
        """The output of a call and the log-sum-exp of its scores, both differentiable; see `merge_parts`.

        Args:
          query, key, value: as in a call.
          options: the other arguments of the call.

        Returns:
          The output, and `[*batch, q_len, num_heads]` in float32 (float64 for float64 queries): the logarithm of the
          sum of exp(score) over the keys that a query attends to, and of exp(sink) where there are sinks; -inf where
          that is nothing.

        Raises:
          NotImplementedError: the op has no token pairs, or `implementation` is a kernel, none of which gives it.
        """
        op, call = self._prepare(query, key, value, options)
        attend = functools.partial(by_example, op.attend_lse)
        params = op.with_constants(options.params or {}, call)
        out, lse = mesh_axes.automatic(attend, call, params, with_lse=True)
        return call.restore(out), lse.reshape(*call.batch_shape, *lse.shape[1:])

    def attention_weights(self, query: Array, key: Array, value: Array, options: Options) -> Array:
        """The weight of every pair before dropout, in O(q_len x kv_len) memory whatever the op: to look at.

        Args:
          query, key, value: as in a call.
          options: the other arguments of the call.

        Returns:
          `[*batch, num_heads, q_len, kv_len]` in the output's dtype; rows sum to 1, to 0 where nothing is attended, and
          to less than 1 where there are sinks.

        Raises:
          NotImplementedError: the op has no token pairs.
        """
        op, call = self._prepare(query, key, value, dataclasses.replace(options, deterministic=True))
        return call.restore(by_example(op.weights, call, op.with_constants(options.params or {}, call)))

    def _prepare(self, query: Array, key: Array, value: Array, options: Options) -> tuple[Attention, Call]:
        """The op with the call's causal flag, and the call. Raises for options that the op refuses."""
        for name, reason in self.REFUSES.items():
            # A rate is no dropout yet: layers give theirs when they evaluate, too.
            if name != "dropout_rate" and getattr(options, name) is not getattr(Options, name):
                raise NotImplementedError(f"{self._name} cannot honour {name}: {reason}")
        if options.global_tokens is not None and not self.GLOBAL_TOKENS:
            raise NotImplementedError(
                f"{self._name} cannot honour global_tokens: none of its tokens are; Longformer can"
            )
        for name in ("paths", "distances"):
            if getattr(options, name) is not None and not self.reads_trees:
                raise NotImplementedError(
                    f"{self._name} cannot honour {name}: it has no position term that reads trees; ShawTree does"
                )
        op = dataclasses.replace(self, causal=True) if options.is_causal and not self.causal else self
        call = normalize(query, key, value, options)
        if call.dropout_rate and "dropout_rate" in self.REFUSES:
            raise NotImplementedError(f"{self._name} cannot honour dropout_rate: {self.REFUSES['dropout_rate']}")
        return op, call

    def attend(self, call: Call, params: Params) -> Array:
        """The variant itself, on a normalized call; returns `[batch, q_len, num_heads, value depth]`."""
        raise NotImplementedError

    def attend_lse(self, call: Call, params: Params) -> tuple[Array, Array]:
        """`attend` in the dtype of the computation, and the log-sum-exp `[batch, q_len, num_heads]`."""
        raise NotImplementedError(f"{self._name} mixes the length dimension: there are no pairs to sum over")

    def weights(self, call: Call, params: Params) -> Array:
        """The weight of every pair `[batch, num_heads, q_len, kv_len]`, computed densely: to look at, not to train."""
        raise NotImplementedError(f"{self._name} mixes the length dimension: no token pair has a weight to sow")

    def check_params(self, params: Params, call: Call) -> None:
        """Raises ValueError unless `params` is what `init` gives for such a call."""
        want = _param_shapes(self, _shape_of(call))
        params = {name: value for name, value in params.items() if name != CONSTANTS}
        have = {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(params)}
        if have != want:
            raise ValueError(f"{self._name} needs params {want or '{}'} (see init), got {have or 'none'}")

    def init(self, rng: Array, shape: Shape) -> Params:
        """Parameters for calls of this shape: a dict of float32 arrays, `{}` where there is none."""
        raise NotImplementedError

    def constants(self, rng: Array, shape: Shape) -> Params:
        """Arrays that are saved with a model and not trained, such as random features: a dict, `{}` if there is none.

        In a call they are `params["constants"]`. A call without them draws them from the op's own `seed` (0 where it
        has none), for the lengths of that call. `xformer.nn.AttentionFn` draws them once and holds them.

        Args:
          rng: key to draw from; another one draws them anew.
          shape: as in `init`; what is drawn should not depend on the lengths, unless the op has a `max_len`.
        """
        return {}

    def update(self, constants: Params, query: Array, key: Array, mask: Array | None) -> Params:
        """The constants after a training pass, of the same shapes and dtypes; the layers of `xformer.nn` call it.

        A step of `train.accumulate` parts has as many passes.

        Args:
          constants: those of the step.
          query: `[*batch, q_len, num_heads, head_dim]`; key: `[*batch, kv_len, num_kv_heads, head_dim]`.
          mask: as in a call; what it hides should have no part in the update.
        """
        return constants

    def with_constants(self, params: Params, call: Call) -> Params:
        """The params of a call with the op's constants, drawn from its seed where they are missing."""
        if CONSTANTS in params or type(self).constants is Attention.constants:
            return params
        with jax.ensure_compile_time_eval():  # the seed is known: a program has the arrays, not their drawing
            drawn = self.constants(jax.random.key(getattr(self, "seed", 0)), _shape_of(call))
        return {**params, CONSTANTS: drawn} if drawn else params

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> np.ndarray | None:
        """Which pairs the variant ever considers, bool `[num_heads or 1, q_len, kv_len]`.

        None where there are none, or where they depend on data; see `pattern_of`.
        """
        raise NotImplementedError

    def pattern_of(
        self,
        query: Array,
        key: Array,
        *,
        mask: Array | None = None,
        is_causal: bool = False,
        segment_ids: Array | tuple[Array, Array] | None = None,
    ) -> Array:
        """Which pairs the variant considers for given inputs, before the mask and the segments hide any.

        Arguments are those of a call. Returns bool `[*batch, num_heads or 1, q_len, kv_len]`.

        Raises:
          NotImplementedError: the op has no token pairs.
        """
        raise NotImplementedError(f"{self._name} mixes the length dimension: there are no pairs")

    def cost(self, shape: Shape) -> Cost:
        """What a plain forward call of this shape costs, as the implementation executes it.

        Variants that take `positions` have a keyword of that name: what a call costs in which they are given.
        """
        raise NotImplementedError

    def remarks(self, num_positions: int) -> tuple[str, ...]:
        """What is computed, one line each, where at so many positions it is not what the fields seem to say.

        Empty where there is nothing to remark. Not an error: a caller may print it, as the check of a config does.
        """
        return ()

    def lookback(self) -> int | None:
        """How many keys before its own a query sees at most, where nothing but distances counts: what decoding keeps.

        None where there is no such number: every earlier key, or its position, may count.
        """
        return None

    def own_block(self) -> int | None:
        """How many tokens a block has where a query sees none outside of its own, blocks being counted from position 0.

        None where there is no such number.
        """
        return None

    def reads_cached(self, num_queries: int) -> bool:
        """Whether `attend_cached` serves calls of so many queries."""
        return False

    def attend_cached(
        self,
        query: Array,
        parts: Sequence[CachedKeys],
        q_positions: Array,
        *,
        kv_len: int,
        params: Params | None = None,
    ) -> Array:
        """The output of a call for a few queries, to keys as a cache holds them.

        Args:
          query: `[batch, q_len, num_heads, head_dim]`.
          parts: keys and values, heads first, with their positions; no position is in two of them.
          q_positions: int32 `[batch or 1, q_len]`.
          kv_len: how many keys a call would be given: what a pattern or a position term is made for.
          params: as in a call.

        Returns:
          `[batch, q_len, num_heads, value depth]` in the dtype of the queries; NaN beyond the last position of the
          pattern or of the position term.

        Raises:
          NotImplementedError: `reads_cached` says so.
        """
        raise NotImplementedError(f"{self._name} attends to keys in the order of tokens")

    def turned(self) -> tuple[Callable[[Array, Array], Array] | None, Attention]:
        """What turns queries and keys by their positions, and the op that is given turned ones.

        So a cache may keep turned keys. (None, the op itself) where nothing does, or where it is not all that the
        position term does. The first is `Position.rotate`.
        """
        return None, self

    def decode_state(self, shape: Shape, dtype: Any) -> Any:
        """The state before the first token, for `decode`: a pytree of arrays whose size no length changes.

        None where decoding needs the keys themselves, in a cache that `lookback` bounds.

        Args:
          shape: of the calls to come; its lengths don't count.
          dtype: of their queries, keys and values.
        """
        return None

    def decode(
        self,
        query: Array,
        key: Array,
        value: Array,
        state: Any,
        *,
        mask: Array | None = None,
        params: Params | None = None,
    ) -> tuple[Array, Any]:
        """The outputs of the tokens that follow those in the state, and the state after them.

        Token by token or many at once, the outputs are those of one call with all tokens.

        Args:
          query: `[batch, new, num_heads, head_dim]`; key, value: `[batch, new, num_kv_heads, depth]`.
          state: what `decode_state` or the call before gave.
          mask: bool `[batch, new]`, True at real tokens, which come first in each example; None: all are. The others
            are forgotten: the next token takes their place.
          params: as in a call.

        Raises:
          ValueError: the op is not causal.
          NotImplementedError: it has no such state.
        """
        raise NotImplementedError(f"{self._name} decodes from a cache of keys and values")

    def at_layer(self, index: int) -> Attention:
        """This op for layer number `index` of a model; the same op unless layers must differ."""
        return self

    def plans(self, shape: Shape, num_layers: int) -> Any:
        """The plans of layers 0 to `num_layers` - 1, stacked, for a scan over layers whose ops differ (`at_layer`).

        Returns:
          A pytree of integer and bool arrays `[num_layers, ...]`. The slice of one layer is what `plan=` takes in a
          call of this shape. None where layers do not differ.

        Raises:
          NotImplementedError: layers differ, and the implementation fixes the layer when the call is compiled.
        """
        return None


def _shape_of(call: Call) -> Shape:
    (q_len, kv_len), (num_heads, head_dim) = call.lengths, call.query.shape[2:]
    return Shape(1, q_len, kv_len, num_heads, head_dim, call.key.shape[2], call.value.shape[3])


@functools.lru_cache(maxsize=512)
def _param_shapes(op: Attention, shape: Shape) -> dict[str, tuple[int, ...]]:
    params = jax.eval_shape(lambda: op.init(jax.random.key(0), shape))
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}


def by_example(attend: Callable[[Call, Params], Any], call: Call, params: Params) -> Any:
    """`attend(call, params)`, mapped over the batch where every example has its own query offset."""
    if not isinstance(call.query_offset, jax.Array) or not call.query_offset.ndim:
        return attend(call, params)
    arrays: dict[str, Any] = {
        field.name: getattr(call, field.name)
        for field in dataclasses.fields(call)
        if field.name in Call.BATCHED and getattr(call, field.name) is not None
    }
    axes = {name: 0 if x.shape[0] == call.batch else None for name, x in arrays.items()}
    # What all examples share has its gradient summed over them, in the dtype that it has here.
    arrays = {name: exact(x) if axes[name] is None else x for name, x in arrays.items()}

    def one(index: Any, arrays: dict[str, Any]) -> Any:
        rng = call.dropout_rng
        if rng is not None and not call.broadcast_dropout:
            rng = jax.random.fold_in(rng, index)
        arrays = {name: x if axes[name] is None or name == "query_offset" else x[None] for name, x in arrays.items()}
        out = attend(dataclasses.replace(call, dropout_rng=rng, **arrays), params)
        return jax.tree.map(lambda x: x[0], out)

    return jax.vmap(one, in_axes=(0, axes))(jnp.arange(call.batch), arrays)
