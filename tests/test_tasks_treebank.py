"""Treebanks: what is read of CoNLL-U files and refused, words in tokens, and runs with positions in trees."""

from pathlib import Path

import numpy as np
import pytest
from conformance import refuses
from conformance_tasks import conllu_row, write_treebank

import xformer
from xformer import comparison, presets
from xformer.tasks import DataMissing, Treebank, conllu
from xformer.tasks.vocab import Bytes


def write(path, *rows):
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_what_is_read_of_a_sentence(tmp_path):
    """Comments and empty nodes are left out; of a token that is two words both are read."""
    path = write(
        tmp_path / "a.conllu",
        "# text = vamonos al mar.",
        "1-2\tvamonos\t_\t_\t_\t_\t_\t_\t_\t_",
        conllu_row(1, "vamos", "VERB", 0, "root"),
        conllu_row(2, "nos", "PRON", 1, "obj"),
        "2.1\tya\t_\t_\t_\t_\t_\t_\t1:advmod\t_",
        "3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_",
        conllu_row(3, "a", "ADP", 5, "case"),
        conllu_row(4, "el", "DET", 5, "det"),
        conllu_row(5, "mar", "NOUN", 1, "obl", "SpaceAfter=No"),
        conllu_row(6, ".", "PUNCT", 1, "punct"),
        "",
        conllu_row(1, "hola", "_", 0, "root"),
    )
    first, second = conllu.read(path)
    assert [word.form for word in first] == ["vamos", "nos", "a", "el", "mar", "."]
    assert [word.parent for word in first] == [-1, 0, 4, 4, 0, 0]
    assert [word.upos for word in first][-2:] == ["NOUN", "PUNCT"] and first[2].deprel == "case"
    assert conllu.text_of(first) == "vamos nos a el mar."
    assert second == [conllu.Word("hola", "", "", "root", -1, True)]


ONE, TWO = conllu_row(1, "a", "X", 2, "x"), conllu_row(2, "b", "X", 0, "root")


@pytest.mark.parametrize(
    ("rows", "line", "words"),
    [
        ([ONE, "2 b X"], 2, "takes 10 columns with a tab between, got 1"),
        ([TWO], 1, "takes the id 1, got '2'"),
        ([ONE, TWO, TWO], 3, "takes the id 3, got '2'"),
        ([ONE], 1, "the head must be 0 or the id of a word, 1 to 1, got '2'"),
        ([ONE, TWO.replace("\t0\t", "\t_\t")], 2, "1 to 2, got '_'"),
        ([ONE, TWO.replace("\t0\t", "\t-1\t")], 2, "got '-1'"),
        ([ONE, TWO.replace("\t0\t", "\t1\t")], 1, "the word depends on itself, by 1 -> 2 -> 1"),
        ([conllu_row(1, "a", "X", 1, "x")], 1, "by 1 -> 1"),
        ([conllu_row(1, " ", "X", 0, "x")], 1, "the word is empty"),
        (["1-3\tab\t_\t_\t_\t_\t_\t_\t_\t_", ONE, TWO], 3, "a token is of words up to 3, got 2"),
        (["1-2\tab\t_\t_\t_\t_\t_\t_\t_\t_", ONE, "2-3\tbc\t_\t_\t_\t_\t_\t_\t_\t_", TWO], 3, "begins after word 2"),
        (["# a", "0.1\tghost\t_\t_\t_\t_\t_\t_\t_\t_"], 2, "the sentence has no word"),
        (["5.1\tab\t_\t_\t_\t_\t_\t_\t_\t_", ONE, TWO], 1, "takes the id 1, got '5.1'"),
    ],
)
def test_faults_name_file_and_line(tmp_path, rows, line, words):
    path = write(tmp_path / "bad.conllu", *rows)
    with refuses(ValueError, f"treebank: {path} line {line}: ", words):
        conllu.read(path)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("treebank")
    task = Treebank(path=write_treebank(folder), max_len=12, vocab="bytes")
    task.prepare(folder / "data")
    return task, task.open(folder / "data"), folder


