"""Translation: what is read of files and packages, what is left out, how it is split, rows, and the loss."""

import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance_tasks import write_pairs

from xformer.nn import Logits
from xformer.tasks import (
    DataMissing,
    TargetTokens,
    Translation,
    pairs,
    parallel_files,
    parallel_packages,
    roff,
    sequence_to_sequence,
)
from xformer.tasks.pair_rows import pair_rows
from xformer.tasks.pairs import Pair
from xformer.tasks.ragged import Ragged

PAGE = r""".\" Copyright
.TH open 2
.SH NAME
open \- open a file
.SH "OTHER \fIPARTS\fP"
The
.BR open ()
call opens
.IR path "\-name" .
.\" a remark
It\(aqs \fBbold\fP and \e \*(lqquoted\*(rq.
.PP
Second.
.nf
    code
.fi
.TP
.B O_APPEND \" a tag
Appends
at the end.
.IP \(bu 2
a point
.SS Part
End \
of it
"""
GERMAN = [r".SH BEZEICHNUNG", r"open \- eine Datei öffnen", '.SH "ANDERE TEILE"', "Der Aufruf öffnet den Pfad.", ".PP",
          "Zweiter.", ".TP", "O_APPEND", "Hängt am Ende an.", r".IP \(bu 2", "ein Punkt", ".SS Teil", "Ende davon",
          ".SH ÜBERSETZUNG", "Von jemandem."]  # fmt: skip


def test_the_text_of_a_manual_page():
    first, second = roff.sections(PAGE)
    assert first == roff.Section("NAME", ["open - open a file"])
    assert second.heading == "OTHER PARTS"
    assert second.paragraphs == [
        "The open() call opens path-name. It's bold and \\ “quoted”.",
        "Second.",
        "O_APPEND",
        "Appends at the end.",
        "•",
        "a point",
        "Part",
        "End of it",
    ]
    assert roff.sections(".Dd today\n.Sh NAME\n.Nm x\n") == [] and roff.sections(".so man2/open.2\n") == []


def write_manuals(folder, number=30):
    for language, page in (("", PAGE), ("de", "\n".join(GERMAN))):
        man = folder / "usr" / "share" / "man" / language / "man2"
        man.mkdir(parents=True)
        for index in range(number):
            own = page.replace("Second.", f"The second, {index}.").replace("Zweiter.", f"Nummer zwei: {index}.")
            (man / f"page{index}.2.gz").write_bytes(gzip.compress(own.encode()))
    (folder / "usr/share/man/man2/english.2.gz").write_bytes(gzip.compress(PAGE.encode()))
    (folder / "usr/share/man/de/man2/page0.2.gz").write_bytes(gzip.compress(b".SH EINS\nallein\n"))


def test_manual_pages_are_aligned_and_split_by_page(tmp_path):
    write_manuals(tmp_path)
    shares = {"validation": 0.2, "test": 0.2}
    texts = parallel_packages.source("manpages", tmp_path, "de", False, shares).read()
    found = {
        split: dict(zip(sources, texts.second[split], strict=True)) for split, (sources, _) in texts.splits.items()
    }
    whole = {**found["train"], **found["validation"], **found["test"]}
    assert whole["Appends at the end."] == "Hängt am Ende an." and "O_APPEND" not in whole and "•" not in whole
    assert all(whole[f"The second, {index}."] == f"Nummer zwei: {index}." for index in range(1, 30))
    assert sum(map(len, found.values())) == len(whole) == 29 + 6  # what all pages share stands once
    assert texts.facts["pages"] == 30 and texts.facts["copies_left_out"] == 29 * 2
    assert texts.facts["repeated_left_out"] == 28 * 6 and len(found["test"]) >= 6
    backward = parallel_packages.source("manpages", tmp_path, "de", True, shares).read()
    assert "Hängt am Ende an." in {text for sources, _ in backward.splits.values() for text in sources}
    with pytest.raises(
        DataMissing, match=r"no manpages in English and 'fr' in .*: apt-get download manpages .*-fr-dev"
    ):
        parallel_packages.source("manpages", tmp_path, "fr", False, shares)
    (tmp_path / "usr/share/man/man2/page3.2.gz").write_bytes(b"no gzip")
    with pytest.raises(DataMissing, match=r"page3\.2\.gz is damaged"):
        parallel_packages.source("manpages", tmp_path, "de", False, shares).read()


