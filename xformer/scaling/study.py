"""All that is said of the runs of one attention op: its law, the sizes that are best, and how well it foretells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.scaling import iso_flop
from xformer.scaling.iso_flop import Parabola
from xformer.scaling.law import Law, bootstrap, fit, interval
from xformer.scaling.observations import Observation

EXPONENTS = ("alpha", "beta", "params_exponent", "tokens_exponent", "floor")


@dataclasses.dataclass(frozen=True)
class Study:
    """What was found for one attention op.

    Attributes:
      attention: what it is called. observations: the runs that the law was fitted to; held_out: those that it was not.
      law: the one that fits; draws: those of the bootstrap.
      curves: by budget of training FLOPs; None where there are too few sizes.
      flops_per_product: training FLOPs of a run over its parameters times its tokens, the median of the runs (6 where
        only the parameters cost; attention adds to it).
    """

    attention: str
    observations: Sequence[Observation]
    held_out: Sequence[Observation]
    law: Law
    draws: Sequence[Law]
    curves: dict[float, Parabola | None]
    flops_per_product: float

    @property
    def residuals(self) -> np.ndarray:
        """Measured loss over that of the law, less one, of each observation."""
        return np.array([o.loss / self.law.loss(o.params, o.tokens) - 1 for o in self.observations])

    def interval(self, name: str) -> tuple[float, float]:
        """95 %, by the bootstrap, of one of EXPONENTS."""
        return interval([getattr(law, name) for law in self.draws], len(self.observations))

    def foretold(self, run: Observation) -> tuple[float, float, float]:
        """The loss that the law says of a run, and 95 % of it by the bootstrap; noise of the run itself is left out."""
        drawn = [law.loss(run.params, run.tokens) for law in self.draws]
        return self.law.loss(run.params, run.tokens), *interval(drawn, len(self.observations))

    def as_json(self) -> dict[str, Any]:
        finite = lambda value: float(value) if math.isfinite(value) else None
        off = np.abs(self.residuals)
        return {
            "runs": len(self.observations),
            "law": dataclasses.asdict(self.law),
            **{name: {"value": getattr(self.law, name), "95 %": list(map(finite, self.interval(name)))}
               for name in EXPONENTS},
            "flops_per_parameter_and_token": self.flops_per_product,
            "residuals": {"median": float(np.median(off)), "largest": float(off.max())},
            "best_size_exponent_of_curves": finite(iso_flop.optimum_exponent(self.curves)),
            "curves": [
                {"train_flops": budget, "best_params": finite(curve.params) if curve and curve.inside else None}
                for budget, curve in self.curves.items()
            ],
            "held_out": [
                dict(zip(("foretold", "low", "high"), map(finite, self.foretold(run)), strict=True))
                | {"params": run.params, "tokens": run.tokens, "measured": run.loss}
                for run in self.held_out
            ],
        }  # fmt: skip


def study(
    attention: str, observations: Sequence[Observation], held_out: Sequence[Observation] = (), *, samples: int = 1000
) -> Study:
    """Fits and draws. Raises ValueError as `fit` does."""
    law = fit(observations)
    curves = {budget: iso_flop.parabola(runs) for budget, runs in iso_flop.by_budget(observations).items()}
    ratio = float(np.median([o.flops / (o.params * o.tokens) for o in observations]))
    return Study(attention, observations, held_out, law, bootstrap(observations, law, samples), curves, ratio)