def test_the_first_part_of_a_word_has_its_tag_and_its_place_in_the_tree(opened):
    _, data, folder = opened
    sentences = {conllu.text_of(one): one for one in conllu.read(folder / "treebank.conllu")}
    held = 0
    for split in data.splits:
        batch = next(data.batches(split, data.num_examples(split) + 1, seed=0, shuffle=False, epochs=1))
        examples = data.examples(split)
        assert (batch["parents"][-1] == -1).all() and (batch["targets"][-1] == -1).all()  # a filler
        for row in range(data.num_examples(split)):
            sentence, held = sentences[Bytes().decode(examples[row])], held + 1
            tags, parents, first = [], [], []
            for index, word in enumerate(sentence):
                space = index > 0 and sentence[index - 1].space
                size, start = len(word.form.encode()) + space, len(tags)
                first.append(start)
                tags += [data.class_names.index(word.upos), *[-1] * (size - 1)]
                parents += [(index,), *[start] * (size - 1)]
            above = [
                (first[sentence[x[0]].parent] if sentence[x[0]].parent >= 0 else -1) if isinstance(x, tuple) else x
                for x in parents
            ]
            wanted = [-1 if x >= 12 else x for x in above[:12]]
            np.testing.assert_array_equal(batch["targets"][row][: len(tags)], tags[:12])
            np.testing.assert_array_equal(batch["parents"][row][: len(wanted)], wanted)
    assert held == len(sentences) + 1 and data.info["copies"] == 1  # the copy is in the split of the first


def test_a_copy_is_in_the_same_split(opened):
    _, data, _ = opened
    texts = [{Bytes().decode(data.examples(s)[i]) for i in range(data.num_examples(s))} for s in data.splits]
    assert sum(map(len, texts)) == len(set.union(*texts)) and data.info["near_duplicates"] == {
        "validation": 0,
        "test": 0,
    }


def test_the_commonest_tag_of_each_word(opened):
    """By counting; words that were not seen get the commonest tag."""
    task, data, folder = opened
    whole = Treebank(path=task.path, vocab="bytes", max_len=200)
    data = whole.open(folder / "data")
    sentences = {conllu.text_of(one): one for one in conllu.read(folder / "treebank.conllu")}
    words = {
        split: [(w.form, w.upos) for i in range(data.num_examples(split))
                for w in sentences[Bytes().decode(data.examples(split)[i])]]
        for split in data.splits
    }  # fmt: skip
    tags = lambda of: [tag for form, tag in words["train"] if of in (form, None)]
    best = lambda found: max(sorted(set(found)), key=found.count)
    answers = [best(tags(form) or tags(None)) == tag for form, tag in words["test"]]
    (other,) = whole.baseline(data)["others"]
    assert other["scores"]["test"]["accuracy"] == pytest.approx(np.mean(answers), abs=1e-6)


def test_files_of_each_split_and_other_columns(tmp_path):
    path = write_treebank(tmp_path)
    task = Treebank(path=path, validation_path=path, test_path=path, column="deprel", vocab="bytes")
    task.prepare(tmp_path / "data")
    data = task.open(tmp_path / "data")
    assert data.class_names == ["det", "obj", "punct", "root"]
    assert data.info["num_examples"]["train"] == data.info["num_examples"]["test"]
    assert data.info["near_duplicates"]["test"] == data.num_examples("test")
    with refuses(ValueError, "no word of train has a xpos"):
        Treebank(path=path, column="xpos", vocab="bytes").prepare(tmp_path / "data")
    (tmp_path / "few").mkdir()
    write(tmp_path / "few" / "a.conllu", conllu_row(1, "hello", "INTJ", 0, "root"))
    with refuses(ValueError, "1 sentences are too few to cut off"):
        Treebank(path=str(tmp_path / "few"), vocab="bytes").prepare(tmp_path / "data")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"column": "lemma"}, "column must be one of upos, xpos, deprel"), ({"vocab": "tokenizer"}, "vocab must be"),
     ({"cut": "tail"}, "cut must be one of head"), ({"path": 3}, "path must be a path"),
     ({"test_path": ""}, "test_path must be a path"), ({"test_share": 1.0}, "test_share must be")],
)  # fmt: skip
def test_refuses_options(options, words):
    with refuses(ValueError, words):
        Treebank(**options)


