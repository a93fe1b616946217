"""Base of the variants whose weights are products of features: a feature map, a decay, and the running state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from xformer.attention import kernels
from xformer.attention.call import Call
from xformer.attention.cost import Cost, call_cost
from xformer.attention.dtypes import exact
from xformer.attention.engine.gradient_guard import guard
from xformer.attention.interface import Attention
from xformer.attention.position import Position, Rotary
from xformer.attention.shape import Shape
from xformer.attention.signature import Options, Params
from xformer.attention.state import attend as engine
from xformer.attention.state import dense, state_cost, visible
from xformer.attention.state.features import FeatureMap, Operands
from xformer.attention.state.operands import Inputs, Settings, State
from xformer.attention.state_call import StateCall, state_call

Array = jax.Array
NO_SCORES = "no query meets a key alone, its features meet a sum over the keys; use Full or Window"
RUNS: Mapping[str, Callable[..., tuple[Array, Array | None]]] = {
    "reference": dense.attend, "xla": engine.attend, "pallas": kernels.running_state.attend
}  # fmt: skip
TINY = 1e-34  # a sum of weights below it is that of a query that sees nothing


@dataclasses.dataclass(frozen=True)
class LinearAttention(Attention):
    """Attention whose weights are products of features of queries and keys. Subclasses give the feature map.

    Time and memory are linear in the length, and causal decoding needs a state of one size (`decode`). There are no
    scores to add a bias to or to mask pair by pair: of masks those of keys work, and segments that lie in one piece
    each. `segment_ids` that do not are refused where they are known when tracing, and give NaN rows where they are not.

    Attributes:
      position: `Rotary`, which turns queries and keys before the feature map, or None. Other terms change scores.
    """

    REFUSES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("bias", "softcap", "sinks"), NO_SCORES),
        "positions": "keys enter the state in the order in which they stand; sort the tokens, or use Full or Window",
        "plan": "it visits no tiles; leave the plan away",
        "dropout_rate": "no weight stands alone to be dropped; drop outputs of the layer (attention_dropout_rate=0)",
    }
    NORMALIZED: ClassVar[bool] = True  # whether weights are divided by their sum

    position: Position | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position is not None and not isinstance(self.position, Position):
            raise ValueError(f"{self._name}.position must be a position term or None, got {self.position!r}")
        if self.position is not None and not isinstance(self.position, Rotary):
            raise NotImplementedError(
                f"{self._name}.position must be Rotary or None, got {self.position!r}: other terms change the score of "
                "a pair, and here no query meets a key alone"
            )

    def feature_map(self, scale: float) -> FeatureMap:
        """The map, for scores that are multiplied by `scale`."""
        raise NotImplementedError

    def scaled(self, query: Array, key: Array, scale: Array) -> tuple[Array, Array]:
        """Queries and keys `[batch, length, heads, head_dim]` for a scale `[1 or heads]`; where it counts at all."""
        return query, key

    def head_decays(self, num_heads: int) -> tuple[float, ...] | None:
        """What each head multiplies a weight by at each step of distance; None: nothing."""
        return None

    # The contract.

    def init(self, rng: Array, shape: Shape) -> Params:
        return {}

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> None:
        return None

    def attend(self, call: Call, params: Params) -> Array:
        self._refuse(call)
        self.check_params(params, call)
        given = self._given(*self._turned(call))
        settings, operands = self._settings(call, given.inputs), self._operands(params, call)
        chosen = kernels.choose_state(self.implementation, settings, given.inputs, given.controls)
        run = RUNS[chosen]
        out = self._divided(*run(settings, given.inputs, operands, given.controls))
        query, key, value = (exact(x) for x in given.raw)
        if chosen == "reference":
            sums = dense.seen(settings, query, key, value, given.controls)
            seen = jnp.broadcast_to(sums[..., None], out.shape)
        else:
            sizes = visible.Sizes(query.shape, key.shape, value.shape, out.shape, out.dtype)
            seen = visible.seen(sizes, query, key, value, given.ranges, given.controls.real)
        return given.marked(guard(out, seen))

    def attend_lse(self, call: Call, params: Params) -> tuple[Array, Array]:
        raise NotImplementedError(f"{self._name} has no softmax, so no log-sum-exp of scores")

    def weights(self, call: Call, params: Params) -> Array:
        self._refuse(call)
        given = self._given(*self._turned(call))
        settings, operands = self._settings(call, given.inputs), self._operands(params, call)
        pairs = dense.pair_weights(settings, given.inputs, operands, given.controls)
        total = pairs.sum(-1, keepdims=True) if self.NORMALIZED else jnp.ones((), pairs.dtype)
        pairs = jnp.where(total < TINY, jnp.zeros((), pairs.dtype), pairs / jnp.maximum(total, TINY))
        return pairs.reshape(pairs.shape[0], -1, *pairs.shape[3:])

    def decode_state(self, shape: Shape, dtype: Any) -> Decoded:
        heads = shape.num_heads if self.head_decays(shape.num_heads) else shape.kv_heads
        array = lambda depth: jnp.zeros((shape.batch, 1, heads, depth), dtype)
        inputs = Inputs(array(shape.head_dim)[:, :, :, None], array(shape.head_dim), array(shape.value_depth))
        settings = Settings(self.feature_map(1.0), self.causal, self.NORMALIZED)
        return Decoded(engine.empty_state(settings, inputs), jnp.zeros(shape.batch, jnp.int32))

    def decode(
        self,
        query: Array,
        key: Array,
        value: Array,
        state: Decoded,
        *,
        mask: Array | None = None,
        params: Params | None = None,
    ) -> tuple[Array, Decoded]:
        if not self.causal:
            raise ValueError(f"decoding needs a causal op, got {self}")
        new, options = query.shape[-3], Options(mask=None if mask is None else mask[:, None, None])
        _, call = self._prepare(query, key, value, options)
        self._refuse(call)
        positions = state.length[:, None] + jnp.arange(new)[None]
        given = self._given(self._at(call, positions, positions), 0)
        steps = jnp.full_like(state.length, new) if mask is None else jnp.sum(mask > 0, axis=1, dtype=jnp.int32)
        settings = self._settings(call, given.inputs)
        operands = self._operands(self.with_constants(params or {}, call), call)
        out, sums = engine.continued(settings, given.inputs, operands, given.controls, state.sums, steps)
        # Later tokens see what is not finite here.
        hit = (~given.finite_key).any(1)[..., None]
        sums = sums._replace(sums=jnp.where(hit[..., None], jnp.asarray(jnp.nan, sums.sums.dtype), sums.sums))
        return call.restore(given.marked(self._divided(*out))), Decoded(sums, state.length + steps)

    def cost(self, shape: Shape) -> Cost:
        settings = Settings(self.feature_map(1.0), self.causal, self.NORMALIZED, self.head_decays(shape.num_heads))
        by_head = settings.decays is not None
        heads = {"kv_heads": shape.num_heads if by_head else shape.kv_heads}
        heads["groups"] = shape.num_heads // heads["kv_heads"]
        if self.implementation == "reference":
            flops = state_cost.dense_flops(settings, shape, **heads)
        elif self.implementation == "pallas":
            flops = state_cost.kernel_flops(settings, shape, **heads)
        else:
            flops = state_cost.chunked_flops(settings, shape, **heads)
        return call_cost(shape, flops, {})

    # What the engine is given.

    def _refuse(self, call: Call) -> None:
        if call.mask is not None and call.mask.shape[2] != 1:
            raise NotImplementedError(
                f"{self._name} cannot honour a mask with query dimension {call.mask.shape[2]} (only 1, a padding mask, "
                "works): no query meets a key alone; use is_causal=True or segment_ids"
            )

    def _operands(self, params: Params, call: Call) -> Operands:
        return {}

    def _settings(self, call: Call, inputs: Inputs) -> Settings:
        decays = self.head_decays(call.query.shape[2])
        scale = call.scale if call.head_scale is None else 1.0
        return Settings(self.feature_map(scale), self.causal, self.NORMALIZED, decays, call.precision)

    def _turned(self, call: Call) -> tuple[Call, int | Array]:
        """The call with its queries and keys rotated, and the position of the first query."""
        (q_len, kv_len), decays = call.lengths, self.head_decays(call.query.shape[2])
        if self.position is None and not (self.causal or decays or call.kv_segments is not None):
            return call, 0  # nothing depends on where tokens stand
        offset = call.offset(self._name)
        return self._at(call, offset + jnp.arange(q_len), jnp.arange(kv_len)), offset

    def _at(self, call: Call, q_positions: Array, kv_positions: Array) -> Call:
        if self.position is None:
            return call
        rotate = self.position.rotate
        return dataclasses.replace(call, query=rotate(call.query, q_positions), key=rotate(call.key, kv_positions))

    def _given(self, call: Call, offset: int | Array) -> StateCall:
        by_head = self.head_decays(call.query.shape[2]) is not None
        return state_call(call, offset, self._name, causal=self.causal, by_head=by_head, scaled=self.scaled)

    def _divided(self, total: Array, norm: Array | None) -> Array:
        """The output `[batch, q_len, num_heads, depth]`; zeros where all weights are zero."""
        if norm is not None:
            # The quotient's gradient has the square of the norm, which underflows: both are divided by its size first.
            size = jnp.maximum(jax.lax.stop_gradient(norm), jnp.asarray(TINY, norm.dtype))
            some, norm = ~(norm < size)[..., None], (norm / size)[..., None]
            out = total / size[..., None] / jnp.where(some, norm, jnp.ones_like(norm))
            total = jnp.where(some, out, jnp.zeros_like(out))
        return total.reshape(*total.shape[:2], -1, total.shape[-1])


class Decoded(NamedTuple):
    """What decoding keeps of the tokens so far.

    Attributes:
      sums: of their keys and values; NaN where a key or value was not finite.
      length: int32 `[batch]`, how many tokens.
    """

    sums: State
    length: Array
