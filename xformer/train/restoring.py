"""Which checkpoint of a run is used, and its arrays put into a model or back into a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from xformer.train import workdir as folders
from xformer.train.checkpoint import Checkpoints
from xformer.train.engine import Engine
from xformer.train.errors import CheckpointError
from xformer.train.run_state import Position
from xformer.train.step import split

logger = logging.getLogger(__name__)


def restore_model(workdir: str | Path, model: nnx.Module, which: str = "best") -> int:
    """Puts the parameters of a run's checkpoint into `model`, built as the run built it; returns their step.

    Args:
      workdir: the run's folder.
      model: its variables are replaced in place.
      which: "best" or "last"; see `choose`.

    Raises:
      CheckpointError: the checkpoint that is asked for is missing or damaged, or it is of another model.
      ValueError: `which` is neither.
    """
    checkpoints = Checkpoints(Path(workdir) / "checkpoints")
    step = choose(checkpoints, which)
    _, params, rest = split(model)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_here())
    restored = checkpoints.restore(step, "model", jax.tree.map(place, {"params": params, "rest": rest}))
    nnx.update(model, restored["params"], restored["rest"])
    return step


def resume(engine: Engine, checkpoints: Checkpoints) -> tuple[Any, Position, Any]:
    """(state, position, data state) of the newest intact checkpoint, or of the start."""
    found = checkpoints.latest()
    state = engine.init()
    if found is None:
        return state, Position(), None
    del state  # there is room for one only
    step, saved = found
    targets = engine.checkpoint(engine.abstract)
    # Parameters stand in both parts where those that are evaluated are others than those that training goes on with.
    arrays = {**checkpoints.restore(step, "model", targets["model"])}
    arrays |= checkpoints.restore(step, "optimizer", targets["optimizer"])
    position = Position.from_json(saved)
    position.check_best(checkpoints)
    return type(engine.abstract)(**arrays), position, checkpoints.data_state(step)


def restore_variables(engine: Engine, checkpoints: Checkpoints, step: int) -> tuple[Any, Any]:
    """(params, rest) of a checkpoint, laid out for the engine."""
    target = {"params": engine.abstract.params, "rest": engine.abstract.rest}
    restored = checkpoints.restore(step, "model", target)
    return restored["params"], restored["rest"]


def choose(checkpoints: Checkpoints, which: str) -> int:
    """The step of a run's "best" or "last" checkpoint; nothing on the disk changes.

    "best" is the one that `result.json` names, or that the newest checkpoint does while the run is not finished (itself
    if nothing was evaluated yet). It is this one or none: another would have other numbers. "last" takes the newest
    intact one, and a warning says which it takes in place of which.

    Raises:
      CheckpointError: there is none, the best is missing or damaged, or `result.json` names another one.
      ValueError: `which` is neither.
    """
    if which not in ("best", "last"):
        raise ValueError(f"which must be 'best' or 'last', got {which!r}")
    steps = checkpoints.steps()
    if not steps:
        raise CheckpointError(f"{checkpoints.folder} holds no intact checkpoint")
    result = folders.read_result(checkpoints.folder.parent)
    if which == "last":
        step, ended = _newest_intact(checkpoints), (result or {}).get("last_step")
        if ended is not None and ended not in steps:
            logger.warning("the run ended at step %s, whose checkpoint is gone: step %d is used instead", ended, step)
        return step
    newest = steps[-1]
    best = checkpoints.position(newest).get("best") if checkpoints.damage(newest) is None else None
    if result is not None:
        step, what = result["best_step"], "the best checkpoint"
        if best is not None and best["step"] != step:
            raise CheckpointError(
                f"{checkpoints.folder.parent / 'result.json'} says that step {step} is the best, the newest checkpoint "
                f"(step {newest}) that step {best['step']} is; remove result.json, and the command that trained the "
                "run evaluates again"
            )
    elif best is not None:
        step, what = best["step"], "the best checkpoint"
    else:
        step, what = newest, "the newest checkpoint, which names the best,"
    if (damage := checkpoints.damage(step)) is not None:
        if all(checkpoints.damage(other) is not None for other in steps):
            raise CheckpointError(f"{checkpoints.folder} holds no intact checkpoint")
        state = f"damaged ({damage})" if step in steps else "missing"
        raise CheckpointError(
            f"{what} ({checkpoints.folder / str(step)}) is {state}; restore it from a copy, or ask for the newest "
            'intact one: which="last", on the command line --checkpoint=last'
        )
    return step


def _newest_intact(checkpoints: Checkpoints) -> int:
    damaged: dict[int, str] = {}
    for step in reversed(checkpoints.steps()):
        if (damage := checkpoints.damage(step)) is None:
            for other, what in damaged.items():
                logger.warning(
                    "checkpoint %s is damaged (%s): step %d is used instead",
                    checkpoints.folder / str(other), what, step,
                )  # fmt: skip
            return step
        damaged[step] = damage
    raise CheckpointError(f"{checkpoints.folder} holds no intact checkpoint")


def _here() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