def test_help_pages_are_aligned_by_identifier(tmp_path):
    page = '<p id="par_id{}">{} <span class="x">{}</span>&amp;<br>{}</p><h1 id="hd_id1">{}</h1><p>no id</p>'
    for index in range(6):
        for language, words in (("en-US", ("the", "big", "house", "Head")), ("de", ("das", "grosse", "Haus", "Kopf"))):
            file = tmp_path / "usr/share/libreoffice/help" / language / "text" / "a" / f"{index}.html"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(page.format(7, *(f"{word}{index * 11}" for word in words)), encoding="utf-8")
    texts = parallel_packages.source("libreoffice", tmp_path, "de", False, {"validation": 0.2, "test": 0.2}).read()
    whole = {
        s: t for split, (sources, _) in texts.splits.items() for s, t in zip(sources, texts.second[split], strict=True)
    }
    assert (
        whole["the11 big11& house11"] == "das11 grosse11& Haus11" and whole["Head22"] == "Kopf22" and len(whole) == 12
    )


def test_what_is_left_out_is_counted():
    counts = {}
    kept = [Pair("one red house", "ein rotes Haus"), Pair("two", "zwei"), Pair("O_APPEND", "anhängen")]
    others = [
        Pair("One  red house", "ein rotes Haus"),
        Pair("See open(2), version 3", "see OPEN(2), Version 4"),
        Pair("x" * 41, "kurz"),
    ]
    assert pairs.cleaned([kept[0], others[0], kept[1], *others[1:], kept[2]], counts) == kept
    assert counts == {"copies_left_out": 1, "repeated_left_out": 1, "unequal_left_out": 1}
    again = {}
    assert pairs.cleaned([*kept, *others], again, keep_copies=True) == [*kept, others[1]]
    assert again == {"copies_kept": 1, "repeated_left_out": 1, "unequal_left_out": 1}


def test_no_text_is_in_two_parts():
    random = np.random.default_rng(0)
    made = [Pair(f"s{random.integers(300)}", f"t{random.integers(300)}", f"p{random.integers(40)}") for _ in range(400)]
    counts = {}
    by_page = pairs.by_group(made, {"validation": 0.2, "test": 0.2}, counts)
    linked = pairs.grouped([pair._replace(target=f"t{random.integers(2000)}") for pair in made])
    own = pairs.by_group(linked, {"validation": 0.2, "test": 0.2}, {})
    assert sum(map(len, by_page.values())) + counts["in_other_parts_left_out"] == 400
    assert sum(map(len, own.values())) == 400  # those that share a text are together: nothing has to be left out
    for split in (by_page, own):
        for side in ("source", "target"):
            texts = [{getattr(pair, side) for pair in part} for part in split.values()]
            assert not (texts[0] & texts[1] or texts[0] & texts[2] or texts[1] & texts[2])
    pages = [{pair.group for pair in part} for part in by_page.values()]
    assert len(set.union(*pages)) == sum(map(len, pages))


def test_two_files_whose_lines_belong_together(tmp_path):
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    source.write_text("".join(f"house {i}\n" for i in range(50)) + "\n last", encoding="utf-8")
    target.write_text("".join(f"Haus {i}\n" for i in range(50)) + "\nEnde \n", encoding="utf-8")
    read = lambda: parallel_files.read(parallel_files.Files(source, target), ("source", "target"))
    assert read()[0] == Pair("house 0", "Haus 0") and read()[-1] == Pair("last", "Ende") and len(read()) == 51
    target.write_text("Haus\n")
    with pytest.raises(ValueError, match=r"target_path: .*a\.de must have as many lines as .*a\.en, got 1 and 52"):
        read()
    target.write_text("Haus\n" * 50 + "mehr\nEnde")
    with pytest.raises(ValueError, match=r"target_path: line 51 is empty in .*a\.en alone"):
        read()


