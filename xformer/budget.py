"""What each run of a comparison may cost: steps, training FLOPs or seconds of training, the same for all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from xformer import schema
from xformer.schema import ConfigError

KINDS: dict[str, type] = {"steps": int, "train_flops": float, "seconds": float}
MOST_STEPS = 2**31 - 1
INTERVALS = ("eval_every", "checkpoint_every", "log_every")


def complete(section: Any) -> dict[str, float]:
    """The checked `budget` of a comparison: one of KINDS and how much.

    Raises:
      ConfigError: several, none, or not above 0.
    """
    given = schema.as_mapping("budget", section)
    if len(given) != 1 or next(iter(given)) not in KINDS:
        raise ConfigError(f"budget: got {schema.show(given)}, takes one of {', '.join(KINDS)}")
    ((kind, amount),) = given.items()
    amount = schema.check(f"budget.{kind}", amount, KINDS[kind])
    if not 0 < amount < math.inf or (kind == "steps" and amount > MOST_STEPS):
        raise ConfigError(
            f"budget.{kind}: got {amount}, takes {'an integer' if kind == 'steps' else 'a number'} above 0"
        )
    return {kind: amount}


def affords(budget: Mapping[str, float], step: float, what: str) -> int:
    """How many steps of this cost the budget pays for.

    Args:
      budget: `{"train_flops": x}` or `{"seconds": s}`.
      step: FLOPs or seconds of one step.
      what: whose step it is, for messages.

    Raises:
      ConfigError: less than one.
    """
    ((kind, amount),) = budget.items()
    if not step > 0:
        raise ConfigError(f"budget.{kind}: a step of {what} costs {step:g}, so nothing tells how many to take")
    steps = min(math.floor(amount / step), MOST_STEPS)
    if steps < 1:
        raise ConfigError(
            f"budget.{kind}: got {amount:g}, takes what pays for a step at least: one of {what} costs {step:.3g}"
        )
    return steps


def scaled(run: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """The config of a run, complete, as one of `num_steps`: warmup and intervals take the same share of it.

    The schedule ends with the run in any case. Intervals and a warmup that there is are one step at least.
    """
    train, optimizer = dict(run["train"]), dict(run["optimizer"])
    share = num_steps / train["num_steps"]
    for key in INTERVALS:
        train[key] = min(max(round(train[key] * share), 1), MOST_STEPS)
    if optimizer["warmup_steps"]:
        optimizer["warmup_steps"] = max(round(optimizer["warmup_steps"] * share), 1)
    return {**run, "train": train | {"num_steps": num_steps}, "optimizer": optimizer}


def check_warmup(run: Mapping[str, Any], what: str, budget: Mapping[str, float]) -> None:
    """Raises ConfigError for a run, scaled, that would end before its warmup does."""
    steps, warmup = run["train"]["num_steps"], run["optimizer"]["warmup_steps"]
    if warmup >= steps and warmup > 1:
        ((kind, amount),) = budget.items()
        raise ConfigError(
            f"budget.{kind}: got {amount:g}, which pays for {steps} steps of {what}, all of them warmup "
            f"({warmup} steps); takes more, or a smaller optimizer.warmup_steps"
        )


def spelt(budget: Mapping[str, float]) -> str:
    """What is equal between the variants, in words: "at equal training FLOPs"."""
    return f"at equal {NAMES[next(iter(budget))]}"


NAMES = {"steps": "steps", "train_flops": "training FLOPs", "seconds": "training time"}
