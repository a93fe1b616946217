"""What a trained model says of texts or images in files, as CSV or JSON lines.

  xformer predict --workdir=runs/mine --input=folder --out=predictions.csv

--input is a .txt file, a folder of .txt files at any depth, or a .jsonl, .csv or .tsv file with the field of the texts
(the one the model was trained on, unless --text_field names another; labels are not read); for a model of images an
image, or a folder of images at any depth. --out ends in .csv (place, label, its probability, truncated) or .jsonl (the
probability of every class besides); where it is left out, JSON lines are printed. A text longer than the model reads is
cut as in training, and `truncated` is true.
Exit codes: 0 finished; 2 wrong arguments or input, nothing written; 1 anything else.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xformer import loading
from xformer.commands import cli
from xformer.schema import ConfigError
from xformer.tasks import image_folder, reading, vocab
from xformer.tasks.predictions import LabelPredictions, NumberPredictions, TokenPredictions
from xformer.train import workdir as folders

FORMATS = (".csv", ".jsonl")


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--workdir", help="folder of the trained run")
    parser.add_argument("--input", required=True, help="file or folder of texts, or of images")
    parser.add_argument("--out", help="predictions.csv or .jsonl; printed as JSON lines where it is left out")
    parser.add_argument("--text_field", help="field of a table that holds the texts")
    parser.add_argument("--threshold", type=float, help="probability from which on a label is given, where there are "
                        "several labels a text (default 0.5)")  # fmt: skip
    parser.add_argument("--batch_size", type=int, default=32, help="texts that are computed at a time (default 32)")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    args, overrides = parser.parse(argv)
    workdir = parser.trained(args, overrides)
    out = None if args.out is None else Path(args.out)
    if out is not None and out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out: got {args.out!r}, takes a file that ends in {' or '.join(FORMATS)}")
    if args.batch_size < 1:
        raise ConfigError(f"--batch_size: got {args.batch_size}, takes an integer of at least 1")
    run = loading.load(workdir, args.checkpoint)
    try:
        places, inputs = _inputs(run, Path(args.input).expanduser(), args.text_field)
        found = run.predict(inputs, args.batch_size, threshold=args.threshold)
    except ValueError as error:
        raise ConfigError(f"--input: {error}") from error
    rows = list(_rows(places, found, run.class_names))
    if out is None:
        print(_json_lines(rows), end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    content = _csv(rows) if out.suffix.lower() == ".csv" else _json_lines(rows)
    folders.write_bytes(out, content.encode())
    cut = int(found.truncated.sum())
    cli.say(f"{len(rows)} predictions in {out}" + (f", {cut} of texts that were cut" if cut else ""))


def _inputs(run: loading.Loaded, path: Path, text_field: str | None) -> tuple[list[str], list[Any]]:
    """(place, what the model reads) of each example: a text, a pair of texts or the file of an image.

    Raises ValueError for what can't be read.
    """
    vocabulary = run.preprocess.vocabulary
    if isinstance(vocabulary, vocab.ImageValues):
        if text_field is not None:
            raise ValueError(f"takes no --text_field, as the model reads images, got {text_field!r}")
        found = image_folder.unlabelled(path)
        return [place for place, _ in found], [file for _, file in found]
    if isinstance(vocabulary, vocab.Pixels) and path.suffix.lower() in image_folder.ENDINGS:
        raise ValueError(
            f"got {str(path)!r}, takes a .txt file or a table: this model reads an image as a text, its pixels as "
            f"numbers from 0 to {vocabulary.levels - 1} with spaces between"
        )
    task = run.config.task
    second_field = task.get("text2_field", "text2") if run.preprocess.num_texts == 2 else None
    documents = reading.read_unlabelled(path, text_field or task.get("text_field", "text"), second_field)
    if second_field is not None and documents[0].second is None:
        raise ValueError(f"got {str(path)!r}, takes a table with pairs of texts, as the model compares two")
    texts = [doc.text if doc.second is None else (doc.text, doc.second) for doc in documents]
    return [document.place for document in documents], texts


def _rows(places: Sequence[str], found: Any, class_names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row a text, as JSON lines hold it."""
    for index, place in enumerate(places):
        row: dict[str, Any] = {"place": place}
        if isinstance(found, NumberPredictions):
            row["number"] = float(found.numbers[index])
        elif isinstance(found, TokenPredictions):
            row["labels"] = found.labels[index]
        else:
            shares = dict(zip(class_names, (round(float(x), 6) for x in found.probabilities[index]), strict=True))
            several = isinstance(found, LabelPredictions)
            row |= {"labels" if several else "label": found.labels[index]}
            row |= {} if several else {"probability": shares[found.labels[index]]}
            row["probabilities"] = shares
        yield row | {"truncated": bool(found.truncated[index])}


def _json_lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows without the probabilities of all classes; several labels with `;` between."""
    flat = [
        {key: ";".join(value) if isinstance(value, list) else value for key, value in row.items()
         if key != "probabilities"}
        for row in rows
    ]  # fmt: skip
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
