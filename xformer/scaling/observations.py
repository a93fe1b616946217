"""What a law is fitted to: finished runs of different sizes and budgets."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xformer.report import results
from xformer.train import workdir as folders

logger = logging.getLogger(__name__)


class Observation(NamedTuple):
    """A finished run.

    Attributes:
      attention: the attention section of its config as JSON, its keys in order: what runs are told apart by.
      params: its parameters, embeddings included.
      tokens: the tokens that it was trained on, padding left out; repeated ones count each time.
      flops: the FLOPs of its training.
      loss: on the test split, in nats a token.
      budget: the training FLOPs that runs of its comparison could spend; NaN where they had another budget.
      data: the digest of the data that it was made on; "" where its result holds none.
    """

    attention: str
    params: float
    tokens: float
    flops: float
    loss: float
    budget: float
    data: str = ""


def read(folder: Path) -> list[Observation]:
    """The finished runs of the comparison in `folder`, or of those in the folders in it, in the order of their names.

    Runs that have not finished, diverged or are damaged are left out, with a warning; there is another where the runs
    are of different data, whose losses have no law in common.

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
    if len(kinds := Counter(o.data for o in found if o.data)) > 1:
        counts = " and ".join(f"{count} of {digest[:8]}" for digest, count in kinds.most_common())
        logger.warning("%s holds runs of different data (%s), whose losses are fitted together", folder, counts)
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
            status = "damaged" if (run.folder / "result.json").exists() else run.status
            logger.warning("%s: left out, as the run is %s", run.folder, status)
            continue
        number = lambda key, result=run.result: results.number(result, key)
        observation = Observation(
            attention=_as_text(run.config.get("attention") or {"name": run.result.get("attention")}),
            params=number("num_params"),
            tokens=number("tokens_per_step") * number("last_step"),
            flops=number("train_flops"),
            loss=run.test("loss"),
            budget=results.number(comparison.budget, "train_flops"),
            data=run.digest or "",
        )
        if all(math.isfinite(value) and value > 0 for value in observation[1:5]):
            found.append(observation)
        else:
            logger.warning("%s: left out, as its loss, size or cost is not a positive number", run.folder)
    return found


def by_attention(observations: Sequence[Observation]) -> dict[str, list[Observation]]:
    """The observations of each attention, hyperparameters and positions regarded, in the order in which they come."""
    found: dict[str, list[Observation]] = {}
    for observation in observations:
        found.setdefault(observation.attention, []).append(observation)
    return found


def labels(attentions: Sequence[str]) -> dict[str, str]:
    """What each is called: its op, `op+position`, and where two would be called so what they have of their own."""
    flat = {text: dict(_flat(json.loads(text))) for text in attentions}
    short = {text: "+".join(own[key] for key in NAMES if own.get(key, "none") != "none") for text, own in flat.items()}
    found = {}
    for text, own in flat.items():
        alike = [flat[other] for other in attentions if short[other] == short[text]]
        odd = [key for key in own if any(other.get(key) != own[key] for other in alike)]
        found[text] = short[text] + (f" ({', '.join(f'{key}={own[key]}' for key in odd)})" if odd else "")
    return found


NAMES = ("name", "position.name")


def _as_text(section: Mapping[str, Any]) -> str:
    return json.dumps(section, sort_keys=True)


def _flat(section: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Dotted keys and what stands there, spelt."""
    found: list[tuple[str, str]] = []
    for key, value in section.items():
        inner = isinstance(value, dict)
        found += _flat(value, f"{path}{key}.") if inner else [(f"{path}{key}", str(value))]
    return found