def test_missing_data_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses(DataMissing, "treebank: no treebank installed", "pip install --no-deps turkish-treebanks", "path"):
        Treebank().prepare(tmp_path)
    with refuses(ValueError, "nowhere.conllu", "takes a CoNLL-U file"):
        Treebank(path=str(tmp_path / "nowhere.conllu")).prepare(tmp_path)


TINY = {
    "train.num_steps": 2,
    "train.eval_every": 2,
    "train.checkpoint_every": 2,
    "train.batch_size": 8,
    "train.mesh": {"data": 1},
    "model.num_layers": 1,
    "model.width": 16,
    "model.mlp_dim": 16,
    "optimizer.warmup_steps": 1,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", ["depth", "both", "tree", "sequential", "none", "bigbird+shaw_tree"])
def test_a_run_with_trees(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("XFORMER_DATA", str(tmp_path / "data"))
    path = write_treebank(tmp_path)
    options = {"task.path": path, "task.vocab": "bytes", "task.vocab_size": None, "task.max_len": 32}
    result = xformer.fit(f"treebank:{spec}", str(tmp_path / "run"), overrides=options | TINY)
    run = xformer.load(tmp_path / "run")
    assert np.isfinite(result["test"]["loss"]) and 0 <= result["test"]["accuracy"] <= 1
    assert result["baseline"]["others"][0]["title"] == "words"
    if spec in ("none", "sequential"):
        assert len(run.predict(["a red house."]).labels[0]) == 12
    else:
        with refuses(ValueError, "parents: positions in trees"):
            run.predict(["a red house."])


def test_the_comparison_changes_positions_alone():
    whole = comparison.load_comparison("compare_treebank")
    runs = comparison.comparison_runs(whole)
    assert {(variant, seed) for variant, seed, _ in runs} == {
        (variant, seed) for variant in ("sequential", "tree", "both", "no_positions") for seed in (0, 1, 2)
    }
    positions = presets.sibling(__file__, "../configs/treebank").POSITIONS
    for variant, _, run in runs:
        named = positions["none" if variant == "no_positions" else variant]
        assert dict(run.attention.position) | named == dict(run.attention.position)
        assert (run.model.position_embedding, run.model.depth_embedding) == ("none", "none")


def test_sentences_without_tags_are_read_and_asked_nothing(tmp_path):
    path = Path(write_treebank(tmp_path))
    bare = conllu_row(1, "bare", "_", 0, "root")
    path.write_text(path.read_text(encoding="utf-8") + f"\n{bare}\n\n# a comment alone\n\n", encoding="utf-8")
    task = Treebank(path=str(path), vocab="bytes")
    task.prepare(tmp_path / "data")
    (other,) = task.baseline(task.open(tmp_path / "data"))["others"]
    assert 0 < other["scores"]["test"]["accuracy"] <= 1
    empty, untagged = tmp_path / "empty.conllu", tmp_path / "untagged.conllu"
    empty.write_text("# a\n\n# b\n")
    write(untagged, bare)
    for key, file, words in (
        ("path", empty, "treebank: no sentence in"), ("test_path", empty, "treebank: no sentence in"),
        ("validation_path", untagged, "no word of validation has a upos in"),
    ):  # fmt: skip
        with refuses(ValueError, words, str(file)):
            Treebank(**{"path": str(path), key: str(file)}, vocab="bytes").prepare(tmp_path / "data")


def test_files_of_a_folder_whatever_the_case_of_their_endings(tmp_path):
    for name in ("b.CONLLU", "a/c.conllu", ".hidden.conllu", ".git/d.conllu", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert conllu.files(tmp_path) == [tmp_path / "a/c.conllu", tmp_path / "b.CONLLU"]
