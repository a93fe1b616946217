"""What a law is fitted to: finished runs of different sizes and budgets."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from xformer.report import results
from xformer.train import workdir as folders

logger = logging.getLogger(__name__)


class Observation(NamedTuple):
    """A finished run.

    Attributes:
      attention: the name of its attention op.
      params: its parameters, embeddings included.
      tokens: the tokens that it was trained on, padding left out; repeated ones count each time.
      flops: the FLOPs of its training.
      loss: on the test split, in nats a token.
      budget: the training FLOPs that runs of its comparison could spend; NaN where they had another budget.
    """

    attention: str
    params: float
    tokens: float
    flops: float
    loss: float
    budget: float


def read(folder: Path) -> list[Observation]:
    """The finished runs of the comparison in `folder`, or of those in the folders in it, in the order of their names.

    Runs that diverged are left out, with a warning.

    Raises:
      ValueError: there is no comparison, or no run in it has a test loss.
    """
    single = (folder / "config.json").is_file()
    there = [folder] if single else sorted(path.parent for path in folder.glob("*/config.json"))
    workdirs = [path for path in there if not _is_run(path)]
    if not workdirs:
        what = "a single run, or several" if there else "neither it nor a folder in it has a config.json"
        raise ValueError(f"{folder} holds no comparison: {what}")
    found: list[Observation] = []
    for workdir in workdirs:
        found += _of_comparison(workdir)
    if not found:
        raise ValueError(f"{folder} holds no finished run with a test loss")
    return found


def _is_run(workdir: Path) -> bool:
    """Whether the folder is that of a run, not of a comparison of some."""
    config = folders.read_json(workdir / "config.json")
    return isinstance(config, dict) and "attention" in config


def _of_comparison(workdir: Path) -> list[Observation]:
    comparison = results.load(workdir)
    found = []
    for run in comparison.all_runs():
        if run.result is None:
            continue
        number = lambda key, result=run.result: results.number(result, key)
        observation = Observation(
            attention=str(run.result.get("attention", "")),
            params=number("num_params"),
            tokens=number("tokens_per_step") * number("last_step"),
            flops=number("train_flops"),
            loss=run.test("loss"),
            budget=float(comparison.budget.get("train_flops", math.nan)),
        )
        if all(math.isfinite(value) and value > 0 for value in observation[1:5]):
            found.append(observation)
        else:
            logger.warning("%s: left out, as its loss, size or cost is not a positive number", run.folder)
    return found


def by_attention(observations: Sequence[Observation]) -> dict[str, list[Observation]]:
    """The observations of each attention op, in the order in which they come."""
    found: dict[str, list[Observation]] = {}
    for observation in observations:
        found.setdefault(observation.attention, []).append(observation)
    return found
