"""The user's own documents: every format gives the same data, and every fault is named with its place."""

import csv
import json
import os
from pathlib import Path

import pytest

from xformer.tasks import Documents, reading

ROWS = [(f'Document {i}, with a "quote", a comma\nand a line separator \u2028 é', str(i % 3 + 8)) for i in range(60)]


def write_jsonl(path, rows=ROWS, text="text", label="label"):
    lines = [json.dumps({"id": 1, text: a, label: int(b)}, ensure_ascii=False) for a, b in rows]
    path.write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    return path


def write_csv(path, rows=ROWS, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([("label", "text"), *((b, a) for a, b in rows)])
    return path


def write_folder(path, rows=ROWS):
    for index, (text, label) in enumerate(rows):
        folder = path / label / ("deeper" if index % 2 else "")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    (path / ".git").mkdir()
    (path / ".git" / "not_this.txt").write_text("x")
    (path / "README.txt").write_text("nor this")
    return path


def prepared(tmp_path, **options):
    task = Documents(**options)
    task.prepare(tmp_path / "data")
    return task.open(tmp_path / "data")


def contents(data):
    found = {}
    for split in data.splits:
        batch = next(data.batches(split, data.num_examples(split), seed=0, shuffle=False, epochs=1))
        rows = zip(batch["inputs"], batch["targets"], strict=True)
        found[split] = [(data.vocabulary.decode(row), data.class_names[target]) for row, target in rows]
    return found


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.csv", write_csv),
        ("a.tsv", lambda path: write_csv(path, delimiter="\t")),
        ("folder", write_folder),
    ],
)
def test_every_format_gives_the_same_data(tmp_path, name, write):
    data = prepared(tmp_path, path=str(write(tmp_path / name)), validation_share=0.2, test_share=0.1)
    expected = prepared(tmp_path, path=str(write_jsonl(tmp_path / "b.jsonl")), validation_share=0.2, test_share=0.1)
    found = contents(data)
    assert found == contents(expected)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 42, "validation": 12, "test": 6}
    assert sorted(row for rows in found.values() for row in rows) == sorted(ROWS)
    assert data.class_names == ["8", "9", "10"]  # in order of number
    assert data.info["majority_accuracy"]["test"] == pytest.approx(1 / 3, abs=1e-6)


def test_own_split_files_are_used_as_they_are(tmp_path):
    train = write_csv(tmp_path / "train.csv", ROWS[:40])
    test = write_jsonl(tmp_path / "test.jsonl", ROWS[38:50])
    validation = write_folder(tmp_path / "validation", ROWS[50:])
    data = prepared(tmp_path, path=str(train), validation_path=str(validation), test_path=str(test))
    found = contents(data)
    assert sorted(found["train"]) == sorted(ROWS[:40])
    assert found["test"] == ROWS[38:50]
    assert sorted(found["validation"]) == sorted(ROWS[50:])
    assert (data.info["test_texts_in_train"], data.info["validation_texts_in_train"]) == (2, 0)
    without = contents(prepared(tmp_path, path=str(train), test_path=str(test)))
    assert without["test"] == ROWS[38:50]
    assert len(without["validation"]) == 3 and sorted(without["train"] + without["validation"]) == sorted(ROWS[:40])


def test_named_fields_subwords_and_word_labels(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"body": f"word {i}", "class": "ba"[i % 2]}) for i in range(40)))
    data = prepared(tmp_path, path=str(path), text_field="body", label_field="class", vocab="subword", vocab_size=270)
    assert data.class_names == ["a", "b"]
    assert data.vocab_size <= 270
    assert sorted(row for rows in contents(data).values() for row in rows) == sorted(
        (f"word {i}", "ba"[i % 2]) for i in range(40)
    )


