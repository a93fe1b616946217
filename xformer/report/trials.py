"""What was tuned before the runs: quality over the grid, what was chosen, optima at its edge, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xformer import tuning
from xformer.report import formatting, labels, style
from xformer.report.results import Comparison, Run, number
from xformer.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAPTION = (
    "Validation metric of each trial, one seed each; with several keys, the best of the trials that share a value. The "
    "ring marks what was chosen. Trials that failed are not drawn."
)
MOST_PANELS = 4


def metric(comparison: Comparison) -> tuple[str, bool]:
    """(the metric that trials were chosen by, whether more of it is better)."""
    for run in _every(comparison):
        if run.result is not None:
            name = str(run.result.get("select_metric"))
            return name, (run.result.get("better") or {}).get(name) == "max"
    return comparison.metric, comparison.higher_is_better


def _every(comparison: Comparison) -> list[Run]:
    return [run for trials in comparison.trials.values() for run in trials]


def score(comparison: Comparison, trial: Run) -> float:
    """The validation metric of a trial's best checkpoint; NaN where it did not finish."""
    return number((trial.result or {}).get("eval"), metric(comparison)[0])


def cost(trials: Sequence[Run]) -> dict[str, float]:
    """Training FLOPs and seconds of trials together; what failed on the way has cost what it did."""
    return {key: math.fsum(trial.spent[key] for trial in trials) for key in ("train_flops", "train_seconds")}


def edges(comparison: Comparison, variant: str) -> dict[str, str]:
    """Keys whose chosen value is the "smallest" or the "largest" that was tried.

    Not those of which a value between does as well: then nothing says that beyond the edge is a better one.
    """
    if variant not in comparison.chosen:
        return {}
    grid, trials = comparison.grids[variant], comparison.trials[variant]
    top = score(comparison, trials[comparison.chosen[variant]])
    equals = [tuning.edges(grid, trial.values) for trial in trials if score(comparison, trial) == top]
    chosen = tuning.edges(grid, _values(comparison, variant))
    return {key: end for key, end in chosen.items() if all(key in one for one in equals)}


def _values(comparison: Comparison, variant: str) -> Mapping[str, Any]:
    return comparison.trials[variant][comparison.chosen[variant]].values


def as_json(comparison: Comparison, variant: str) -> dict[str, Any] | None:
    """What `comparison.json` says of a variant's tuning; None where nothing is tuned."""
    trials = comparison.trials.get(variant)
    if not trials:
        return None
    chosen = variant in comparison.chosen
    return {
        "values": dict(_values(comparison, variant)) if chosen else None,
        "metric": metric(comparison)[0],
        "value": score(comparison, trials[comparison.chosen[variant]]) if chosen else None,
        "at_edge": edges(comparison, variant),
        "trials": len(trials),
        "finished": sum(trial.result is not None for trial in trials),
        "seed": trials[0].seed,
        **cost(trials),
    }


def table(comparison: Comparison) -> Table | None:
    """One row a variant: what was chosen, and what finding it cost; None where nothing is tuned."""
    if not comparison.trials:
        return None
    name = metric(comparison)[0]
    headers = ("variant", "chosen", f"validation {name}", "trials", "at the edge", "tuning FLOPs", "tuning time")
    body = []
    for variant, trials in comparison.trials.items():
        chosen = variant in comparison.chosen
        spent, done = cost(trials), sum(trial.result is not None for trial in trials)
        best = score(comparison, trials[comparison.chosen[variant]]) if chosen else math.nan
        at_edge = ", ".join(f"{key.rpartition('.')[2]}: {end}" for key, end in edges(comparison, variant).items())
        body.append((
            variant,
            tuning.spelt(_values(comparison, variant)) if chosen else formatting.MISSING,
            formatting.metric_value(best, name),
            str(done) if done == len(trials) else f"{done} of {len(trials)}",
            at_edge or ("no" if chosen else formatting.MISSING),
            formatting.si(spent["train_flops"]),
            formatting.seconds(spent["train_seconds"]),
        ))  # fmt: skip
    return Table(headers, tuple(body))


def every(comparison: Comparison) -> Table | None:
    """One row a trial; None where nothing is tuned."""
    if not comparison.trials:
        return None
    name = metric(comparison)[0]
    body = []
    for variant, trials in comparison.trials.items():
        for index, trial in enumerate(trials):
            state = "chosen" if comparison.chosen.get(variant) == index else trial.status
            spent = trial.spent
            value = formatting.metric_value(score(comparison, trial), name)
            body.append((variant, tuning.spelt(trial.values), value, state,
                         formatting.si(spent["train_flops"]), formatting.seconds(spent["train_seconds"])))  # fmt: skip
    return Table(("variant", "trial", f"validation {name}", "state", "FLOPs", "time"), tuple(body))


