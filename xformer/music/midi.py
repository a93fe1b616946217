"""A score as a MIDI file, by the library mido."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from xformer import extras
from xformer.music.notes import check_score, notes

mido = extras.Lazy("mido")

TICKS_A_QUARTER, TICKS_A_STEP = 480, 120
ORGAN = 19  # General MIDI's church organ, counted from 0


def write_midi(path: str | Path, score: np.ndarray, *, quarters_a_minute: float = 72.0) -> None:
    """Writes a track and a channel for each voice.

    Args:
      path: of the file.
      score: int `[steps, voices]`, at most 16 voices; see `xformer.music`.
      quarters_a_minute: the tempo.

    Raises:
      ValueError: no such score, or a tempo that is not positive.
      MissingExtra: mido is not installed.
    """
    score = check_score(score)
    if score.shape[1] > 16:
        raise ValueError(f"a score must have at most 16 voices, the channels of MIDI, got {score.shape[1]}")
    if not quarters_a_minute > 0:
        raise ValueError(f"quarters_a_minute must be positive, got {quarters_a_minute!r}")
    file = mido.MidiFile(ticks_per_beat=TICKS_A_QUARTER)
    for channel, voice in enumerate(score.T):
        track = mido.MidiTrack()
        if channel == 0:
            track.append(mido.MetaMessage("set_tempo", tempo=mido.bpm2tempo(quarters_a_minute)))
        track.append(mido.Message("program_change", channel=channel, program=ORGAN))
        now = 0
        for start, stop, pitch in notes(voice):
            for kind, step in (("note_on", start), ("note_off", stop)):
                velocity = 80 if kind == "note_on" else 0
                track.append(
                    mido.Message(kind, channel=channel, note=pitch, velocity=velocity, time=(step - now) * TICKS_A_STEP)
                )
                now = step
        file.tracks.append(track)
    file.save(str(path))
