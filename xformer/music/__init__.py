"""Scores of several voices as MIDI files and as pictures: arrays in, files out.

A score is int `[steps, voices]`: the MIDI pitch of each voice at each sixteenth, 0 where it is silent.
"""

from xformer.music.midi import write_midi
from xformer.music.piano_roll import picture

__all__ = ["picture", "write_midi"]