def test_changed_file_is_read_anew(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    assert prepared(tmp_path, path=str(path)).num_examples("train") == 48
    write_jsonl(path, ROWS[:30])
    assert prepared(tmp_path, path=str(path)).num_examples("train") == 24


def test_long_documents_in_csv(tmp_path):
    rows = [(f"{i} " + "x" * 200_000, str(i % 2)) for i in range(8)]
    limit = csv.field_size_limit()
    data = prepared(tmp_path, path=str(write_csv(tmp_path / "a.csv", rows)))
    assert data.info["truncated"]["train"] == 1.0
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"text": "a", "label": 1}\n\n{"text": "b"}',
            r"a.jsonl line 3 has no field 'label'; it has 'text'",
        ),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": ', r"a.jsonl line 2 is no JSON"),
        ("a.jsonl", '["a", 1]', r"line 1 must be a JSON object"),
        ("a.jsonl", '{"text": 3, "label": 1}', r"line 1: field 'text' must be a string, got 3"),
        ("a.jsonl", '{"text": " ", "label": 1}', r"line 1: field 'text' is empty"),
        ("a.jsonl", '{"text": "a", "label": 0.5}', r"line 1: field 'label' must be a label"),
        ("a.jsonl", '{"text": "a", "label": null}', r"line 1: field 'label' must be a label"),
        ("a.jsonl", "", r"a.jsonl is empty"),
        (
            "a.jsonl",
            '{"text": "a", "label": 1}\n{"text": "b", "label": "1"}',
            r"line 2: .* has the string 1, which stands before as the number",
        ),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 1}', r"one class only, '1'"),
        ("a.jsonl", b'{"text": "\xff", "label": 1}', r"a.jsonl line 1 is not UTF-8 \(byte 10\)"),
        ("a.csv", "text,label\na,0\nb\n", r"a.csv line 3 doesn't have the 2 columns"),
        ("a.csv", "text,label\na,0,1\n", r"a.csv line 2 doesn't have the 2 columns"),
        ("a.csv", "body,label\na,0\n", r"line 2 has no field 'text'; it has 'body', 'label'"),
        ("a.csv", 'text,label\n"a,0\n', r"is no CSV: .*row that begins on line 2"),
        ("a.csv", 'text,label\n"a\nb",0\n\n"c" d,1\n', r"is no CSV: .*row that begins on line 5"),
        ("a.csv", 'text,label\n"a\nb",0\n"c\nd",0,1\n', r"a.csv line 4 doesn't have the 2 columns"),
        ("a.csv", 'text,label\n"a\r\nb",0\r\nc,\r\n', r"line 4: field 'label' must be a label"),
        ("a.csv", "text,label,label\na,0,1\n", r"line 1 names the column 'label' 2 times"),
        ("a.csv", "text,text,label\na,b,1\n", r"line 1 names the column 'text' 2 times"),
        ("a.csv", "text,label\na, \n", r"line 2: field 'label' must be a label"),
        ("a.csv", "text,label\na,x\x07y\n", r"line 2: field 'label' must be a label .*, got 'x\\x07y'"),
        ("a.csv", "text,label\na,\u200b\n", r"line 2: field 'label' must be a label"),
        ("a.csv", "text,label\na,0\nb\0,1\n", r"a.csv line 3 holds a zero byte"),
        ("a.csv", "text,label\na,0\n".encode("utf-16"), r"a.csv line 1 is not UTF-8"),
        ("a.csv", b"text,label\na,0\nb\xe9,1\n", r"a.csv line 3 is not UTF-8 \(byte 16\)"),
        ("a.tsv", 'text\tlabel\n"5 inch\tpos\nbad\tneg\na 7"\tpos\n', r"a.tsv line 2: a quote opens a field"),
        ("a.tsv", "text\tlabel\na\tpos\tb\n", r"a.tsv line 2 doesn't have the 2 columns"),
        ("a.jsonl", '{"text": "a", "label": 1, "label": 2}', r"line 1 has the field 'label' twice"),
        ("a.jsonl", '{"text": "a", "label": true}', r"line 1: field 'label' must be a label"),
        ("a.jsonl", '{"text": "a", "label": NaN}', r"line 1: field 'label' must be a label"),
        ("a.jsonl", '{"text": "a", "label": ' + "1" * 5000 + "}", r"line 1: Exceeds the limit"),
        ("a.jsonl", '\n\r\n{"text": "a", "label": 1}\r\n{"text": 1, "label": 1}', r"line 4: field 'text' must be"),
        ("a.csv", "text,label\n", r"a.csv is empty"),
        ("a.csv", "text,label\na,\n", r"line 2: field 'label' must be a label"),
        ("a.csv", "", r"a.csv is empty"),
        ("a.csv", "text,label\na,0\nb,1\n", r"2 documents in .* are too few to cut off validation"),
        ("a.parquet", "x", r"must end in .jsonl, .ndjson, .csv, .tsv or be a folder LABEL/\*.txt"),
    ],
)
def test_faults_are_named_with_their_place_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        Documents(path=str(path)).prepare(tmp_path / "data")
    assert "\n" not in str(error.value)


def test_faults_of_folders_and_split_files(tmp_path):
    (tmp_path / "folder" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="folder is empty: no LABEL"):
        Documents(path=str(tmp_path / "folder")).prepare(tmp_path / "data")
    (tmp_path / "folder" / "a" / "1.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"1.txt is empty"):
        Documents(path=str(tmp_path / "folder")).prepare(tmp_path / "data")
    train = write_jsonl(tmp_path / "a.jsonl")
    other = write_jsonl(tmp_path / "b.jsonl", [("new", "5")])
    with pytest.raises(ValueError, match=r"b.jsonl line 1: label '5' is not in the training documents \(8, 9, 10\)"):
        Documents(path=str(train), test_path=str(other)).prepare(tmp_path / "data")
    with pytest.raises(ValueError, match=r"path: got .nowhere.*, takes a file or folder"):
        Documents(path="nowhere").prepare(tmp_path / "data")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "path must be a non-empty string"),
        ({"path": "x", "test_path": ""}, "test_path"),
        ({"path": "x", "text_field": None}, "text_field"),
        ({"path": "x", "test_share": 0}, "test_share must be a number between 0 and 1"),
        ({"path": "x", "test_share": True}, "test_share"),
        ({"path": "x", "test_share": 0.6, "validation_share": 0.4}, "leave nothing to train on"),
        ({"path": "x", "vocab": "word"}, "vocab"),
    ],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(ValueError, match=named) as error:
        Documents(**options)
    assert "\n" not in str(error.value)