def test_tables_of_pairs(tmp_path):
    rows = [(f"house {i}", f"Haus {i}") for i in range(40)]
    tsv, jsonl = tmp_path / "a.tsv", tmp_path / "a.jsonl"
    tsv.write_text("source\ttarget\n" + "".join("\t".join(row) + "\n" for row in rows))
    jsonl.write_text("".join(json.dumps({"en": one, "de": two}) + "\n" for one, two in rows))
    own = parallel_files.read(parallel_files.Files(tsv, None), ("source", "target"))
    assert own == parallel_files.read(parallel_files.Files(jsonl, None), ("en", "de")) == [Pair(*row) for row in rows]
    lines, two = tmp_path / "a.en", tmp_path / "b.de"
    linked, none = tmp_path / "linked.tsv", tmp_path / "none.tsv"
    lines.write_text("house\n")
    two.write_text("Haus\nBaum\n")
    linked.write_text("source\ttarget\n" + "".join(f"house\tHaus {i}\n" for i in range(9)))
    for options, message in (
        ({"path": str(lines)}, r"^path: .*a\.en must be a table .*, or have task\.target_path: the file of its"),
        ({"path": str(tsv), "test_path": str(lines)}, r"^test_path: .*, or have task\.test_target_path: the file"),
        (
            {"path": str(tsv), "test_path": str(lines), "test_target_path": str(two)},
            r"^test_target_path: .*b\.de must have as many lines as .*a\.en, got 2 and 1",
        ),
        (
            {"path": str(tsv), "validation_path": str(lines), "validation_target_path": str(jsonl)},
            r"^validation_target_path: got .*a\.jsonl', but .*a\.jsonl is a table, .*; takes None",
        ),
        ({"path": str(jsonl), "target_path": str(lines)}, r"^target_path: got .*a\.en', but .*a\.jsonl is a table"),
        ({"path": str(tsv), "validation_path": str(none)}, r"^validation_path: got .*, takes a file that is there"),
        ({"path": str(tsv), "test_path": str(tsv), "test_target_path": str(none)}, r"^test_target_path: got "),
        (
            {"path": str(linked)},
            "^path: 9 pairs in 1 group, each for one part alone, are too few to cut off validation",
        ),
        ({"path": str(jsonl)}, "has no field 'target'"),
        ({"path": str(none)}, "takes a file that is there"),
        ({"path": str(tsv), "source": "manpages", "target_path": str(tsv)}, "target_path is for one's own files"),
        ({"source": "files"}, "needs a path"),
        ({"label_smoothing": 1.0}, "label_smoothing must be a number of at least 0 and below 1, got 1.0"),
        ({"vocab": "tokenizer", "tokenizer": "x"}, "tokenizer"),
        ({"languages": "en-it"}, "languages must be one of en-de, en-fr"),
        ({"cut": "tail"}, "cut must be 'head'"),
        ({"num_beams": 0}, "num_beams must be"),
        ({"test_target_path": str(tsv), "path": str(tsv)}, "test_target_path must be None where there is no test_path"),
    ):
        with pytest.raises(ValueError, match=message):
            Translation(**options).prepare(tmp_path / "data")


def test_prepared_pairs_come_back_and_no_target_is_in_its_input(tmp_path):
    task = Translation(path=write_pairs(tmp_path), max_len=40, vocab="bytes", validation_share=0.2, test_share=0.2)
    task.prepare(tmp_path / "data")
    data = task.open(tmp_path / "data")
    assert data.info["copies_left_out"] == 1 and sum(data.info["pairs"].values()) == 60
    spell = data.vocabulary.decode
    kept = {spell(source): spell(target) for split in data.splits for source, target in data.pairs(split)}
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert kept == {row["source"]: row["target"] for row in rows[1:]}
    whole = dataclasses.replace(task, keep_copies=True)
    whole.prepare(tmp_path / "data")  # beside the other
    assert whole.folder(tmp_path / "data") != task.folder(tmp_path / "data")
    info = whole.open(tmp_path / "data").info
    assert sum(info["pairs"].values()) == 61 and info["copies_kept"] == 1 and "copies_left_out" not in info
    assert data.num_examples("train") < data.info["pairs"]["train"] == sum(1 for _ in data.pairs("train"))
    batch = next(data.batches("train", 4, seed=0, shuffle=False, epochs=1))
    inputs = task.inputs(batch)
    for row in range(4):
        for segment in range(1, inputs["segment_ids"][row].max() + 1):
            own = inputs["decoder_segment_ids"][row] == segment
            source = spell(inputs["inputs"][row][inputs["segment_ids"][row] == segment])
            read, told = inputs["decoder_inputs"][row][own], batch["targets"][row][own]
            assert read[0] == told[-1] == 0 and read[1:].tolist() == told[:-1].tolist()
            assert spell(told) == kept[source]


