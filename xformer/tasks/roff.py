"""The running text of manual pages in man(7) macros, paragraph by paragraph."""

from __future__ import annotations

import dataclasses
import gzip
import re
import zlib
from pathlib import Path

from xformer.tasks.location import DataMissing

# Escapes that stand for characters (groff_char(7)); others stand for nothing.
_CHARACTERS = {
    "-": "-", "e": "\\", "\\": "\\", " ": " ", "~": " ", "0": " ", "'": "'", "`": "`",
    "aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "bu": "•", "em": "—", "en": "–", "co": "©",
    "rg": "®", "ti": "~", "ha": "^", "ga": "`", "rs": "\\", "sl": "/", "at": "@", "sh": "#", "mu": "×", "->": "→",
    "<-": "←", "<=": "≤", ">=": "≥", "!=": "≠", "+-": "±", "de": "°", "sc": "§", "pl": "+", "mi": "−", "eq": "=",
    "or": "|", "lB": "[", "rB": "]", "lC": "{", "rC": "}", "ss": "ß", "Tm": "™", "R": "®", "Po": "£", "Eu": "€",
    "Fo": "«", "Fc": "»", "hy": "-", "12": "½", "14": "¼", "*a": "α", "*b": "β", "*m": "µ", "*p": "π",
}  # fmt: skip
_ESCAPE = re.compile(
    r"\\(?:f(?:\(..|\[[^]]*\]|.)"  # fonts
    r"|s(?:[-+]?\d{1,2}|\([-+]?..|\[[^]]*\])"  # sizes
    r"|[hvwlLoNbDXZ]'[^']*'"  # motions and drawings
    r"|\*?\((?P<two>..)|\*?\[(?P<long>[^]]*)\]|\*(?P<string>.)|[kmMnYFgV](?:\(..|\[[^]]*\]|.)|(?P<one>.))",
    re.S,
)
_JOINED = ("BR", "RB", "BI", "IB", "IR", "RI", "MR")  # fonts that alternate without a space between
_SPACED = ("B", "I", "R", "SM", "SB")
_UNFILLED = {"nf": "fi", "EX": "EE", "TS": "TE", "EQ": "EN", "PS": "PE", "ig": ".", "de": "."}
_TRANSPARENT = (
    "ad",
    "na",
    "hy",
    "nh",
    "ne",
    "ft",
    "UR",
    "UE",
    "MT",
    "ME",
    "PD",
    "in",
    "ti",
    "nr",
    "ds",
    "ie",
    "el",
    "if",
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a page: its heading, and its paragraphs in order, headings of parts and tags of lists among them."""

    heading: str
    paragraphs: list[str]


def read(file: Path) -> str:
    """The source of a page from its file, compressed or not. Raises DataMissing for one that is damaged."""
    content = file.read_bytes()
    try:
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8", errors="replace")
    except (OSError, EOFError, zlib.error) as error:
        raise DataMissing(f"manual page {file} is damaged ({error}); extract the package again") from error


def sections(page: str) -> list[Section]:
    """The sections of a page, without what is not filled, such as code and tables; none of a page in mdoc(7)."""
    if re.search(r"^\.(Dd|Sh) ", page, re.M):
        return []
    reader = _Reader()
    for line in re.sub(r"\\\n", "", page).split("\n"):
        reader.read(line)
    reader.end_paragraph()
    return reader.sections


def plain(text: str) -> str:
    """Text without escapes, as it is printed."""

    def spelt(match: re.Match[str]) -> str:
        name = match["two"] or match["long"] or match["string"] or match["one"] or ""
        if re.fullmatch(r"u[0-9A-F]{4,6}", name):
            return chr(int(name[1:], 16))
        return _CHARACTERS.get(name, "")

    return " ".join(_ESCAPE.sub(spelt, re.sub(r'\\["#].*', "", text)).split())


class _Reader:
    def __init__(self) -> None:
        self.sections: list[Section] = []
        self._words: list[str] = []
        self._until: str | None = None  # the macro that ends what is left out
        self._tag = False  # whether the next line is the tag of an entry of a list

    def read(self, line: str) -> None:
        macro = re.match(r"[.'][ \t]*(\\\"|[^ \t\\]{0,3})[ \t]*(.*)", line)
        name = macro[1] if macro else None
        if self._until is not None:
            if name == self._until:
                self._until = None
            return
        if macro is None:
            if line.strip():
                self._add(line)
            else:
                self.end_paragraph()
            return
        assert name is not None
        if name in _JOINED or name in _SPACED:
            self._add(("" if name in _JOINED else " ").join(_arguments(macro[2])))
        elif name in _UNFILLED:
            self._until = _UNFILLED[name]
            self.end_paragraph()
        elif name == "SH":
            self.end_paragraph()
            self.sections.append(Section(plain(" ".join(_arguments(macro[2]))), []))
        elif name not in _TRANSPARENT and name != '\\"' and name:
            self.end_paragraph()
            self._tag = name in ("TP", "TQ")
            if name in ("SS", "IP") and (given := _arguments(macro[2])):
                self._words.append(" ".join(given) if name == "SS" else given[0])
                self.end_paragraph()

    def _add(self, text: str) -> None:
        self._words.append(text)
        if self._tag:
            self.end_paragraph()
            self._tag = False

    def end_paragraph(self) -> None:
        text = plain(" ".join(self._words))
        self._words = []
        if text and self.sections:
            self.sections[-1].paragraphs.append(text)


def _arguments(text: str) -> list[str]:
    """The arguments of a macro: words, or what stands in double quotes."""
    text = re.sub(r'(^|\s)\\".*', "", text)
    found = re.findall(r'"((?:[^"]|"")*)"?|((?:\\ |[^ \t"])\S*?(?:\\ \S*)*)(?=[ \t]|$)', text)
    return [word or quoted.replace('""', '"') for quoted, word in found]
