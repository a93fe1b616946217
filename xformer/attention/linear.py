"""Linear attention with the features elu(x) + 1 (Katharopoulos et al. 2020, "Transformers are RNNs")."""

from __future__ import annotations

import dataclasses

from xformer.attention.linear_attention import LinearAttention
from xformer.attention.state.features import EluPlusOne, FeatureMap


@dataclasses.dataclass(frozen=True)
class Linear(LinearAttention):
    """Weights are f(q) f(k) / sum of them, with f(x) = elu(x) + 1 (equations 4 and 7); causal: section 3.2.

    A `scale` multiplies all weights of a query and so cancels: the paper has none, and a call that gives one gets what
    it asks for. Rotary positions turn queries and keys before the feature map, so that weights stay positive; but they
    then depend on more than the distance (RoFormer's equation 19 turns the features instead, under a sum of weights
    that is not turned).
    """

    def feature_map(self, scale: float) -> FeatureMap:
        return EluPlusOne()
