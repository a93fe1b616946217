"""The picture of a study: curves of equal compute, the best loss for compute, and what the laws leave over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.report import formatting, style
from xformer.scaling.law import interval
from xformer.scaling.study import Study

BEYOND = 10.0  # how many times the largest budget the dashed lines reach at least


def draw(studies: Sequence[Study], theme: style.Theme = style.LIGHT) -> bytes:
    """A PNG of three rows: a panel of curves for each attention op, loss against compute, and residuals."""
    columns = len(studies)
    with style.figure(theme, 8.4, nrows=3, ncols=columns, squeeze=False) as (fig, axes):
        for column, study in enumerate(studies):
            _curves(axes[0][column], study, theme)
            _frontier(axes[1][column], study, theme)
            _residuals(axes[2][column], study, theme)
        for row in axes:
            low = min(ax.get_ylim()[0] for ax in row)
            high = max(ax.get_ylim()[1] for ax in row)
            for ax in row:
                ax.set_ylim(low, high)
        return style.png(fig)


def _curves(ax: Any, study: Study, theme: style.Theme) -> None:
    """Loss against parameters, a curve for each budget; a diamond at a best size that was trained around."""
    for index, (budget, curve) in enumerate(study.curves.items()):
        colour = theme.cycle[index % len(theme.cycle)]
        runs = [o for o in study.observations if o.budget == budget]
        ax.plot([o.params for o in runs], [o.loss for o in runs], "o", color=colour, markersize=4)
        if curve is not None and curve.curvature > 0:
            sizes = np.geomspace(min(o.params for o in runs), max(o.params for o in runs), 100)
            ax.plot(sizes, curve.at(sizes), color=colour, linewidth=1.2)
            if curve.inside:
                ax.plot([curve.params], [curve.loss], "D", color=colour, markersize=6, markerfacecolor=theme.paper)
        last = max(runs, key=lambda o: o.params)
        label = f" {formatting.si(budget, 'FLOP')}"
        ax.annotate(label, (last.params, last.loss), color=colour, va="center", fontsize=8)
    style.margins_log(ax, [o.params for o in study.observations])
    style.log_axis(ax, "x", formatting.tick_flops)
    ax.set_title(f"{study.attention}: equal compute")
    ax.set_xlabel("parameters")
    ax.set_ylabel("test loss (nats a token)")


def _frontier(ax: Any, study: Study, theme: style.Theme) -> None:
    """Every run's loss against its compute, the law's best for it, dashed beyond what was fitted, and held-out runs."""
    colour, marked = theme.cycle[1], theme.cycle[2]
    flops = [o.flops for o in study.observations]
    ax.plot(flops, [o.loss for o in study.observations], "o", color=theme.muted, markersize=3)
    furthest = max([BEYOND * max(flops), *(run.flops for run in study.held_out)])
    for low, high, dashes in ((min(flops), max(flops), "-"), (max(flops), furthest, style.DASHES[1])):
        compute = np.geomspace(low, high, 60)
        best = study.law.loss(*study.law.best(compute, study.flops_per_product))
        ax.plot(compute, best, linestyle=dashes, color=colour)
        if len(study.draws):
            drawn = [law.loss(*law.best(compute, study.flops_per_product)) for law in study.draws]
            bounds = np.array([interval(some, len(study.observations)) for some in np.stack(drawn, axis=1)]).T
            ax.fill_between(compute, *bounds, color=colour, alpha=0.15, linewidth=0)
    for run in study.held_out:
        value, low, high = study.foretold(run)
        ax.errorbar([run.flops], [value], [[value - low], [high - value]], fmt="_", color=colour, capsize=3)
        ax.plot([run.flops], [run.loss], "X", color=marked, markersize=7)
        ax.annotate("held out ", (run.flops, run.loss), color=marked, va="top", ha="right", fontsize=8)
    ax.set_xlim(min(flops) / 1.5, 3 * furthest)
    style.log_axis(ax, "x", formatting.tick_flops)
    ax.set_title("best for its compute; dashed: beyond")
    ax.set_xlabel("training FLOPs")
    ax.set_ylabel("test loss (nats a token)")


def _residuals(ax: Any, study: Study, theme: style.Theme) -> None:
    ax.axhline(0, color=theme.muted, linewidth=0.8)
    ax.plot([o.params for o in study.observations], study.residuals, "o", color=theme.cycle[1], markersize=4)
    style.log_axis(ax, "x", formatting.tick_flops)
    style.percent_axis(ax)
    ax.set_title("what the law leaves over")
    ax.set_xlabel("parameters")
    ax.set_ylabel("measured / law - 1")
