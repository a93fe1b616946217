"""What a layer adds to the training loss, and what it measures: sown by the layer, taken by the training step.

A layer calls `sow_loss` or `sow_metric` in training, with one value a row of its input; the step takes them with
`taken`. Models that scan over layers or recompute them do the same around each layer, as `xformer.nn.stack` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

Array = jax.Array
Pair = tuple[Array, Array]


class LayerTerm(nnx.Variable):
    """Values and weights `[rows]` of a layer's calls since they were last taken, a tuple. No part of a checkpoint."""


class LayerLoss(LayerTerm):
    """A term of the training loss."""


class LayerMetric(LayerTerm):
    """Logged, and no more."""


class Terms(NamedTuple):
    """(values, weights) by name, float32 `[rows]` each: `losses` are added to the loss, `metrics` are logged."""

    losses: Mapping[str, Pair]
    metrics: Mapping[str, Pair]


def sow_loss(module: nnx.Module, name: str, values: Array, weights: Array) -> None:
    """Adds a term to the training loss of each row, `values` float32 `[rows]`; it is logged under its name.

    `weights` (such as numbers of tokens) say what a row counts where several are one example, as chunks of a text are.
    """
    _sow(module, LayerLoss, name, (values, weights))


def sow_metric(module: nnx.Module, name: str, values: Array, weights: Array) -> None:
    """Logs the weighted mean of `values` `[rows]` in training."""
    _sow(module, LayerMetric, name, (values, weights))


def _sow(module: nnx.Module, kind: type[LayerTerm], name: str, pair: Pair) -> None:
    held = getattr(module, name, None)
    if held is None:
        setattr(module, name, kind((pair,)))
    elif isinstance(held, kind):
        held.set_value((*held.get_value(), pair))
    else:
        raise ValueError(f"{type(module).__name__} has an attribute {name!r}: a layer's term needs a name of its own")


def taken(module: nnx.Module) -> Terms:
    """What was sown anywhere in the module, which does not hold it any more; of several layers what `joined` makes."""
    found: list[Terms] = []
    for path, variable in nnx.to_flat_state(nnx.pop(module, LayerTerm)):
        name = str(path[-1])
        for pair in variable.get_value():
            found.append(Terms({name: pair}, {}) if isinstance(variable, LayerLoss) else Terms({}, {name: pair}))
    return joined(found)


def sow(module: nnx.Module, terms: Terms) -> None:
    """Sows in `module` what was taken of its layers."""
    for name, pair in terms.losses.items():
        sow_loss(module, name, *pair)
    for name, pair in terms.metrics.items():
        sow_metric(module, name, *pair)


def joined(terms: Sequence[Terms]) -> Terms:
    """Those of several layers as one: the sum of losses, the weighted mean of metrics."""
    stack = lambda pairs: tuple(jnp.stack(x) for x in zip(*pairs, strict=True))
    by_name: Callable[[Sequence[Mapping[str, Pair]]], dict[str, Any]] = lambda all_: {
        name: stack([one[name] for one in all_ if name in one]) for name in sorted({key for one in all_ for key in one})
    }
    return summed(Terms(by_name([one.losses for one in terms]), by_name([one.metrics for one in terms])))


def summed(terms: Terms) -> Terms:
    """`joined` of terms that have a leading axis of layers, `[layers, rows]`."""
    losses = {name: (values.sum(axis=0), weights.mean(axis=0)) for name, (values, weights) in terms.losses.items()}
    return Terms(losses, {name: _mean(*pair, axis=0) for name, pair in terms.metrics.items()})


def by_example(pair: Pair, num_examples: int) -> Pair:
    """Weighted means `[examples]` and sums of weights of `[rows]`, of which each example has equally many in a row."""
    values, weights = (x.reshape(num_examples, -1) for x in pair)
    return _mean(values, weights, axis=1)


def _mean(values: Array, weights: Array, axis: int) -> Pair:
    total = weights.sum(axis=axis)
    return jnp.where(weights > 0, values * weights, 0).sum(axis=axis) / jnp.where(total > 0, total, 1), total
