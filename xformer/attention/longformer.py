"""Longformer: a dilated sliding window and global tokens (Beltagy et al. 2020, section 3.1)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from xformer.attention import pattern as patterns
from xformer.attention.call import Call
from xformer.attention.cost import Cost
from xformer.attention.engine import dense as dense_engine
from xformer.attention.engine.query_tile import merge_heads
from xformer.attention.engine.tile_policy import tile_of_window
from xformer.attention.full import Full
from xformer.attention.global_tokens import attend_globally, global_pairs
from xformer.attention.pattern import Pattern
from xformer.attention.shape import Shape
from xformer.attention.signature import Options, Params
from xformer.attention.sizing import block_for_length
from xformer.attention.split_heads import with_pairs
from xformer.attention.stride_patterns import ByHead, ClassWindow, Dilated, From
from xformer.attention.token_order import First
from xformer.attention.union_attention import HeadParts, Part, UnionAttention, class_window
from xformer.checks import check_integer

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Longformer(UnionAttention):
    """Each query attends to a window around it, and to the global tokens; a global token attends to every token.

    The window has `window / 2` keys on each side besides the query's own. With a dilation d the keys are d positions
    apart ("dilated sliding window"), so it reaches d times as far at the same cost: tokens are attended in the order of
    their positions modulo d. With `causal` all of it is cut at the diagonal.

    Which tokens are global a call may say for each example, `global_tokens=`: these then are, and the first are not.
    Where no example has more than `max_global_tokens` of them, they are gathered and cost what so many queries and keys
    do; where one has more, the call visits every pair, twice, for the same numbers in linear memory. It is decided when
    the call runs (`xformer.cost` counts the dearer way; so does `cost(shape, global_tokens=True)`).

    The op attends from and to global tokens with what it is given; the paper's own projections for what they attend to
    are `global_projections=True` of `xformer.nn`'s layers.

    Attributes:
      window: keys of the window, those on both sides counted, even: 512 is 256 to each side.
      dilation: distance between the window's keys, of all heads, or a tuple of one for each head.
      num_global_tokens: how many tokens at the start are global, 0 or more.
      max_global_tokens: how many tokens of an example `global_tokens=` names at no more than their own cost.
    """

    GLOBAL_TOKENS: ClassVar[bool] = True

    window: int = 512
    dilation: int | tuple[int, ...] = 1
    num_global_tokens: int = 1
    max_global_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Longformer.window", self.window, at_least=2)
        if self.window % 2:
            raise ValueError(f"Longformer.window must be even (half on each side), got {self.window}")
        check_integer("Longformer.num_global_tokens", self.num_global_tokens, at_least=0)
        check_integer("Longformer.max_global_tokens", self.max_global_tokens)
        if not isinstance(self.dilation, list | tuple):
            check_integer("Longformer.dilation", self.dilation)
            return
        if not self.dilation:
            raise ValueError("Longformer.dilation must be an integer or one for each head, got ()")
        for head, dilation in enumerate(self.dilation):
            check_integer(f"Longformer.dilation[{head}]", dilation)
        object.__setattr__(self, "dilation", tuple(self.dilation))

    @classmethod
    def for_length(cls, num_positions: int, **overrides: Any) -> Self:
        """A window of about a 32nd of the positions to each side, from 8 to 64."""
        return cls(**{"window": 2 * block_for_length(num_positions), **overrides})

    @property
    def side(self) -> int:
        """Keys on each side of the window."""
        return self.window // 2

    def dilations(self, num_heads: int) -> tuple[int, ...]:
        """The dilation of each head. Raises ValueError where there is not one for each."""
        if not isinstance(self.dilation, tuple):
            return (self.dilation,) * num_heads
        if len(self.dilation) != num_heads:
            raise ValueError(
                f"Longformer.dilation must be one for each of {num_heads} heads, got {len(self.dilation)}: "
                f"{self.dilation}"
            )
        return self.dilation

    def token_pattern(self, kv_len: int, num_heads: int) -> Pattern:
        dilations = self.dilations(num_heads)
        kinds = sorted(set(dilations))
        windows = [self._window(dilation) for dilation in kinds]
        window = windows[0] if len(kinds) == 1 else ByHead(tuple(windows), tuple(map(kinds.index, dilations)))
        if not self.num_global_tokens:
            return window
        return window | patterns.Global(self.num_global_tokens, 0, kv_len)

    def _window(self, dilation: int) -> Pattern:
        return patterns.Window(self.side, self.side) if dilation == 1 else Dilated(self.side, self.side, dilation)

    def parts(self, length: int, num_heads: int) -> tuple[HeadParts, ...]:
        dilations, count = self.dilations(num_heads), min(self.num_global_tokens, length)
        rows = () if self.causal else (Part(From(0, count), queries=First(count)),)
        everywhere = (Part(self._cut(patterns.Full()), keys=First(count)), *rows) if count else ()
        groups = []
        for dilation in sorted(set(dilations)):
            heads = tuple(head for head in range(num_heads) if dilations[head] == dilation)
            parts = (self._window_part(dilation, length, count), *everywhere)
            groups.append(HeadParts(None if len(heads) == num_heads else heads, parts))
        return tuple(groups)

    def _window_part(self, dilation: int, length: int, count: int) -> Part:
        """The window, without global queries and keys."""
        dilation = min(dilation, length)  # beyond that, too, no key is as near as one step
        left, right = self.side, 0 if self.causal else self.side
        if dilation == 1:
            window: Pattern = patterns.Window(left, right)
            window = window & From(count, count) if count else window
            return Part(window, block=tile_of_window(left + right + 1, length))
        order, block = class_window(left, right, dilation, length)
        window = ClassWindow(left, right, dilation, order.width, length, count)
        return Part(window, order, order, block)

    def _cut(self, whole: Pattern) -> Pattern:
        return patterns.Causal() if self.causal else whole

    # Global tokens of each example.

    def _attend(self, call: Call, params: Params, *, with_lse: bool) -> tuple[Array, Array | None]:
        if call.global_tokens is None:
            return super()._attend(call, params, with_lse=with_lse)
        window, whole = self._window_and_whole(call)
        if self.implementation == "reference":
            out, lse, _ = self._dense(call, params)
            return merge_heads(out), merge_heads(lse)
        return attend_globally(call, params, window, whole, self.max_global_tokens)

    def _window_and_whole(self, call: Call | None = None) -> tuple[Longformer, Full]:
        """The op without global tokens, and full attention with its term and causal cut."""
        if call is not None and call.q_positions is not None:
            raise NotImplementedError(f"{self._name} cannot honour positions beside global_tokens: give one of them")
        return dataclasses.replace(self, num_global_tokens=0), self.from_global_tokens()

    def from_global_tokens(self) -> Full:
        """What a global token does: full attention with the op's position term and causal cut."""
        return Full(position=self.position, causal=self.causal, implementation=self.implementation)

    def _dense(self, call: Call, params: Params) -> dense_engine.Attended:
        window, _ = self._window_and_whole(call)
        near = dataclasses.replace(call, global_tokens=None)
        inputs, controls, settings, pattern = window._split(near, params)
        offset = call.offset(self._name)
        positions = offset + jnp.arange(call.lengths[0]), jnp.arange(call.lengths[1])
        seen = jnp.asarray(pattern.allows(*positions))[None] | global_pairs(call, causal=self.causal)
        return dense_engine.attend(inputs, with_pairs(controls, seen, inputs), settings, patterns.Full())

    def weights(self, call: Call, params: Params) -> Array:
        if call.global_tokens is None:
            return super().weights(call, params)
        weights = self._dense(call, params).weights
        return weights.reshape(weights.shape[0], -1, *weights.shape[3:])

    def pattern_of(
        self,
        query: Array,
        key: Array,
        *,
        mask: Array | None = None,
        is_causal: bool = False,
        segment_ids: Array | tuple[Array, Array] | None = None,
        global_tokens: Array | None = None,
    ) -> Array:
        if global_tokens is None:
            return super().pattern_of(query, key, mask=mask, is_causal=is_causal, segment_ids=segment_ids)
        op, call = self._prepare(query, key, key, Options(is_causal=is_causal, global_tokens=global_tokens))
        assert isinstance(op, Longformer)
        near = op._window_and_whole()[0].pattern(*call.lengths, call.query.shape[2])[None]
        found = jnp.asarray(near) | global_pairs(call, causal=op.causal)
        found = jnp.broadcast_to(found, (call.batch, *found.shape[1:]))
        return found.reshape(*call.batch_shape, *found.shape[1:])

    def cost(self, shape: Shape, *, positions: bool = False, global_tokens: bool = False) -> Cost:
        """What a plain call of this shape costs; with `positions`, one in which they are given.

        With `global_tokens`, one in which some example has more than `max_global_tokens`.
        """
        if not global_tokens:
            return super().cost(shape, positions=positions)
        window, whole = self._window_and_whole()
        near = window.cost(shape)
        if self.implementation == "reference":
            return near
        return dataclasses.replace(near, flops=near.flops + 2 * whole.cost(shape).flops)

    def sees_all(self, num_positions: int) -> bool:
        dilations = self.dilation if isinstance(self.dilation, tuple) else (self.dilation,)
        near = self.side >= num_positions - 1 and set(dilations) == {1}
        return near or self.num_global_tokens >= num_positions or num_positions == 1

    def lookback(self) -> int | None:
        has_end = self.position is not None and self.position.num_positions is not None
        if not self.causal or self.num_global_tokens or has_end:
            return None
        return self.side * (max(self.dilation) if isinstance(self.dilation, tuple) else self.dilation)

    def block(self, kv_len: int) -> int | None:
        return tile_of_window(self.side * (1 if self.causal else 2) + 1, kv_len)
