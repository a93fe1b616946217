"""The law L(N, D) = E + A / N^alpha + B / D^beta of runs: Hoffmann et al. 2022, section 3.3 and appendix D.2."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer import extras
from xformer.scaling.observations import Observation

optimize = extras.Lazy("scipy.optimize")
stats = extras.Lazy("scipy.stats")

FEWEST = 6  # observations: one more than there are parameters
HUBER = 1e-3  # differences of log losses from which on an observation counts less than by its square
EXPONENTS = (0.15, 0.35, 0.7)  # where the search begins
FLOORS = (0.1, 0.5, 0.9)  # likewise, of E as a share of the smallest loss
LARGEST_EXPONENT = 3.0
MOST_ROUNDS = 300  # of one search


@dataclasses.dataclass(frozen=True)
class Law:
    """Loss of a model of N parameters trained on D tokens: `floor` + `a` / N^alpha + `b` / D^beta, in nats a token."""

    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, params: Any, tokens: Any) -> Any:
        """The loss of models of so many parameters after so many tokens, arrays or numbers."""
        return self.floor + self.a * params**-self.alpha + self.b * tokens**-self.beta

    @property
    def params_exponent(self) -> float:
        """With compute C = k N D, the parameters of the best model grow as C to this power (equation 4)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def tokens_exponent(self) -> float:
        """Likewise its tokens."""
        return self.alpha / (self.alpha + self.beta)

    def best(self, flops: Any, flops_per_product: float) -> tuple[Any, Any]:
        """Parameters and tokens of the best model for so much compute, C = `flops_per_product` N D (equation 4)."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        product = np.asarray(flops, float) / flops_per_product
        return ratio * product**self.params_exponent, product**self.tokens_exponent / ratio


def fit(observations: Sequence[Observation], start: Law | None = None) -> Law:
    """The law whose log losses are nearest to those observed, by the Huber loss (appendix D.2).

    The search begins at 27 points, or at `start` alone, and its best end is taken.

    Raises:
      ValueError: fewer observations than `FEWEST`, or not three different sizes and three different numbers of tokens.
      ModuleNotFoundError: scipy is not installed; the message says which extra brings it.
    """
    params, tokens, losses = np.array([(o.params, o.tokens, o.loss) for o in observations], float).reshape(-1, 3).T
    if len(losses) < FEWEST or min(len(np.unique(params)), len(np.unique(tokens))) < 3:
        raise ValueError(
            f"a law needs at least {FEWEST} runs, of 3 sizes and 3 numbers of tokens, got {len(losses)} of "
            f"{len(np.unique(params))} and {len(np.unique(tokens))}"
        )
    # Sizes and tokens as multiples of their middle: then all five unknowns are of one magnitude.
    centre = np.exp([np.log(params).mean(), np.log(tokens).mean()])
    sizes, amounts, smallest = params / centre[0], tokens / centre[1], losses.min()

    def parts(x: np.ndarray) -> np.ndarray:
        floor, a, alpha, b, beta = np.exp(x)
        return np.stack([np.full_like(sizes, floor), a * sizes**-alpha, b * amounts**-beta])

    residuals = lambda x: np.log(parts(x).sum(axis=0)) - np.log(losses)

    def jacobian(x: np.ndarray) -> np.ndarray:  # by the logarithms of all five
        (floor, of_size, of_tokens), (_, _, alpha, _, beta) = parts(x), np.exp(x)
        rows = [floor, of_size, -of_size * alpha * np.log(sizes), of_tokens, -of_tokens * beta * np.log(amounts)]
        return (np.stack(rows) / (floor + of_size + of_tokens)).T

    least, most = math.log(1e-6 * smallest), math.log(1e3 * losses.max())
    low = [least, least, math.log(1e-3), least, math.log(1e-3)]
    high = [math.log(losses.max()), most, math.log(LARGEST_EXPONENT), most, math.log(LARGEST_EXPONENT)]
    if start is not None:
        a, b = start.a * centre[0] ** -start.alpha, start.b * centre[1] ** -start.beta
        starts = [[start.floor, a, start.alpha, b, start.beta]]
    else:
        starts = [
            [share * smallest, *_terms(losses - share * smallest, sizes, amounts, alpha, beta)]
            for alpha, beta, share in itertools.product(EXPONENTS, EXPONENTS, FLOORS)
        ]
    ends = []
    for begin in starts:
        x = np.clip(np.log(np.maximum(begin, 1e-300)), np.array(low) + 1e-6, np.array(high) - 1e-6)
        options = {"bounds": (low, high), "loss": "huber", "f_scale": HUBER, "max_nfev": MOST_ROUNDS}
        ends.append(optimize.least_squares(residuals, x, jacobian, **options))
    floor, a, alpha, b, beta = np.exp(min(ends, key=lambda end: end.cost).x)
    return Law(float(floor), float(a * centre[0] ** alpha), float(alpha), float(b * centre[1] ** beta), float(beta))


def _terms(
    above: np.ndarray, sizes: np.ndarray, amounts: np.ndarray, alpha: float, beta: float
) -> tuple[float, float, float, float]:
    """A, alpha, B and beta with the best A and B for these exponents and losses `above` a floor."""
    columns = np.stack([sizes**-alpha, amounts**-beta], axis=1)
    a, b = optimize.nnls(columns, above)[0]
    return a, alpha, b, beta


def bootstrap(observations: Sequence[Observation], law: Law, samples: int = 1000, seed: int = 0) -> list[Law]:
    """The laws of so many draws of as many runs, with replacement: how far the fitted one can be trusted.

    Draws that no law can be fitted to, since too few runs in them differ, are drawn again.
    """
    generator, tries = np.random.default_rng(seed), 0
    found: list[Law] = []
    while len(found) < samples and tries < 20 * samples:
        tries += 1
        drawn = [observations[index] for index in generator.integers(0, len(observations), len(observations))]
        if len(set(drawn)) >= FEWEST:
            try:
                found.append(fit(drawn, start=law))
            except ValueError:
                continue
    return found


def interval(values: Sequence[float], runs: int, level: float = 0.95) -> tuple[float, float]:
    """An interval from the values of so many laws drawn from `runs` runs; NaNs where there are none.

    Their plain quantiles would be too near to each other with few runs, so those further out are taken that a normal
    and a t distribution ask for (Hesterberg 2015, section 5.3, with the five unknowns of a law).
    """
    freedom = runs - len(dataclasses.fields(Law))
    if not len(values) or freedom < 1:
        return math.nan, math.nan
    tail = stats.norm.cdf(math.sqrt(runs / freedom) * stats.t.ppf((1 - level) / 2, freedom))
    low, high = np.quantile(np.asarray(values, float), [tail, 1 - tail])
    return float(low), float(high)
