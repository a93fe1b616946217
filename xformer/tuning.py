"""What a comparison tunes before its runs: a grid of values, and the trials that they make."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from xformer import schema
from xformer.schema import ConfigError, Text

SEED = 1000  # of trials, unless the comparison says or has it
SECTIONS = ("attention", "model", "optimizer", "train")
DECIDED = {
    "train.num_steps": "budget",
    "train.num_epochs": "budget",
    "train.stop_at_step": "the command line",
    "train.init_from": "pretrain",
}  # keys that no trial may change, and what decides them instead


def complete(path: str, section: Any) -> dict[str, Any]:
    """A checked grid: `{"optimizer": {"learning_rate": (1e-3, 3e-3)}}`, keys in order of the alphabet.

    Args:
      section: values to try by key, dotted (`{"optimizer.learning_rate": (1e-3, 3e-3)}`) or nested, or both.

    Raises:
      ConfigError: no key or no value, one twice, or a key that no trial may change. Whether a variant takes the values
        is for whoever builds the trials to find.
    """
    grid: dict[str, Any] = {}
    for key, values in sorted(axes(schema.as_mapping(path, section)).items()):
        values = values.literal() if isinstance(values, Text) else values
        name = f"{path}.{key}"
        first, _, rest = key.partition(".")
        if first not in SECTIONS or not all(rest.split(".")):
            raise ConfigError(f"{name}: takes keys of {', '.join(SECTIONS)}, such as {path}.optimizer.learning_rate")
        if key in DECIDED:
            raise ConfigError(f"{name}: got {schema.show(values)}, but {DECIDED[key]} decides that, for all trials")
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(f"{name}: got {schema.show(values)}, takes the values to try, a sequence of at least one")
        values = tuple(value.literal() if isinstance(value, Text) else value for value in values)
        if any(value in values[:index] for index, value in enumerate(values)):
            raise ConfigError(f"{name}: got {schema.show(values)}, takes different values")
        *parents, last = key.split(".")
        inner = grid
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):  # of a key that stands for a value and for a section
                raise ConfigError(f"{name}: got {schema.show(values)}, but {path}.{parent} lists values itself")
        inner[last] = values
    if not grid:
        raise ConfigError(f"{path}: got {{}}, takes values to try, such as {path}.optimizer.learning_rate=(1e-3, 3e-3)")
    return grid


def axes(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a grid by dotted key; of one that is given twice, the later."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Text) and isinstance(value.literal(), Mapping):
            value = value.literal()
        found |= axes(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def points(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of a grid's values, by dotted key: one a trial, numbered from 0. The last key changes first.

    The order is that of the keys in the alphabet, so that a trial keeps its number however the grid is written.
    """
    found = dict(sorted(axes(grid).items()))
    return [dict(zip(found, values, strict=True)) for values in itertools.product(*found.values())] if found else []


def grid_of(common: Mapping[str, Any] | None, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The grid of a variant: its own, else the common one; empty where there is none."""
    return changes.get("tune") or common or {}


def check_numbers(common: Mapping[str, Any] | None, variants: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError unless every variant has the same number of trials."""
    counts = {name: len(points(grid_of(common, changes))) for name, changes in variants.items()}
    first, wanted = next(iter(counts.items()))
    for name, count in counts.items():
        if count != wanted:
            raise ConfigError(
                f"variants.{name}.tune: got {count} {'trial' if count == 1 else 'trials'}, takes {wanted}, as many as "
                f"{first} has: every variant gets the same number"
            )


def seed_for(given: int | None, seeds: Collection[int]) -> int:
    """The seed of all trials: `given`, or from `SEED` the first that no run has.

    Raises:
      ConfigError: a run has it, so that values would be chosen on what they are judged by.
    """
    if given is None:
        return next(seed for seed in itertools.count(SEED) if seed not in seeds)
    if given in seeds:
        raise ConfigError(f"tune_seed: got {given}, takes a seed that is none of seeds, {', '.join(map(str, seeds))}")
    if not 0 <= given < 2**32:
        raise ConfigError(f"tune_seed: got {given}, takes an integer from 0 to 2**32 - 1")
    return given


def spelt(values: Mapping[str, Any]) -> str:
    """`learning_rate 0.003, rank 64`: keys by their last part, where that says which is meant."""
    last = [key.rpartition(".")[2] for key in values]
    names = [name if last.count(name) == 1 else key for key, name in zip(values, last, strict=True)]
    return ", ".join(f"{name} {_text(value)}" for name, value in zip(names, values.values(), strict=True))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def edges(grid: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, str]:
    """Keys whose chosen value lies at the end of what was tried: "smallest" or "largest".

    Only of keys with several values, all numbers: others have no ends.
    """
    found = {}
    for key, values in axes(grid).items():
        if len(values) < 2 or not all(_is_number(value) for value in values) or key not in chosen:
            continue
        if chosen[key] in (min(values), max(values)):
            found[key] = "smallest" if chosen[key] == min(values) else "largest"
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def best(
    scores: Sequence[float | None], higher_is_better: bool, losses: Sequence[float | None] | None = None
) -> int | None:
    """The number of the best trial. None where none has a score: it failed, or is not a number.

    Of equals, as at 100 % accuracy, it is that of the lowest loss where all of them have one, then the first.
    """
    known = {index: score for index, score in enumerate(scores) if score is not None and score == score}
    if not known:
        return None
    top = (max if higher_is_better else min)(known.values())
    equals = [index for index, score in known.items() if score == top]
    by_loss = {index: loss for index in equals if losses is not None and (loss := losses[index]) is not None}
    return min(equals, key=by_loss.__getitem__) if len(by_loss) == len(equals) else equals[0]
