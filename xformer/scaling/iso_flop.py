"""The best size at each budget, read off curves of equal compute: Hoffmann et al. 2022, section 3.2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xformer.scaling.observations import Observation

FEWEST = 4  # sizes of a curve: one more than a parabola has parameters


class Parabola(NamedTuple):
    """Loss against the logarithm of size at one budget: `loss` + `curvature` * log(N / params)^2.

    Attributes:
      params: the best size.
      loss: there.
      curvature: above 0 where there is a best size.
      inside: whether the best size lies between the smallest and the largest that were trained, with a loss above 0;
        else it is a guess.
    """

    params: float
    loss: float
    curvature: float
    inside: bool

    def at(self, params: np.ndarray) -> np.ndarray:
        """The losses of these sizes."""
        return self.loss + self.curvature * np.log(params / self.params) ** 2


def parabola(observations: Sequence[Observation]) -> Parabola | None:
    """The curve through the runs of one budget by least squares; None with fewer than `FEWEST` sizes."""
    sizes = np.log([o.params for o in observations])
    if len(np.unique(sizes)) < FEWEST:
        return None
    middle = sizes.mean()
    curvature, slope, rest = np.polyfit(sizes - middle, [o.loss for o in observations], 2)
    if not curvature > 0:
        return Parabola(math.nan, math.nan, float(curvature), False)
    best = middle - slope / (2 * curvature)
    loss = rest - slope**2 / (4 * curvature)
    return Parabola(
        params=float(np.exp(np.clip(best, -700, 700))),
        loss=float(loss),
        curvature=float(curvature),
        inside=bool(sizes.min() <= best <= sizes.max() and loss > 0),
    )


def by_budget(observations: Sequence[Observation]) -> dict[float, list[Observation]]:
    """The runs of each budget of training FLOPs, by rising budgets; those without one are left out."""
    found: dict[float, list[Observation]] = {}
    for observation in observations:
        if math.isfinite(observation.budget):
            found.setdefault(observation.budget, []).append(observation)
    return dict(sorted(found.items()))


def optimum_exponent(curves: Mapping[float, Parabola | None]) -> float:
    """The power of compute that the best size grows with, from curves whose best size was trained around.

    NaN with fewer than two of them.
    """
    points = [(budget, curve.params) for budget, curve in curves.items() if curve is not None and curve.inside]
    if len(points) < 2:
        return math.nan
    budgets, sizes = np.log(np.array(points)).T
    return float(np.polyfit(budgets, sizes, 1)[0])
