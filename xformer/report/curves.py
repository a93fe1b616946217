"""The numbers of the curves that a reader can hover and switch: validation quality by steps, FLOPs and time."""

from __future__ import annotations

import json
import math
from typing import Any

from xformer.report import style
from xformer.report.quality import ends
from xformer.report.results import Comparison
from xformer.report.stats import estimate
from xformer.report.summary import baseline, baseline_title, data_differ

AXES = ("step", "train_flops", "seconds")


def points(comparison: Comparison, variant: str) -> list[dict[str, float]]:
    """At every evaluation that all finished seeds of a variant share: the mean over seeds, its interval, and each axis.

    Returns:
      `mean`, `low`, `high`, `seeds` and the means of `step`, `train_flops` and `seconds`, those that are known; FLOPs
      and time of what the run started from are counted.
    """
    histories = [history for run in comparison.finished(variant) if (history := run.history(comparison.metric))]
    found = []
    for rows in zip(*histories, strict=False):
        quality = estimate([row["value"] for row in rows])
        if not quality.count:
            continue
        low, high = ends(comparison.metric, quality)
        point = {"mean": quality.mean, "low": low, "high": high, "seeds": quality.count}
        for axis in AXES:
            values = [row[axis] for row in rows]
            if all(math.isfinite(value) and value > 0 for value in values):
                point[axis] = math.fsum(values) / len(values)
        found.append(point)
    return found


def data(comparison: Comparison) -> dict[str, Any] | None:
    """What the page's script draws; None where there is nothing to draw, or runs are of different data."""
    if data_differ(comparison):
        return None
    curves = {variant: known for variant in comparison.variants if (known := points(comparison, variant))}
    if not curves:
        return None
    every = [point for known in curves.values() for point in known]
    axes = [axis for axis in AXES if all(axis in point for point in every)]
    if not axes:
        return None
    chance = baseline(comparison, "validation")
    return {
        "metric": comparison.metric,
        "axes": axes,
        "variants": [
            {"name": variant, "index": index, "sign": style.marker(index)[1], "points": curves[variant]}
            for index, variant in enumerate(comparison.variants)
            if variant in curves
        ],
        "chance": chance if math.isfinite(chance) else None,
        "chance_title": baseline_title(comparison),
    }


def script(comparison: Comparison) -> str:
    """The data as JSON that can stand in a page, where no name in it can end its element; empty where there is none."""
    found = data(comparison)
    if found is None:
        return ""
    text = json.dumps(found, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
