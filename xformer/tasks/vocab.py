"""Vocabularies: text to token ids and back. Ordered, stored as JSON with a run, id 0 always padding and never text."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from xformer import extras, tokenizer_files
from xformer.tasks import image_reading

tokenizers = extras.Lazy("tokenizers")  # optional, and slow to import

TextVocabulary = Literal["bytes", "subword", "tokenizer"]
"""Vocabularies a text task can choose from."""


class Vocabulary(abc.ABC):
    """`decode(encode(text)) == text`; ids run from 1 to `size - 1`, 0 is padding and decodes to nothing."""

    size: int

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, none of them 0."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """All there is to know about the vocabulary, for `from_json`."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    @property
    def characters(self) -> np.ndarray:
        """How many characters begin in the token of each id, int64 [size]: one each, but for texts' vocabularies."""
        return np.arange(self.size).clip(max=1)

    @property
    def num_bytes(self) -> np.ndarray:
        """How many bytes of text the token of each id spells, int64 [size]; only texts' vocabularies know."""
        raise ValueError(f"{type(self).__name__}: its tokens spell no bytes")

    def save(self, path: str | Path) -> None:
        """Writes the vocabulary to a JSON file."""
        Path(path).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Bytes(Vocabulary):
    """UTF-8 bytes, each its value plus one. A lone surrogate, which has no bytes, is read as `?`."""

    size = 257

    def encode(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode("utf-8", errors="replace")]

    def decode(self, ids: Iterable[int]) -> str:
        if isinstance(ids, np.ndarray):  # of long texts a hundred times faster
            ids = ids[ids > 0].tolist()
        return bytes(index - 1 for index in map(int, ids) if index > 0).decode("utf-8", errors="replace")

    @property
    def characters(self) -> np.ndarray:
        return np.array([0, *(_begins(byte) for byte in range(256))])

    @property
    def num_bytes(self) -> np.ndarray:
        return np.arange(self.size).clip(max=1)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}


@dataclasses.dataclass(frozen=True)
class Symbols(Vocabulary):
    """A fixed list of symbols, brackets included, one token each; spaces between them are written, not required."""

    symbols: tuple[str, ...]

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.symbols) + 1

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {symbol: index for index, symbol in enumerate(self.symbols, start=1)}

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.symbols, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) + r"|\S")

    def encode(self, text: str) -> list[int]:
        """Raises ValueError if the text holds anything but symbols and white space."""
        found = self._pattern.findall(text)
        unknown = next((symbol for symbol in found if symbol not in self._ids), None)
        if unknown is not None:
            raise ValueError(f"unknown symbol {unknown!r} in the text; allowed: {' '.join(self.symbols)}")
        return [self._ids[symbol] for symbol in found]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.symbols[index - 1] for index in map(int, ids) if index > 0)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "symbols", "symbols": list(self.symbols)}


@dataclasses.dataclass(frozen=True)
class Pixels(Vocabulary):
    """Grey values from 0, black, to `levels - 1`, each its value plus one; as a text, numbers with spaces between."""

    levels: int

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.levels + 1

    def encode(self, text: str) -> list[int]:
        """Raises ValueError if the text holds anything but such numbers and white space."""
        words = text.split()
        wrong = next((word for word in words if not (word.isdecimal() and int(word) < self.levels)), None)
        if wrong is not None:
            raise ValueError(f"a pixel must be a number from 0 to {self.levels - 1}, got {wrong!r}")
        return [int(word) + 1 for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(index - 1) for index in map(int, ids) if index > 0)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "pixels", "levels": self.levels}


@dataclasses.dataclass(frozen=True)
class ImageValues(Pixels):
    """The values of an image from 0 to 255, row by row, pixel by pixel; its text, when read, is the path of a file."""

    height: int
    width: int
    channels: int
    levels: int = dataclasses.field(default=256, init=False)

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for a file that can't be read as an image."""
        values = image_reading.read(text, self.height, self.width, self.channels)
        return (values.reshape(-1).astype(int) + 1).tolist()

    def images(self, given: Sequence[Any]) -> np.ndarray:
        """What a model reads of paths of files and of uint8 arrays `[height, width, channels]`.

        Returns:
          float32 `[images, height, width, channels]`.

        Raises:
          ValueError: anything else, with its place in the sequence.
        """
        shape = self.height, self.width, self.channels
        found = np.zeros((len(given), *shape), np.float32)
        for index, image in enumerate(given):
            if isinstance(image, str | os.PathLike):
                image = image_reading.read(os.fspath(image), *shape)
            if not isinstance(image, np.ndarray) or image.shape != shape or image.dtype != np.uint8:
                kind = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else repr(image)
                raise ValueError(f"image {index} must be a path or a uint8 array {list(shape)}, got {kind:.80}")
            found[index] = image_reading.standard(image.astype(np.float32))
        return found

    def to_json(self) -> dict[str, Any]:
        return {"kind": "image", "height": self.height, "width": self.width, "channels": self.channels}


