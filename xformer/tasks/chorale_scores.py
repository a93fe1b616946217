"""Four-part scores in MusicXML as pitches on a grid of sixteenths, read without a music library."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import zipfile
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from xformer.tasks.location import DataMissing

INSTALL = "pip install --no-deps music21"
LICENCE = "BSD, as the package says; the chorales are in the public domain"
VOICES = 4
STEPS_A_QUARTER = 4
REST = 0  # stands where a voice is silent: MIDI's lowest pitch, which no voice sings
_STEPS = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}


def files(path: str = "") -> list[Path]:
    """Compressed MusicXML files in order: those in a folder at any depth, or Bach's of the installed music21.

    Raises:
      DataMissing: the package is not installed; the message says how to get it.
      ValueError: nothing is in the folder.
    """
    folders = [Path(path).expanduser()] if path else _installed()
    found = sorted(file for folder in folders for file in folder.rglob("*.mxl"))
    if not found:
        if path:
            raise ValueError(f"path must be a folder with .mxl files, got {path!r}, which has none")
        raise DataMissing(f"chorales: no .mxl files are installed; install the package ({INSTALL})")
    return found


def version() -> str:
    """That of the installed music21; "" where there is none."""
    try:
        return importlib.metadata.version("music21")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _installed() -> list[Path]:
    spec = importlib.util.find_spec("music21")
    return [Path(folder, "corpus", "bach") for folder in (spec and spec.submodule_search_locations) or ()]


def read(file: Path) -> np.ndarray | None:
    """MIDI pitches int64 [sixteenths, 4], soprano first, `REST` where a voice is silent; None unless in four parts.

    A pitch holds until its note ends; whether it is struck again is lost (Huang et al. 2018, section 4.1). Repeats are
    played once. Of a chord within a part the highest note counts, and grace notes do not.

    Raises:
      ValueError: the file is no compressed MusicXML.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            container = ElementTree.fromstring(archive.read("META-INF/container.xml"))
            root = next(node for node in container.iter() if node.tag.rpartition("}")[2] == "rootfile")
            score = ElementTree.fromstring(archive.read(root.attrib["full-path"]))
    except (zipfile.BadZipFile, ElementTree.ParseError, KeyError, StopIteration) as error:
        raise ValueError(f"{file.name} is no compressed MusicXML ({' '.join(str(error).split())})") from None
    parts = score.findall("part")
    if score.tag != "score-partwise" or len(parts) != VOICES:
        return None
    voices = [_voice(part) for part in parts]
    length = min(len(voice) for voice in voices)
    return np.stack([voice[:length] for voice in voices], axis=1)


def _voice(part: ElementTree.Element) -> np.ndarray:
    """The pitches of one part, int64 [sixteenths]."""
    notes: list[tuple[Fraction, Fraction, int]] = []
    divisions, shift, measure_start = Fraction(1), 0, Fraction(0)
    for measure in part.findall("measure"):
        now = end = start = measure_start
        for node in measure:
            length = Fraction(node.findtext("duration") or "0") / divisions * STEPS_A_QUARTER
            if node.tag == "attributes":
                divisions = Fraction(node.findtext("divisions") or divisions)
                shift = _transposition(node, shift)
            elif node.tag == "backup":
                now -= length
            elif node.tag == "forward":
                now += length
            elif node.tag == "note" and node.find("grace") is None:
                if node.find("chord") is None:
                    start, now = now, now + length
                if node.find("pitch") is not None:
                    notes.append((start, start + length, _pitch(node) + shift))
            end = max(end, now)
        measure_start = end
    voice = np.full(math.ceil(measure_start), REST, np.int64)
    for start, stop, pitch in notes:
        held = voice[math.ceil(start) : math.ceil(stop)]
        np.maximum(held, pitch, out=held)
    return voice


def _transposition(attributes: ElementTree.Element, before: int) -> int:
    """Semitones from what is written to what sounds."""
    node = attributes.find("transpose")
    if node is None:
        return before
    return int(node.findtext("chromatic") or 0) + 12 * int(node.findtext("octave-change") or 0)


def _pitch(note: ElementTree.Element) -> int:
    step, octave = note.findtext("pitch/step") or "C", int(note.findtext("pitch/octave") or 4)
    return 12 * (octave + 1) + _STEPS[step] + round(float(note.findtext("pitch/alter") or 0))
