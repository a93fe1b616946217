"""The notes of a voice on a grid of sixteenths."""

from __future__ import annotations

import itertools

import numpy as np


def notes(voice: np.ndarray) -> list[tuple[int, int, int]]:
    """(first step, step after the last, MIDI pitch) of each note of int `[steps]`; 0 is silence.

    Equal pitches one after the other are one note.
    """
    found, start = [], 0
    for pitch, steps in itertools.groupby(voice.tolist()):
        stop = start + len(list(steps))
        if pitch:
            found.append((start, stop, int(pitch)))
        start = stop
    return found


def check_score(score: np.ndarray) -> np.ndarray:
    """The score as int64. ValueError unless it is `[steps, voices]` of MIDI pitches, or 0."""
    found = np.asarray(score)
    if found.ndim != 2 or found.dtype.kind not in "iu" or (found.size and not 0 <= found.min() <= found.max() <= 127):
        raise ValueError(
            f"a score must be int [steps, voices] of pitches from 0 to 127, got {found.dtype}{found.shape}"
        )
    return found.astype(np.int64)