class Subword(Vocabulary):
    """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), so that any text has ids and comes back unchanged.

    No token is special: an id of the `tokenizers` library plus one is an id here, and a text can't spell the padding.
    """

    def __init__(self, tokenizer_json: str):
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        self.size = self._tokenizer.get_vocab_size() + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Subword:
        """Learns at most `vocab_size` tokens, padding included: the same from the same texts in every process."""
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = sorted(byte_level.alphabet())
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((_valid(text) for text in texts), trainer)
        return cls(tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        return [index + 1 for index in self._tokenizer.encode(_valid(text)).ids]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast([_valid(text) for text in texts])
        return [[index + 1 for index in encoding.ids] for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([index - 1 for index in map(int, ids) if index > 0])

    @property
    def characters(self) -> np.ndarray:
        tokens = (self._tokenizer.id_to_token(index) for index in range(self.size - 1))
        return np.array([0, *(sum(_begins(_BYTES[symbol]) for symbol in token) for token in tokens)])

    @property
    def num_bytes(self) -> np.ndarray:
        return np.array([0, *(len(self._tokenizer.id_to_token(index)) for index in range(self.size - 1))])

    def to_json(self) -> dict[str, Any]:
        return {"kind": "subword", "tokenizer": json.loads(self._tokenizer.to_str())}


class Tokenizer(Vocabulary):
    """A `tokenizer.json` as the `tokenizers` library reads it: its ids, special tokens and truncation.

    In a run the padding is id 0, so the tokenizer's id of the padding and its id 0 change places; weights that come
    from where the tokenizer does change places too (`train.init_from="hf:..."`). `decode` leaves special tokens out,
    and gives what the tokenizer kept of the text: case and spaces may be lost.

    Args:
      tokenizer_json: the content of the file.
      max_len: tokens that a text is cut at, special tokens included; None: as the file says.

    Raises:
      ValueError: no such file's content, or one without a token for padding.
    """

    def __init__(self, tokenizer_json: str, max_len: int | None = None):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises no class of its own
            raise ValueError(f"no tokenizer.json: {' '.join(str(error).split())[:200]}") from error
        padding = self._tokenizer.padding
        named = (self._tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>", "<|pad|>"))
        found = padding["pad_id"] if padding else next((index for index in named if index is not None), None)
        if found is None:
            raise ValueError("a tokenizer.json must have a token for padding, [PAD] or <pad>, and has none")
        self.pad_id: int = found
        self._tokenizer.no_padding()
        if max_len is not None:
            self._tokenizer.enable_truncation(max_len)
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._order = np.arange(self.size, dtype=np.int32)
        self._order[[0, self.pad_id]] = self.pad_id, 0

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast([_valid(text) for text in texts])
        return [self._order[encoding.ids].tolist() for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(self._order[index]) for index in map(int, ids) if index > 0])

    @property
    def characters(self) -> np.ndarray:
        raise ValueError("Tokenizer: how many characters a token stands for is not known")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "tokenizer", "tokenizer": json.loads(self._tokenizer.to_str()), "pad_id": self.pad_id}


def _byte_symbols() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (Radford et al. 2019, `bytes_to_unicode`)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_symbols()


def _begins(byte: int) -> bool:
    """Whether a character begins with this byte of UTF-8."""
    return not 0x80 <= byte < 0xC0


def _valid(text: str) -> str:
    """Lone surrogates, which have no UTF-8, replaced as in Bytes."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def from_json(data: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a `to_json`. Raises ValueError for a kind that doesn't exist."""
    match data.get("kind"):
        case "bytes":
            return Bytes()
        case "symbols":
            return Symbols(tuple(data["symbols"]))
        case "pixels":
            return Pixels(data["levels"])
        case "image":
            return ImageValues(data["height"], data["width"], data["channels"])
        case "subword":
            return Subword(json.dumps(data["tokenizer"]))
        case "tokenizer":
            return Tokenizer(json.dumps(tokenizer_files.with_padding(data["tokenizer"], data["pad_id"])))
    raise ValueError(
        f"a stored vocabulary has kind {data.get('kind')!r}; allowed: bytes, symbols, pixels, image, subword, tokenizer"
    )


def load(path: str | Path) -> Vocabulary:
    """The vocabulary that `save` wrote."""
    return from_json(json.loads(Path(os.fspath(path)).read_text(encoding="utf-8")))
