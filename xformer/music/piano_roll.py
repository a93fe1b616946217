"""Scores as piano rolls, side by side."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from xformer import extras
from xformer.music.notes import check_score, notes

figures = extras.Lazy("matplotlib.figure")

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # told apart by the colour-blind too (Okabe and Ito)
VOICES = ("soprano", "alto", "tenor", "bass")
STEPS_A_BEAT = 4


def picture(scores: Mapping[str, np.ndarray], *, given_steps: int = 0, title: str = "") -> bytes:
    """A PNG with a panel for each score by title, all on the same axes; the voices have colours.

    Args:
      scores: int `[steps, voices]` each, at most four voices; see `xformer.music`.
      given_steps: a line after so many steps: what stands before it was given.
      title: of the whole.

    Raises:
      ValueError: no scores, or more than four voices.
      MissingExtra: matplotlib is not installed.
    """
    checked = {name: check_score(score) for name, score in scores.items()}
    if not checked or any(score.shape[1] > len(COLOURS) for score in checked.values()):
        raise ValueError(
            f"scores must be some of up to {len(COLOURS)} voices, got {[s.shape for s in checked.values()]}"
        )
    figure = figures.Figure(figsize=(6 * len(checked), 4), layout="constrained")
    panels = figure.subplots(1, len(checked), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (name, score) in zip(panels, checked.items(), strict=True):
        _draw(axes, score)
        if given_steps:
            axes.axvline(given_steps / STEPS_A_BEAT, color="black", linestyle="--", linewidth=1)
        axes.set_title(name)
        axes.set_xlabel("quarters")
    panels[0].set_ylabel("MIDI pitch")
    panels[0].legend(loc="upper right", ncols=len(COLOURS), fontsize="small", frameon=False)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high + 0.1 * (high - low))  # room for the legend
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def _draw(axes: Any, score: np.ndarray) -> None:
    for voice, (pitches, colour) in enumerate(zip(score.T, COLOURS, strict=False)):
        found = notes(pitches)
        pitch, starts, stops = ([one[i] for one in found] for i in (2, 0, 1))
        axes.barh(
            pitch,
            [(stop - start) / STEPS_A_BEAT for start, stop in zip(starts, stops, strict=True)],
            left=[start / STEPS_A_BEAT for start in starts],
            height=0.8,
            color=colour,
            edgecolor="white",
            linewidth=0.5,
            label=VOICES[voice],
        )