def note(comparison: Comparison) -> str:
    """How values were chosen, and what that cost beside the runs."""
    trials = _every(comparison)
    if not trials:
        return ""
    spent = cost(trials)
    runs = math.fsum(run.spent["train_flops"] for run in comparison.all_runs())
    share = f", {formatting.percent(spent['train_flops'] / runs, 0)} of what the runs took" if runs > 0 else ""
    count = len(next(iter(comparison.trials.values())))
    return (
        f"Every variant was tried with {count} {'combination' if count == 1 else 'combinations'} of values and seed "
        f"{trials[0].seed}, which no run has; the best on the validation split was chosen, the test split not scored. "
        f"All trials together took {formatting.si(spent['train_flops'], 'FLOP')}{share}, and "
        f"{formatting.seconds(spent['train_seconds'])} of training steps."
    )


def warnings(comparison: Comparison) -> list[str]:
    """Optima at the edge of a grid, trials that failed, and variants that are not decided."""
    found = []
    for variant, trials in comparison.trials.items():
        for key, end in edges(comparison, variant).items():
            value = tuning.spelt({key: _values(comparison, variant)[key]})
            found.append(f"{variant}: the best {value} is the {end} that was tried; beyond it may be a better one")
        for trial in trials:
            if trial.failure and trial.result is None:
                found.append(f"{variant}, trial {tuning.spelt(trial.values)}: failed: {trial.failure}")
        if variant not in comparison.chosen:
            found.append(f"{variant}: nothing is chosen yet")
    return found


def picture(comparison: Comparison, theme: style.Theme) -> bytes | None:
    """PNG of the validation metric over each tuned key that has several numbers; None where there is none."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for variant, trials in comparison.trials.items():
        for key in tuning.axes(comparison.grids[variant]):
            points = _over(comparison, trials, key)
            if len(points) > 1:
                found.setdefault(key, {})[variant] = points
    keys = list(found)[:MOST_PANELS]
    if not keys:
        return None
    columns = theme.columns(len(keys), most=2)
    lines = math.ceil(len(keys) / columns)
    with style.figure(theme, 3.2 * lines, 0.04 * lines, nrows=lines, ncols=columns, squeeze=False) as (fig, axes):
        for ax, key in zip(axes.flat, keys, strict=False):
            _draw(ax, comparison, key, found[key], style.Palette(theme, comparison.variants))
        for ax in list(axes.flat)[len(keys) :]:
            ax.set_visible(False)
        fig.draw_without_rendering()
        for ax, key in zip(axes.flat, keys, strict=False):
            palette = style.Palette(theme, comparison.variants)
            ends = [(*points[-1], variant, palette.colour(variant)) for variant, points in found[key].items()]
            labels.label_points(ax, ends, list(found[key].values()))
        return style.png(fig)


def _over(comparison: Comparison, trials: Sequence[Run], key: str) -> list[tuple[float, float]]:
    """(value of the key, best score of the trials that have it), by value; empty where values are no numbers."""
    sign = 1 if metric(comparison)[1] else -1
    best: dict[float, float] = {}
    for trial in trials:
        value, found = number(trial.values, key), score(comparison, trial)
        if math.isfinite(value) and math.isfinite(found):
            best[value] = max(best.get(value, -math.inf), sign * found)
    return [(value, sign * best[value]) for value in sorted(best)]


def _draw(
    ax: Axes,
    comparison: Comparison,
    key: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    palette: style.Palette,
) -> None:
    for variant, points in lines.items():
        colour, (xs, ys) = palette.colour(variant), zip(*points, strict=True)
        ax.plot(xs, ys, color=colour, ls=palette.dashes(variant), marker=palette.marker(variant), ms=4.5)
        if variant in comparison.chosen:
            x = number(_values(comparison, variant), key)
            ax.plot([x], [dict(points)[x]], "o", ms=11, mfc="none", mec=colour, mew=1.4)
    values = sorted({x for points in lines.values() for x, _ in points})
    if values[0] > 0:
        style.margins_log(ax, values)
        style.log_axis(ax, "x", lambda value: f"{value:g}")
    name = metric(comparison)[0]
    ax.set_xlabel(key)
    ax.set_ylabel(f"validation {name}")
    ax.margins(y=0.12)
    if style.is_logarithmic(name, (y for points in lines.values() for _, y in points)):
        style.log_axis(ax, "y", lambda value: f"{value:,g}")
    if name == "accuracy":
        style.percent_axis(ax)
