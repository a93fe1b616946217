"""What our contenders of `benchmarks.train_steps` train: a model, its inputs, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import step_sizes as sizes
from benchmarks import translation
from xformer.attention import ATTENTIONS, Full
from xformer.models import MODELS
from xformer.tasks import Classification, NextTokens, TargetTokens
from xformer.tasks.family import Family
from xformer.train import memory
from xformer.train import step as steps

OPTIONS: Mapping[str, Any] = {"nystrom": {"conv_size": 65}}  # the peer can't do without


class Training(NamedTuple):
    """A model, what it is called with, and the targets that its family judges it by."""

    model: nnx.Module
    inputs: Mapping[str, Any]
    targets: np.ndarray
    family: Family


class Asked:
    """The task of a step: the inputs as they are, judged by the family."""

    better: ClassVar[Mapping[str, str]] = {"loss": "min"}

    def __init__(self, family: Family, names: Iterable[str]) -> None:
        self.metrics, self._names = family.metrics, tuple(names)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: batch[name] for name in self._names}


def take(training: Training) -> Callable[[], float]:
    """The trainer's step with Optax's AdamW; returns the loss."""
    optimizer = optax.adamw(sizes.LEARNING_RATE, weight_decay=sizes.WEIGHT_DECAY)
    graph, params, rest = steps.split(training.model)
    rows = len(training.targets)
    weights = np.ones(rows, np.float32)
    batch = dict(training.inputs) | {"targets": training.targets, "weights": weights, "bytes": weights}
    task: Any = Asked(training.family, training.inputs)
    state = steps.TrainState(jnp.int32(0), params, rest, jax.jit(optimizer.init)(params))
    del training, params, rest
    step = steps.train_step(graph, task, optimizer, optax.constant_schedule(sizes.LEARNING_RATE))
    run = jax.jit(step, donate_argnums=0).lower(state, batch, np.uint32(0)).compile()
    memory.release()  # as the trainer does, which keeps the trace for batches of other shapes
    held = [state]
    del state

    def turn() -> float:
        held[0], report = jax.block_until_ready(run(held[0], batch, np.uint32(0)))
        total, weight = report["sums"]["loss"]
        return float(total / weight)

    return turn


def encoder(name: str) -> Callable[[int, int], Training]:
    """A classifier of token sequences whose attention has its defaults, and what `OPTIONS` says."""

    def make(batch: int, length: int) -> Training:
        op = ATTENTIONS[name](**OPTIONS.get(name, {}))
        model = MODELS["classifier"](
            sizes.VOCAB, sizes.CLASSES, length, attention=op, share_qk=name == "reformer", **sizes.layers(),
            rngs=nnx.Rngs(0),
        )  # fmt: skip
        inputs, labels = sizes.tokens(batch, length)
        return Training(model, {"inputs": inputs}, labels, Classification())

    return make


def decoder(batch: int, length: int) -> Training:
    """A language model with learned positions."""
    inputs, targets = sizes.next_tokens(batch, length)
    model = MODELS["decoder"](
        sizes.DECODER_VOCAB, length, attention=Full(causal=True), position_embedding="learned", **sizes.layers(),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    return Training(model, {"inputs": inputs}, targets, NextTokens())


def vision(batch: int, side: int) -> Training:
    """A classifier of square images, with a class token and learned positions as the peer has them."""
    images, labels = sizes.images(batch, side)
    model = MODELS["vision"](
        sizes.CLASSES, side, side, sizes.CHANNELS, patch_size=sizes.PATCH, pooling="cls", attention=Full(),
        position_embedding="learned", **sizes.layers(), rngs=nnx.Rngs(0),
    )  # fmt: skip
    return Training(model, {"images": images}, labels, Classification())


def encoder_decoder(batch: int, length: int) -> Training:
    """A translator of as many source as target tokens."""
    given = translation.batch(batch, length)
    inputs = {name: x for name, x in given.items() if name != "targets"}
    return Training(translation.ours(length), inputs, given["targets"], TargetTokens())