def labels_of(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(document.text, document.label) for document in reading.read(path, "text", "label")]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_tsv_without_quoting_keeps_its_rows(tmp_path, end):
    lines = ["text\tlabel", '"5 inch\tpos', "fine\tneg", '"7 inch\tpos', 'a "quoted" word\tneg']
    expected = [tuple(line.split("\t")) for line in lines[1:]]
    assert labels_of(tmp_path, "a.tsv", end.join(lines) + end) == expected


def test_a_tsv_with_quoting_is_read_by_it(tmp_path):
    content = 'text\tlabel\n"a ""b"" c"\tpos\n"two\nlines\tand a tab"\tneg\nplain\tpos\n'
    expected = [('a "b" c', "pos"), ("two\nlines\tand a tab", "neg"), ("plain", "pos")]
    assert labels_of(tmp_path, "a.tsv", content) == expected


def test_labels_are_stripped_and_those_like_null_kept(tmp_path):
    content = "text,label\na,pos\nb,pos \nc, pos\nd,null\ne,NA\nf,None\ng,nan\nh,e\u0301\ni,\u00e9\n"
    found = [label for _, label in labels_of(tmp_path, "a.csv", content)]
    assert found == ["pos", "pos", "pos", "null", "NA", "None", "nan", "\u00e9", "\u00e9"]


def test_marks_line_ends_and_blank_lines(tmp_path):
    content = b"\xef\xbb\xbftext,label\r\n\r\na,0\r\n\r\nb,1\r\n"
    assert labels_of(tmp_path, "a.CSV", content) == [("a", "0"), ("b", "1")]


def folder_of(path, names):
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"text of {name!a}")
    return path


def test_folders_take_any_case_and_say_what_they_leave_out(tmp_path, caplog):
    names = [f"{label}/{i}.{'TXT' if i % 2 else 'txt'}" for label in ("neg", "pos") for i in range(20)]
    path = folder_of(tmp_path / "f", [*names, "pos/notes.md", "README.txt", ".hidden/a.txt"])
    data = prepared(tmp_path, path=str(path))
    assert sum(data.num_examples(split) for split in data.splits) == 40
    assert "2 files in" in caplog.text and "README.txt" in caplog.text


def test_folder_labels_are_stripped_and_printable(tmp_path):
    path = folder_of(tmp_path / "f", ["pos/a.txt", "pos /b.txt"])
    assert [document.label for document in reading.read(path, "", "")] == ["pos", "pos"]
    for name in (" ", "a\x07", os.fsdecode(b"caf\xe9")):
        path = folder_of(tmp_path / repr(name), [f"{name}/a.txt"])
        with pytest.raises(ValueError, match="folder must be a label") as error:
            reading.read(path, "", "")
        assert "\n" not in str(error.value)


def test_links_are_followed_and_circles_refused(tmp_path):
    elsewhere = folder_of(tmp_path / "elsewhere", ["deep/a.txt"])
    path = folder_of(tmp_path / "f", ["neg/b.txt"])
    (path / "pos").symlink_to(elsewhere)
    assert [document.label for document in reading.read(path, "", "")] == ["neg", "pos"]
    (elsewhere / "deep" / "up").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link to a folder that it lies in"):
        reading.read(path, "", "")
    (elsewhere / "deep" / "up").unlink()
    (path / "neg" / "c.txt").symlink_to("c.txt")
    with pytest.raises(ValueError, match=r"c.txt is a link to nothing"):  # in truth to itself
        reading.read(path, "", "")


def test_copies_that_differ_in_white_space_are_copies(tmp_path):
    train = [(f"text {i}", str(i % 2)) for i in range(40)]
    test = [(f"text  {i}\n", str(i % 2)) for i in range(4)]
    paths = {"path": write_jsonl(tmp_path / "a.jsonl", train), "test_path": write_jsonl(tmp_path / "b.jsonl", test)}
    data = prepared(tmp_path, **{key: str(path) for key, path in paths.items()})
    assert data.info["test_texts_in_train"] == 4
    doubled = [(text + end, label) for text, label in train for end in ("", "\n")]
    found = contents(prepared(tmp_path, path=str(write_jsonl(tmp_path / "c.jsonl", doubled))))
    per_split = [{text.strip() for text, _ in rows} for rows in found.values()]
    assert sum(map(len, per_split)) == len(set().union(*per_split)) == 40


@pytest.mark.parametrize("path", ["a" * 300, "a\0b"])
def test_a_path_that_no_file_can_have_is_refused(path):
    with pytest.raises(ValueError, match="takes a file or folder that is there"):
        reading.files(Path(path))
