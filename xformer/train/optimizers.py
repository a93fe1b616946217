"""Optimizers and learning-rate schedules from plain arguments."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from xformer.lookup import Table, is_dotted
from xformer.train import by_path
from xformer.tree_paths import Blocks

Schedule = Callable[[Any], jax.Array]


def build(
    name: Literal["adamw", "adam", "sgd", "lion"] | str = "adamw",
    learning_rate: float = 1e-3,
    schedule: Literal["constant", "cosine", "rsqrt"] = "constant",
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    end_factor: float | None = None,
    b1: float | None = None,
    b2: float | None = None,
    eps: float | None = None,
    momentum: float | None = None,
    layer_decay: float | None = None,
    freeze: tuple[str, ...] = (),
    *,
    num_steps: int,
    blocks: Blocks | None = None,
    **own: Any,
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimizer and its schedule.

    Args:
      name: "adamw" (Loshchilov and Hutter 2019, algorithm 2), "adam" (Kingma and Ba 2015), "sgd" (with optional
        momentum) or "lion" (Chen et al. 2023, algorithm 2); or "package.module:function" (such as "optax:adafactor"):
        what takes the schedule as its first argument and gives an `optax.GradientTransformation`.
      learning_rate: the peak, reached at the end of the warmup.
      schedule: what follows the warmup; see `learning_rate_schedule`.
      warmup_steps: steps of linear warmup; 0 for none. May exceed `num_steps`: the peak is then never reached.
      weight_decay: decoupled from the gradient in adamw and lion, added to it in sgd, refused by adam. Biases, norm
        scales and other vectors don't decay (see `decays`). A function from outside is given it if it takes it.
      clip_norm: gradients whose global norm is above this are scaled down to it, before anything else; None: never.
      end_factor: for "cosine" only: share of the peak that is left at `num_steps`; None: 0.
      b1, b2, eps: moment decay and stabiliser of adamw and adam; b1 and b2 of lion; None: the paper's value.
      momentum: of sgd only; None: no momentum.
      layer_decay: the learning rate of a layer is this times that of the layer above, down to the embeddings; heads
        have all of it (Howard and Ruder 2018, section 3.2, "discriminative fine-tuning"). None: all have the same.
      freeze: parameters that don't move: patterns of their paths, such as "embed" or "blocks/[0-5]/", each a regular
        expression that the beginning of a path matches.
      num_steps: length of the whole run in steps.
      blocks: how the layers of the model lie in its parameters, for `layer_decay`; None: see `by_path.factors`.
      own: the other arguments of a function from outside.

    Returns:
      The optax transformation and the schedule: step (from 0) -> float32 learning rate.

    Raises:
      ValueError: a value out of range, or one that the chosen optimizer or schedule would not use; a name that can't be
        found, or a function that does not give an optimizer.
    """
    make = OPTIMIZERS.find("name", name)
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay must be above 0 and at most 1, or None, got {layer_decay!r}")
    for pattern in freeze:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"freeze must hold regular expressions, got {pattern!r}: {error}") from None
    _check_range(learning_rate, warmup_steps, weight_decay, clip_norm)
    rate = learning_rate_schedule(schedule, learning_rate, warmup_steps, num_steps, end_factor)
    takes = inspect.signature(make).parameters
    given = {"b1": b1, "b2": b2, "eps": eps, "momentum": momentum, "weight_decay": weight_decay or None, **own}
    if is_dotted(name) and "weight_decay" in takes:
        given["weight_decay"] = weight_decay
    hyperparameters = {key: value for key, value in given.items() if value is not None}
    for key, value in hyperparameters.items():
        if key not in takes:
            others = [other for other, maker in OPTIMIZERS.items() if key in inspect.signature(maker).parameters]
            hint = f"only {', '.join(others)} do" if others else f"it takes {', '.join(list(takes)[1:])}"
            raise ValueError(f"{key}: optimizer {name!r} takes none, got {value!r}; {hint}")
        if not is_dotted(name) and key != "weight_decay" and not (0 <= value < 1 if key != "eps" else value > 0):
            raise ValueError(f"{key} must be {'positive' if key == 'eps' else 'at least 0 and below 1'}, got {value!r}")
    optimizer = make(rate, **hyperparameters)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"name: {name!r} must give an optax.GradientTransformation, got {type(optimizer).__name__!r} object"
        )
    if clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    if layer_decay is not None or freeze:
        optimizer = by_path.wrap(optimizer, tuple(freeze), layer_decay, blocks)
    return optimizer, rate


def _check_range(rate: float, warmup_steps: int, weight_decay: float, clip_norm: float | None) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"learning_rate must be positive, got {rate!r}")
    if not 0 <= warmup_steps < 2**31:  # optax counts steps in int32
        raise ValueError(f"warmup_steps must be at least 0 and below 2**31, got {warmup_steps!r}")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay!r}")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm must be positive or None, got {clip_norm!r}")


def learning_rate_schedule(
    name: str, peak: float, warmup_steps: int, num_steps: int, end_factor: float | None = None
) -> Schedule:
    """step (from 0) -> learning rate: linear to `peak` at step `warmup_steps - 1`, then

    - "constant": `peak`;
    - "cosine": half a cosine down to `end_factor * peak` at `num_steps` (Loshchilov and Hutter 2017, eq. 5);
    - "rsqrt": `peak * sqrt(warmup_steps / (step + 1))` (Vaswani et al. 2017, section 5.3, with the peak named).
    """
    if name not in ("constant", "cosine", "rsqrt"):
        raise ValueError(f"schedule must be one of constant, cosine, rsqrt, got {name!r}")
    if end_factor is not None and name != "cosine":
        raise ValueError(f"end_factor: schedule {name!r} has none, got {end_factor!r}; cosine takes it")
    if end_factor is not None and not 0 <= end_factor <= 1:
        raise ValueError(f"end_factor must be from 0 to 1, got {end_factor!r}")
    warmup, end = max(warmup_steps, 1), end_factor or 0.0

    def schedule(step: Any) -> jax.Array:
        done = jnp.asarray(step, jnp.float32) + 1
        decay: Any = 1.0
        if name == "cosine":
            progress = jnp.clip((done - 1 - warmup_steps) / max(num_steps - warmup_steps, 1), 0, 1)
            decay = end + (1 - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        elif name == "rsqrt":
            decay = jnp.sqrt(warmup / jnp.maximum(done, warmup))
        return peak * jnp.minimum(1.0, done / warmup) * decay

    return schedule


def decays(params: Any) -> Any:
    """Which parameters weight decay applies to: True for arrays of two or more dimensions that are no bias or scale."""

    def decay(path: tuple, value: Any) -> bool:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        return jnp.ndim(value) >= 2 and not {"bias", "scale"} & set(names[-2:])

    return jax.tree_util.tree_map_with_path(decay, params)


def _adamw(
    rate: Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    return optax.adamw(rate, b1, b2, eps, weight_decay=weight_decay, mask=decays)


def _adam(rate: Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    return optax.adam(rate, b1, b2, eps)


def _sgd(rate: Schedule, momentum: float | None = None, weight_decay: float = 0.0) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(weight_decay, decays), optax.sgd(rate, momentum))


def _lion(rate: Schedule, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0) -> optax.GradientTransformation:
    return optax.lion(rate, b1, b2, weight_decay=weight_decay, mask=decays)


OPTIMIZERS: Table[Callable[..., optax.GradientTransformation]] = Table(
    {"adamw": _adamw, "adam": _adam, "sgd": _sgd, "lion": _lion}
)