def test_lengths_that_reports_go_by_are_not_cut(tmp_path):
    task = Translation(path=write_pairs(tmp_path), max_len=8, vocab="bytes", validation_share=0.2, test_share=0.2)
    task.prepare(tmp_path / "data")
    data = task.open(tmp_path / "data")
    lengths = data.facts_by_example("test")["length"]
    assert len(lengths) == data.num_examples("test") and lengths.max() > task.max_len
    assert lengths.sum() == sum(len(source) for source, _ in data.pairs("test"))


def test_each_pair_stands_once_and_fits():
    random = np.random.default_rng(0)
    lengths, target_lengths = random.integers(1, 30, 500), random.integers(1, 40, 500)
    rows = pair_rows(lengths, target_lengths, 48, 32, together=True)
    assert sorted(rows.pairs.tolist()) == list(range(500))
    sources, targets = np.minimum(lengths, 48), np.minimum(target_lengths + 1, 32)
    for row in range(len(rows)):
        own = rows.pairs[rows.first[row] : rows.first[row + 1]]
        assert len(own) and sources[own].sum() <= 48 and targets[own].sum() <= 32
    assert targets.sum() / (len(rows) * 32) > 0.9  # little room is left
    tokens = lambda sizes: [np.arange(1, size + 1) for size in sizes]
    pairs_of = Ragged.from_lists(tokens([60, 2]), np.zeros((2, 0), bool), np.uint16, second=tokens([31, 32]))
    cut = pair_rows(np.array([60, 2]), np.array([31, 32]), 48, 32, together=False).read(pairs_of, np.arange(2), 2)
    assert cut["inputs"][0].tolist() == list(range(1, 49))
    assert cut["targets"][0].tolist() == [*range(1, 32), 0] and cut["targets"][1].tolist() == list(range(1, 33))


def test_a_model_that_says_nothing_is_told_of(tmp_path, monkeypatch, caplog):
    task = Translation(path=write_pairs(tmp_path), max_len=40, vocab="bytes", validation_share=0.2, test_share=0.2)
    task.prepare(tmp_path / "data")
    data = task.open(tmp_path / "data")
    monkeypatch.setattr(
        sequence_to_sequence, "generate", lambda model, tokens, *_, **__: np.zeros((len(tokens), 0), int)
    )
    found = task.outputs(None, data, "test")
    assert set(found.texts) == {""} and found.metrics["bleu"] == 0
    assert f"each of the {len(found.texts)} texts generated for test is empty" in caplog.text


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothed_loss_and_perplexity(smoothing):
    random = np.random.default_rng(0)
    hidden, table = random.normal(size=(3, 5, 8)).astype(np.float32), random.normal(size=(11, 8)).astype(np.float32)
    targets = random.integers(0, 11, (3, 5)).astype(np.int32)
    targets[0, 3:] = -1
    batch = {"targets": jnp.asarray(targets), "weights": jnp.array([1.0, 1.0, 0.0])}
    asked = np.stack([(targets >= 0)[row] & (row < 2) for row in range(3)])
    dense = hidden @ table.T
    wanted = optax.smooth_labels(jax.nn.one_hot(targets, 11), smoothing)
    loss = np.asarray(optax.softmax_cross_entropy(jnp.asarray(dense), wanted))[asked].mean()
    plain = np.asarray(optax.softmax_cross_entropy(jnp.asarray(dense), jax.nn.one_hot(targets, 11)))[asked].mean()
    family = TargetTokens(smoothing)
    for outputs in (Logits(jnp.asarray(hidden), jnp.asarray(table)), jnp.asarray(dense)):
        found = family.metrics(outputs, batch)
        values, weights = map(np.asarray, found["loss"])
        np.testing.assert_allclose((values * weights).sum() / weights.sum(), loss, rtol=1e-5)
        sums = {"loss": (1.0, 2.0), "nats": np.asarray(found["nats"], np.float64)}
        np.testing.assert_allclose(family.finish(sums)["perplexity"], np.exp(plain), rtol=1e-5)


def test_what_is_left_out_is_said_and_nothing_left_is_an_error(caplog):
    caplog.set_level("INFO")
    some = [
        pairs.Pair("one red cat", "une katze"),
        pairs.Pair("a b c", "A b, c."),
        pairs.Pair("one red cat", "une katze"),
    ]
    assert len(pairs.cleaned(some, {})) == 1
    assert (
        "1 pairs are kept; left out: 1 whose target is its source again or nearly so, 1 that stand there" in caplog.text
    )
    with pytest.raises(
        ValueError, match="path: all pairs were left out: 1 whose target is its source again or nearly so"
    ):
        pairs.cleaned(some[1:2], {})
