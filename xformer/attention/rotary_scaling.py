"""How fast rotary pairs turn, and how that is slowed down for contexts longer than a model was trained on."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

Scaling = Literal["none", "linear", "ntk", "yarn"]
SCALINGS = ("none", "linear", "ntk", "yarn")
SLOW, FAST = 1.0, 32.0  # turns within the trained context: alpha and beta of YaRN (section 3.2) for LLaMA


def frequencies(
    head_dim: int, base: float, scaling: Scaling = "none", factor: float = 1.0, trained_len: int | None = None
) -> np.ndarray:
    """Radians that each pair turns by from a position to the next, float64 `[head_dim / 2]`.

    With `i` the pair, `theta = base ** (-2 i / head_dim)` and `s = factor`:

    - "none": `theta` (Su et al. 2021, equation 15);
    - "linear": `theta / s`, which is to interpolate positions (Chen et al. 2023, equation 4);
    - "ntk": `theta` of the base `base * s ** (head_dim / (head_dim - 2))`: the fastest pair is left, the slowest is `s`
      times slower (Peng et al. 2023, section 3.1);
    - "yarn": `(1 - g) * theta / s + g * theta` where `g` rises from 0 for pairs that turn up to once within
      `trained_len` tokens to 1 for those that turn 32 times and more (Peng et al. 2023, equations 18 to 21).
    """
    pairs = np.arange(0, head_dim, 2) / head_dim
    if scaling == "ntk" and head_dim > 2:  # one pair alone is the fastest: left as it is
        base = base * factor ** (head_dim / (head_dim - 2))
    theta = base**-pairs
    if scaling == "linear":
        return theta / factor
    if scaling == "yarn" and trained_len is not None:
        turns = trained_len * theta / (2 * math.pi)
        kept = np.clip((turns - SLOW) / (FAST - SLOW), 0, 1)
        return (1 - kept) * theta / factor + kept * theta
    return theta


def magnitude(scaling: Scaling, factor: float) -> float:
    """What queries and keys are each multiplied by: for YaRN `0.1 ln s + 1` (Peng et al. 2023, equation 22), else 1."""
    return 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0
