"""One chunk of linear attention: what its queries read from the state and from each other's keys, and the next state.

With features f, a weight is `decay^distance f(q) f(k)` or, where the feature map gives logarithms, `exp(log) f(q) f(k)`
(Katharopoulos et al. 2020, equations 9-12; Sun et al. 2023, equation 7, the chunkwise form).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.dtypes import compute_dtype, exact
from xformer.attention.state.features import Operands
from xformer.attention.state.operands import Marks, Settings, State, Tokens

Array = jax.Array
Within = Literal["past", "all", "none"]
NOTHING = -1e30  # logarithm of a weight of zero


class Factors(NamedTuple):
    """What products of features are multiplied by, each broadcastable to the shape that stands there; None: nothing.

    Attributes:
      pairs: `[batch, kv_heads, chunk, chunk]`, a query with a key of the chunk; None where they do not meet.
      rows: `[batch, kv_heads, chunk]`, a query with the state.
      keys: `[batch, kv_heads, chunk]`, a key that enters the state.
      kept: `[batch, kv_heads]`, the state before.
      top: `[batch, kv_heads]`, the next state's.
      row_top: `[batch, kv_heads, chunk]`, the logarithm of what the sums of a query are divided by.
    """

    pairs: Array | None
    rows: Array | None
    keys: Array | None
    kept: Array | None
    top: Array | None
    row_top: Array | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """The step of a loop over chunks, for `recomputed.scan`.

    Attributes:
      settings: of the call.
      within: which keys of its own chunk a query sees: those up to its own, all or none.
    """

    settings: Settings
    within: Within = "past"

    def __call__(self, carry: State, tokens: Tokens, operands: Operands, marks: Marks) -> tuple[State, Any]:
        """The state after the chunk, and what its queries read; that is None in a chunk without queries.

        They read the weighted sums `[batch, kv_heads, groups, chunk, depth]`, the sums of weights without `depth` or
        None, and where keys have logarithms that of what both are divided by, `[batch, kv_heads, chunk]`. In a chunk
        without keys the state stays.
        """
        settings, state = self.settings, carry
        features, out = settings.features, None
        key = key_features = value = logs = query_features = None
        einsum = lambda spec, x, y: jnp.einsum(spec, x, y, precision=settings.precision)
        if tokens.key is not None:
            key, value = exact(tokens.key), exact(tokens.value)
            key_features, logs = features.keys(key, operands, settings.precision)
            assert marks.real is not None
            key_features = jnp.where(marks.real[..., None], key_features, jnp.zeros((), key.dtype))
        if tokens.query is not None:
            query_features = features.queries(exact(tokens.query), operands, settings.precision)
        factors = self._factors(state, tokens, marks, logs)
        if query_features is not None:
            total = einsum("bkgtf,bkfe->bkgte", query_features, state.sums)
            norm = None if state.norm is None else (query_features * state.norm[:, :, None, None]).sum(-1)
            if factors.rows is not None:
                total = total * factors.rows[:, :, None, :, None]
                norm = None if norm is None else norm * factors.rows[:, :, None]
            if factors.pairs is not None:
                weights = einsum("bkgtf,bksf->bkgts", query_features, key_features) * factors.pairs[:, :, None]
                total = total + einsum("bkgts,bkse->bkgte", weights, value)
                norm = None if norm is None else norm + weights.sum(-1)
            out = total, norm, factors.row_top
        if key_features is not None:
            if factors.keys is not None:
                key_features = key_features * factors.keys[..., None]
            sums, norm = state.sums, state.norm
            if factors.kept is not None:
                sums = sums * factors.kept[..., None, None]
                norm = None if norm is None else norm * factors.kept[..., None]
            sums = sums + einsum("bksf,bkse->bkfe", key_features, value)
            norm = None if norm is None else norm + key_features.sum(2)
            state = State(sums, norm, factors.top)
        return state, out

    def _factors(self, state: State, tokens: Tokens, marks: Marks, logs: Array | None) -> Factors:
        x: Any = tokens.query if tokens.key is None else tokens.key
        size, dtype = x.shape[-2], compute_dtype(x.dtype)
        reads, meets = tokens.query is not None, self.within != "none" and tokens.query is not None
        index = np.arange(size)
        pairs: Any = None
        rows: Any = None
        keys: Any = None
        kept: Any = None
        if meets:
            seen = index[:, None] >= index if self.within == "past" else np.ones((size, size), bool)
            pairs = jnp.asarray(seen)[None, None]
        if marks.kv_segments is not None:
            assert marks.before is not None
            last = marks.kv_segments[:, -1:]
            keys, kept = (marks.kv_segments == last)[:, None], marks.before[:, None] == last
            if marks.q_segments is not None:
                rows = (marks.q_segments == marks.before[:, None])[:, None]
                if meets:
                    pairs = pairs & (marks.q_segments[:, None, :, None] == marks.kv_segments[:, None, None])
        if logs is not None:
            return self._by_logs(state, marks, logs, pairs, rows, keys, kept)
        pairs, rows, keys, kept = (None if x is None else x.astype(dtype) for x in (pairs, rows, keys, kept))
        if self.settings.decays is not None:
            times = lambda x, factor: factor if x is None else x * factor
            if meets:
                pairs = pairs * self._decayed(np.abs(index[:, None] - index[None]), dtype)
            if reads:
                rows = times(rows, self._decayed(index + 1, dtype))
            if tokens.key is not None:
                left: Any = index[::-1].copy()
                steps: Any = np.asarray(size)
                if marks.advance is not None:
                    steps = marks.advance[:, None]  # [batch or 1, 1]
                    left = jnp.maximum(steps[..., None] - 1 - index[None, None], 0)
                keys, kept = times(keys, self._decayed(left, dtype)), times(kept, self._decayed(steps, dtype))
        return Factors(pairs, rows, keys, kept, state.top)

    def _decayed(self, distance: Any, dtype: Any) -> Array:
        """decay^distance `[batch or 1, kv_heads, ...]`, of a NumPy array `[...]` or a JAX array `[batch, 1, ...]`."""
        assert self.settings.decays is not None
        logs = np.log(np.asarray(self.settings.decays))
        if isinstance(distance, np.ndarray):
            return jnp.asarray(np.exp(logs.reshape(1, -1, *[1] * distance.ndim) * distance), dtype)
        return jnp.exp(jnp.asarray(logs.reshape(1, -1, *[1] * (distance.ndim - 2)), dtype) * distance.astype(dtype))

    def _by_logs(self, state: State, marks: Marks, logs: Array, pairs: Any, rows: Any, keys: Any, kept: Any) -> Factors:
        """The factors where each key has a logarithm: each row and the next state are divided by the largest seen."""
        assert state.top is not None and marks.real is not None
        nothing, zero = jnp.asarray(NOTHING, logs.dtype), jnp.zeros((), logs.dtype)
        only = lambda where, x: x if where is None else jnp.where(where, x, zero)
        logs = jnp.where(marks.real, logs, nothing)
        if keys is not None:
            end = jnp.where(keys, logs, nothing)
            before = jnp.where(kept, state.top, nothing)
        else:
            end, before = logs, state.top
        top = jnp.maximum(before, end.max(-1))
        row_before = state.top[..., None] if rows is None else jnp.where(rows, state.top[..., None], nothing)
        row_top = row_before
        if pairs is not None:
            seen = jnp.where(pairs, logs[:, :, None], nothing)
            row_top = jnp.maximum(row_before, seen.max(-1))
            pairs = only(pairs, jnp.exp(seen - row_top[..., None]))
        return Factors(
            pairs,
            only(rows, jnp.exp(row_before - row_top)),
            only(keys, jnp.exp(end - top[..., None])),
            only(kept, jnp.exp(before - top)),
            top,
            row_top,
        )
