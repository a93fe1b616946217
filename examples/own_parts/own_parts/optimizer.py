"""An optimizer: its first argument is the learning rate's schedule, the others are keys of the `optimizer` section."""

from __future__ import annotations

import optax


def signum(learning_rate: optax.ScalarOrSchedule, momentum: float = 0.9) -> optax.GradientTransformation:
    """Steps of one size along the sign of the gradient's momentum (Bernstein et al. 2018, algorithm 2)."""
    return optax.chain(optax.trace(momentum), optax.scale_by_sign(), optax.scale_by_learning_rate(learning_rate))
