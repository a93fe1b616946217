"""Retention: linear attention that decays with the distance (Sun et al. 2023, "Retentive Network")."""

from __future__ import annotations

import dataclasses
import numbers

import jax

from xformer.attention.dtypes import exact
from xformer.attention.linear_attention import LinearAttention
from xformer.attention.state.features import FeatureMap

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Retention(LinearAttention):
    """Weights are `scale q k decay^distance`, not normalised (equation 5, and the pseudocode of figure 4).

    Bidirectional, which the paper leaves open, a weight decays with the distance to either side. Of the normalisations
    of section 2.2 the first is the `scale`, 1 / sqrt(head_dim) by default; the other two cancel in the group norm that
    the paper's layer has behind retention, and are left out. The paper's theta is `position=Rotary()`.

    A head's own decay is that of a query head: with grouped heads, keys and values are repeated.

    Attributes:
      decays: gamma, for each query head a number above 0 and at most 1; None for `1 - 2^(-5 - head)` (equation 8).
    """

    NORMALIZED = False

    decays: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decays is None:
            return
        allowed = "a number above 0 and at most 1 for each head, or None"
        if not isinstance(self.decays, list | tuple) or not self.decays:
            raise ValueError(f"Retention.decays must be {allowed}, got {self.decays!r}")
        for decay in self.decays:
            if isinstance(decay, bool) or not isinstance(decay, numbers.Real) or not 0 < decay <= 1:
                raise ValueError(f"Retention.decays must be {allowed}, got {decay!r}")
        object.__setattr__(self, "decays", tuple(map(float, self.decays)))

    def feature_map(self, scale: float) -> FeatureMap:
        return FeatureMap(scale)

    def scaled(self, query: Array, key: Array, scale: Array) -> tuple[Array, Array]:
        return exact(query) * scale[None, None, :, None], key

    def head_decays(self, num_heads: int) -> tuple[float, ...]:
        if self.decays is None:
            return tuple(1.0 - 2.0 ** (-5.0 - head) for head in range(num_heads))
        if len(self.decays) != num_heads:
            raise ValueError(f"Retention.decays are {len(self.decays)} numbers: the call has {num_heads} query heads")
        return self.decays
