"""Four voices as tokens: those of one sixteenth after the other, soprano to bass, then the next sixteenth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.tasks.chorale_scores import REST, VOICES
from xformer.tasks.vocab import Symbols

LOWEST, HIGHEST = 30, 94  # MIDI pitches that have a token: those of Bach's four parts, half an octave around them
REST_ID, FIRST_PITCH = 1, 2  # ids; 0 stands before and after a piece
_NAMES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


def name(pitch: int) -> str:
    """A MIDI pitch in words: 60 is C4."""
    return f"{_NAMES[pitch % 12]}{pitch // 12 - 1}"


VOCABULARY = Symbols(("-", *map(name, range(LOWEST, HIGHEST + 1))))
"""A rest is `-`, a pitch its name with sharps, such as `F#4`."""


def encode(score: np.ndarray) -> np.ndarray:
    """Ids int64 [4 x sixteenths] of MIDI pitches int [sixteenths, 4]. ValueError for a pitch without a token."""
    wrong = score[(score != REST) & ((score < LOWEST) | (score > HIGHEST))]
    if wrong.size:
        raise ValueError(f"chorales: pitches must be from {LOWEST} to {HIGHEST}, got {wrong[0]}")
    return np.where(score == REST, REST_ID, score - LOWEST + FIRST_PITCH).reshape(-1)


def decode(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """MIDI pitches int64 [sixteenths, 4] of ids, up to the first 0; voices that are missing at the end are cut off."""
    found = np.asarray(ids, np.int64)
    ends = np.flatnonzero(found == 0)
    found = found[: ends[0]] if ends.size else found
    found = found[: found.size // VOICES * VOICES].reshape(-1, VOICES)
    return np.where(found == REST_ID, REST, found - FIRST_PITCH + LOWEST)


def transposed(ids: np.ndarray, semitones: Any) -> np.ndarray:
    """Ids with every pitch so many semitones higher; what is no pitch stays. The result has to have tokens."""
    return np.where(ids >= FIRST_PITCH, ids + semitones, ids)


def room(ids: np.ndarray) -> tuple[int, int]:
    """The semitones that a piece can be transposed by, at least and at most, within the tokens there are."""
    pitches = ids[ids >= FIRST_PITCH]
    if not pitches.size:
        return 0, 0
    last = FIRST_PITCH + HIGHEST - LOWEST
    return int(FIRST_PITCH - pitches.min()), int(last - pitches.max())
