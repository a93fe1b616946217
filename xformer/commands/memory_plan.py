"""Memory that the runs of a comparison need, estimated before anything is compiled, and what this machine has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from xformer.commands import inspect
from xformer.commands.comparison_plan import Planned
from xformer.config import build
from xformer.live_memory import live_bytes
from xformer.report import results
from xformer.train import step as steps
from xformer.train.memory import available as available

# What XLA plans for a CPU over what is alive in the jaxpr: 1.5 to 2.5 times, in the steps of six variants of the demo
# and of three on kernel documents (jaxlib 0.10.2).
COPIES = 2.5


def of_run(run: Planned, data_dir: str | None) -> int:
    """Bytes of a training step of a run, or of what it starts from if that needs more, over all devices together.

    What the compiler planned for a finished run counts, else COPIES times the estimate of `live_bytes`.
    """
    if (known := results.number(run.result, "peak_memory_bytes")) > 0 and run.pretraining is None:
        return int(known)
    return max(of_config(config, data_dir) for config in (run.pretraining, run.config) if config is not None)


def of_config(config: ConfigDict, data_dir: str | None) -> int:
    """Bytes of a training step of a config on one device, estimated; nothing is compiled or run."""
    experiment = build(config)
    sizes, _ = inspect.data_sizes(experiment, data_dir)
    batch = experiment.task.example_batch(experiment.train.batch_size, inspect.preprocessing(experiment, data_dir))
    graphdef, params, rest = steps.split(nnx.eval_shape(lambda: experiment.model_fn(**sizes)(nnx.Rngs(0))))
    step = steps.train_step(
        graphdef, experiment.task, experiment.optimizer, experiment.schedule, accumulate=experiment.train.accumulate
    )
    scalar: Callable[[Any], Any] = lambda dtype: jax.ShapeDtypeStruct((), dtype)
    state = steps.TrainState(scalar(jnp.int32), params, rest, jax.eval_shape(experiment.optimizer.init, params))
    return int(COPIES * live_bytes(step, state, dict(batch), scalar(jnp.uint32)))
