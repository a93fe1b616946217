"""Summarisation: manual pages without what they are to be told, the split, ROUGE, and what needs no model."""

import gzip
import json

import numpy as np
import pytest

from xformer.tasks import DataMissing, Summarization, pairs, papers, summary_scores, trivial_summaries

PAGE = r""".\" NAME - DESCRIPTION
.TH NAME 2 2026 "Manual: DESCRIPTION"
.SH NAME
NAME, NAME2 \- DESCRIPTION
.SH LIBRARY
Standard C library
.SH DESCRIPTION
The call NAME is number NUMBER.
.PP
NAME \- \fBDESCRIPTION\fP
.PP
It is used to DESCRIPTION, as its name tells.
.SH NOTES
A remark on NAME.
"""
ALIKE = {4, 9, 15}  # pages with one description


def description(number):
    return "copy a thing" if number in ALIKE else f"handle thing number {number}"


def write_pages(folder, count=24):
    """Pages of two sections as a package has them, compressed or not, with a link, a stub and one that is damaged."""
    pages = folder / "usr/share/man"
    for number in range(count):
        page = PAGE.replace("DESCRIPTION", description(number)).replace(f".SH {description(number)}", ".SH DESCRIPTION")
        page = page.replace("NAME", f"call{number}").replace(f".SH call{number}", ".SH NAME")
        section = pages / f"man{2 + number % 2}"
        section.mkdir(parents=True, exist_ok=True)
        text = page.replace("NUMBER", str(number)).encode()
        if number % 3:
            (section / f"call{number}.{2 + number % 2}.gz").write_bytes(gzip.compress(text))
        else:
            (section / f"call{number}.{2 + number % 2}").write_bytes(text)
    (pages / "man2" / "other.2.gz").symlink_to("call2.2.gz")
    (pages / "man2" / "stub.2").write_text(".so man2/call0.2\n")
    (pages / "man3" / "bare.3").write_text(".TH bare 3\n.SH NAME\nbare \\- nothing more\n")
    (pages / "man3" / "unnamed.3").write_text(".TH unnamed 3\n.SH DESCRIPTION\nNobody says what it is.\n")
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    task = Summarization(source="manpages", path=str(write_pages(folder)), vocab="bytes", max_len=200, packing=False)
    task.prepare(folder / "data")
    return task, task.open(folder / "data")


def texts(data, split):
    return [tuple(map(data.vocabulary.decode, pair)) for pair in data.pairs(split)]


def test_no_source_holds_its_answer(pages):
    """Neither the NAME section, the header, a remark, nor a paragraph that says it again; the rest stays."""
    data = pages[1]
    every = [pair for split in data.splits for pair in texts(data, split)]
    assert sorted(target for _, target in every) == sorted(map(description, range(24)))
    for source, target in every:
        number = int(source.split("number ")[1].split(".")[0])
        assert target == description(number)
        assert not pairs.tells(source, target) and f"call{number} -" not in source and "2026" not in source
        assert source == f"The call call{number} is number {number}. A remark on call{number}."
    assert data.info["paragraphs_that_tell_left_out"] == 48
    assert pairs.tells("To COPY   a (thing).", "copy a thing") and not pairs.tells("copy a things", "a thing")


def test_a_page_is_in_one_part_whatever_its_aliases(pages):
    data = pages[1]
    split = {part: texts(data, part) for part in data.splits}
    assert data.info["pages"] == 27 and data.info["not_described_left_out"] == 3  # the stub and two without both
    assert sum(map(len, split.values())) == 24 and all(split.values())
    alike = [part for part, found in split.items() if any(target == "copy a thing" for _, target in found)]
    assert len(alike) == 1
    for part, found in split.items():
        others = {text for other in split if other != part for pair in split[other] for text in pair}
        assert not others & {text for pair in found for text in pair}


def test_pages_that_are_missing_or_damaged(tmp_path):
    with pytest.raises(DataMissing, match=r"apt-get download manpages manpages-dev && .*dpkg-deb -x \$deb") as error:
        Summarization(vocab="bytes").prepare(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path / "summarization") in str(error.value)
    file = tmp_path / "summarization/man2/a.2.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(b".SH NAME")[:-9])
    with pytest.raises(DataMissing, match=r"a\.2\.gz is damaged"):
        Summarization(vocab="bytes").prepare(tmp_path)


