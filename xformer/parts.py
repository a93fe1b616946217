"""The parts that a run lists (callbacks, trackers, metrics): each a name, or a section of a name and its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from xformer import config_errors, lookup, schema
from xformer.schema import ConfigError
from xformer.tasks import Judged, Task, metric
from xformer.train import CALLBACKS, TRACKERS, Callback, Tracker, callbacks, trackers

T = TypeVar("T")

TABLES: dict[str, lookup.Table[Any]] = {  # by the key of `train`
    "callbacks": CALLBACKS,
    "metrics": metric.METRICS,
    "trackers": TRACKERS,
}


def check(train: Mapping[str, Any]) -> dict[str, Any]:
    """The `train` section with each listed part as a section, its keys checked and completed.

    A metric from outside that `select_metric` names is listed too.
    """
    checked = dict(train)
    listed = [entry if isinstance(entry, str) else entry.get("name") for entry in train["metrics"]]
    if lookup.is_dotted(chosen := train["select_metric"]) and chosen not in listed:
        checked["metrics"] = (*train["metrics"], chosen)
    for key, table in TABLES.items():
        entries = [{"name": entry} if isinstance(entry, str) else entry for entry in checked[key]]
        checked[key] = tuple(schema.check_named(f"train.{key}[{i}]", entry, table) for i, entry in enumerate(entries))
    return checked


def make_callbacks(train: Mapping[str, Any]) -> tuple[tuple[str, Callback], ...]:
    """Fresh callbacks of a checked section, each with the name that messages give it."""
    return tuple((entry["name"], made) for entry, made in zip(*_make(train, "callbacks", callbacks.build), strict=True))


def make_trackers(train: Mapping[str, Any]) -> tuple[tuple[str, Tracker], ...]:
    """Fresh trackers of a checked section, each with the name that messages give it."""
    return tuple((entry["name"], made) for entry, made in zip(*_make(train, "trackers", trackers.build), strict=True))


def judged(task: Task, train: Mapping[str, Any]) -> tuple[Task | Judged, str | None]:
    """The task with the metrics of a checked section, itself where there are none, and the metric to select by.

    A class that the section selects by becomes the name of its metric, the first of that class.

    Raises:
      ConfigError: a metric that refuses its arguments, or has no name or one that is taken.
    """
    selected: str | None = train["select_metric"]
    entries, metrics = _make(train, "metrics", metric.build)
    if not metrics:
        return task, selected
    made = config_errors.construct("train", lambda: Judged(task, metrics), keys={"train": train})
    named = (own.name for entry, own in zip(entries, metrics, strict=True) if entry["name"] == selected)
    return made, next(named, selected)


def _make(train: Mapping[str, Any], key: str, build: Callable[[Any], T]) -> tuple[Sequence[Any], list[T]]:
    made = []
    for i, entry in enumerate(train[key]):
        path = f"train.{key}[{i}]"
        make = guarded({path: entry}, functools.partial(build, entry))
        owners = {TABLES[key][entry["name"]].__name__: path}
        made.append(config_errors.construct(path, make, keys={path: entry}, owners=owners))
    return train[key], made


def guarded(sections: Mapping[str, Mapping[str, Any]], make: Callable[[], T]) -> Callable[[], T]:
    """`make`; where a section names a class from outside, what that raises, and ours would not, is a ConfigError."""
    names = {path: section.get("name") for path, section in sections.items()}
    outside = [f"{path}.name: {name}" for path, name in names.items() if lookup.is_dotted(name)]

    def call() -> T:
        try:
            return make()
        except (ValueError, NotImplementedError, OverflowError, MemoryError):
            raise  # as our own classes raise them
        except Exception as error:
            raise ConfigError(f"{' or '.join(outside)} raised {lookup.blame(error)}") from error

    return call if outside else make