def test_papers_without_their_abstracts(tmp_path):
    """A paragraph with a sentence of the abstract is left out, and a paper without a body or an abstract."""
    abstract = "We present a method that reads papers in order. It works."
    body = ["Reading is hard.", "Here, we present a method that reads  papers in order. And more.", "It works."]
    paper = {"abstract": abstract, "pdf_parse": {"body_text": [{"text": text} for text in body]}}
    counts = {"paragraphs_that_tell_left_out": 0}
    assert papers.summarised_paper(paper, "a", counts) == pairs.Pair("Reading is hard. It works.", abstract, "a")
    assert counts["paragraphs_that_tell_left_out"] == 1
    for wrong in ({"abstract": ""}, {"pdf_parse": {"body_text": []}}):
        assert papers.summarised_paper({**paper, **wrong}, "a", counts) is None
    (folder := tmp_path / "papers").mkdir()
    for index in range(6):
        own = {**paper, "abstract": f"{abstract} Really, {index} times in all, whatever it was."}
        own["pdf_parse"] = {"body_text": [{"text": f"Paper {index} is here."}]}
        (folder / f"{index}.json").write_text(json.dumps(own))
    (folder / "empty.json").write_text("{}")
    task = Summarization(source="papers", path=str(folder), vocab="bytes", target_max_len=128)
    task.prepare(tmp_path / "data")
    data = task.open(tmp_path / "data")
    assert sum(data.info["pairs"].values()) == 6 and data.info["without_both_left_out"] == 1
    with pytest.raises(DataMissing, match=r"no papers in .*nowhere; install the package .*aclsum"):
        Summarization(source="papers", path=str(tmp_path / "nowhere"), vocab="bytes").prepare(tmp_path)


def test_own_pairs_may_be_of_any_lengths(tmp_path):
    """A long text with a short summary stays, which translation would leave out; a copy does not."""
    rows = [{"text": f"{index} " + "word " * 60, "headline": f"the {index}th"} for index in range(20)]
    rows.append({"text": "the same again and again", "headline": "The same again and again!"})
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Summarization(path=str(tmp_path / "own.jsonl"), source_field="text", target_field="headline", vocab="bytes")
    task.prepare(tmp_path / "data")
    info = task.open(tmp_path / "data").info
    assert sum(info["pairs"].values()) == 20 and info["copies_left_out"] == 1 and "unequal_left_out" not in info


def test_rouge_is_that_of_the_package():
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    references = ["open and possibly create a file", "delete a name", "copy memory area", "naïve text"]
    predictions = ["create or open a file", "delete a name", "", "text naïve"]
    found = summary_scores.scores(predictions, references)
    whole = scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    for name in ("rouge1", "rouge2", "rougeL"):
        both = zip(references, predictions, strict=True)
        assert found.metrics[name] == pytest.approx(np.mean([whole.score(*pair)[name].fmeasure for pair in both]))
        low, high = found.details["intervals"][name]
        assert 0 <= low < found.metrics[name] < high <= 1
    assert found.details["rouge"].startswith("rouge-score 0.")
    assert summary_scores.scores(["a b"], ["a b"]).details["intervals"]["rouge1"] is None


def test_letters_that_rouge_does_not_read_are_told(caplog):
    """It reads ASCII letters and digits alone: of a right summary in Russian nothing is left."""
    task = Summarization(path="a.jsonl")
    assert task.score(["насос стоял"], ["насос стоял"]).metrics["rouge1"] == 0
    assert "100 % of the letters of the references are not ASCII" in caplog.text
    caplog.clear()
    assert task.score(["über 3 Öfen"], ["über 3 Öfen"]).metrics["rouge1"] == 1 and not caplog.text
    assert summary_scores.unread(["12"]) == summary_scores.unread([]) == 0


def test_the_interval_is_that_of_a_mean():
    values = np.random.default_rng(3).normal(0.3, 0.1, 400)
    low, high = summary_scores.interval(values)
    half = 1.96 * values.std() / 20
    assert abs(low - (values.mean() - half)) < 0.1 * half and abs(high - (values.mean() + half)) < 0.1 * half
    assert summary_scores.interval(values) == [low, high]


def test_what_needs_no_model(pages):
    """The lead is cut by sentences and chosen on validation; the nearest is the one with most rare words in common."""
    pytest.importorskip("rouge_score")
    assert trivial_summaries.lead("  One. Two? Three! Four.", 2) == "One. Two?"
    assert trivial_summaries.lead("no end", 3) == "no end"
    known = ["the cat sat", "the dog ran", "the the the"]
    assert trivial_summaries.nearest(known, ["a dog and the end", "sat", "unknown"]) == [1, 0, 0]
    assert trivial_summaries.nearest(["!", "?"], ["a"]) == [0]
    task, data = pages
    found = task.baseline(data)
    assert found["scores"]["test"]["perplexity"] > 1
    lead, nearest = found["others"]
    assert (lead["title"], nearest["title"]) == ("lead", "nearest")
    test = texts(data, "test")
    rows = [
        f"The call call{n} is number {n}." for n in (source.split("number ")[1].split(".")[0] for source, _ in test)
    ]
    scored = summary_scores.scores(rows, [target for _, target in test]).metrics
    assert lead["name"] == "answers with the first sentence of a text"
    assert lead["scores"]["test"] == {name: round(value, 6) for name, value in scored.items()}
    assert set(nearest["scores"]) == {"validation", "test"} and 0 <= nearest["scores"]["test"]["rougeL"] <= 1


def test_options_that_do_not_fit():
    for options, message in {
        "source": ({"source": "books"}, "source"),
        "files": ({"source": "files"}, "source='files' needs a path"),
        "target": ({"target_path": "b.txt"}, "target_path is for one's own files"),
    }.values():
        with pytest.raises(ValueError, match=message):
            Summarization(**options)
