"""Chorales: scores written by hand, tokens, keys, splits by piece, guessers; MIDI, piano rolls, the command."""

import io

import numpy as np
import pytest
from conformance_tasks import note, write_chorales, write_score
from test_config import CONFIGS
from train_fake import compile_cache  # noqa: F401

from xformer import comparison, music
from xformer.commands import chorales as command
from xformer.commands import cli, run
from xformer.music.notes import notes
from xformer.tasks import Chorales, DataMissing, chorale_scores, chorale_tokens
from xformer.tasks.token_classification import NO_LABEL

REST = chorale_scores.REST


def measure(*parts):
    return f"<measure>{''.join(parts)}</measure>"


def test_a_score_is_read_on_the_grid(tmp_path):
    """Rests, chords, grace notes, two voices on a staff, accidentals, transposing instruments, several measures."""
    chord = note("C", 4, 4) + note("E", 4, 4, "<chord/>")
    moved = "<attributes><transpose><chromatic>-2</chromatic></transpose></attributes>" + note("D", 5, 8)
    parts = [
        measure(note("F#", 4, 4), note("", 0, 4)) + measure(note("Bb", 3, 1), note("B", 3, 3), note("C", 4, 4)),
        measure(note("A", 5, 0, "<grace/>"), chord, note("C", 4, 4)) + measure(note("D", 4, 8)),
        measure(note("C", 4, 8), "<backup><duration>4</duration></backup>", note("G", 4, 4)) + measure(note("C", 4, 8)),
        measure(moved) + measure("<forward><duration>4</duration></forward>", note("C", 3, 4)),
    ]
    write_score(tmp_path / "one.mxl", parts)
    score = chorale_scores.read(tmp_path / "one.mxl")
    each = lambda *pitches: [pitch for pitch, count in pitches for _ in range(count)]
    np.testing.assert_array_equal(score[:, 0], each((66, 4), (REST, 4), (58, 1), (59, 3), (60, 4)))
    np.testing.assert_array_equal(score[:, 1], each((64, 4), (60, 4), (62, 8)))
    np.testing.assert_array_equal(score[:, 2], each((60, 4), (67, 4), (60, 8)))
    np.testing.assert_array_equal(score[:, 3], each((72, 8), (REST, 4), (46, 4)))


def test_finer_rhythms_are_heard_where_the_grid_looks(tmp_path):
    """Eight divisions a quarter: of two thirty-seconds the first is heard."""
    quick = measure(note("C", 4, 1), note("D", 4, 1), note("E", 4, 6))
    write_score(tmp_path / "one.mxl", [quick] * 4, divisions=8)
    np.testing.assert_array_equal(chorale_scores.read(tmp_path / "one.mxl")[:, 0], [60, 64, 64, 64])


def test_other_files_are_left_out_or_refused(tmp_path):
    write_score(tmp_path / "two.mxl", [measure(note("C", 4, 4))] * 2)
    assert chorale_scores.read(tmp_path / "two.mxl") is None
    with pytest.raises(ValueError, match="chorales: none of 1 files is in four parts"):
        Chorales(path=str(tmp_path)).prepare(tmp_path / "data")
    (tmp_path / "bad.mxl").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"bad.mxl is no compressed MusicXML"):
        chorale_scores.read(tmp_path / "bad.mxl")
    with pytest.raises(ValueError, match=r"path must be a folder with .mxl files, got .*nothing"):
        Chorales(path=str(tmp_path / "nothing")).prepare(tmp_path / "data")


def test_without_the_package_its_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(chorale_scores, "_installed", list)
    with pytest.raises(DataMissing, match="pip install --no-deps music21"):
        Chorales().prepare(tmp_path / "data")


def test_tokens_are_voices_in_turn():
    score = np.array([[72, 67, 64, 48], [72, 67, REST, 48]])
    ids = chorale_tokens.encode(score)
    vocabulary = chorale_tokens.VOCABULARY
    assert vocabulary.decode(ids) == "C5 G4 E4 C3 C5 G4 - C3"
    np.testing.assert_array_equal(vocabulary.encode("C5G4E4C3 C5 G4 - C3"), ids)
    np.testing.assert_array_equal(chorale_tokens.decode(ids), score)
    np.testing.assert_array_equal(chorale_tokens.decode([*ids[:6], 0, *ids]), score[:1])
    np.testing.assert_array_equal(
        chorale_tokens.decode(chorale_tokens.transposed(ids, 2)), np.where(score, score + 2, 0)
    )
    assert chorale_tokens.room(ids) == (chorale_tokens.LOWEST - 48, chorale_tokens.HIGHEST - 72)
    assert vocabulary.size == 2 + chorale_tokens.HIGHEST - chorale_tokens.LOWEST + 1
    with pytest.raises(ValueError, match="pitches must be from 30 to 94, got 95"):
        chorale_tokens.encode(np.array([[95, 60, 60, 60]]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("chorales")
    write_chorales(path)
    return path


def opened(folder, **options):
    task = Chorales(path=str(folder), max_len=48, **options)
    task.prepare(folder / "data")
    return task.open(folder / "data")


def pieces(data, split):
    examples = data.examples(split)
    return [tuple(examples[index].tolist()) for index in range(len(examples))]


def lowest(piece):
    """The piece in the lowest key there is a token for."""
    return tuple(chorale_tokens.transposed(np.array(piece), chorale_tokens.room(np.array(piece))[0]).tolist())


def test_pieces_are_split_whole_and_copies_left_out(folder):
    file = next(iter(sorted(folder.glob("piece*.mxl"))))
    score = chorale_scores.read(file)
    higher = [measure(*_quarters(voice + 12)) for voice in score.T]
    write_score(folder / "copy.mxl", higher)
    data = opened(folder)
    (folder / "copy.mxl").unlink()
    assert data.info["copies_left_out"] >= 1
    found = {split: {lowest(piece) for piece in pieces(data, split)} for split in data.splits}
    assert all(found.values()) and sum(map(len, found.values())) == sum(data.info["documents"].values())
    assert not (found["train"] & found["test"] or found["train"] & found["validation"])


def _quarters(voice):
    """The notes of a voice of quarters without accidentals."""
    letters = dict(zip((0, 2, 4, 5, 7, 9, 11), "CDEFGAB", strict=True))
    return [note(letters[pitch % 12], pitch // 12 - 1, 4) for pitch in voice[::4].tolist()]


def test_training_is_in_other_keys_each_epoch_and_the_rest_is_not(folder):
    plain, other = opened(folder, transpose=0), opened(folder, transpose=3)
    rows = lambda data, split, **options: next(data.batches(split, data.num_examples(split), seed=0, **options))
    batches = other.batches("train", other.num_examples("train"), seed=0, shuffle=False, epochs=None)
    first, second = next(batches), next(batches)
    original = rows(plain, "train", shuffle=False, epochs=1)
    shifts = set()
    for batch in (first, second):
        for name in ("inputs", "targets"):
            pitched = original[name] >= chorale_tokens.FIRST_PITCH
            np.testing.assert_array_equal(batch[name][~pitched], original[name][~pitched])
        moved = (batch["inputs"] - original["inputs"])[:, 1]
        expected = chorale_tokens.transposed(original["inputs"], moved[:, None])
        np.testing.assert_array_equal(batch["inputs"], expected)
        shifts |= set(moved.tolist())
    assert shifts <= set(range(-3, 4)) and len(shifts) > 3
    assert not np.array_equal(first["inputs"], second["inputs"])
    again = rows(other, "train", shuffle=False, epochs=None)
    np.testing.assert_array_equal(again["inputs"], first["inputs"])
    for split in ("validation", "test"):
        options = {"shuffle": False, "epochs": 1}
        np.testing.assert_array_equal(rows(other, split, **options)["inputs"], rows(plain, split, **options)["inputs"])


def test_every_token_is_asked_once_and_the_holding_guesser_is_counted(folder):
    data = opened(folder)
    task = Chorales(path=str(folder), max_len=48)
    batch = next(data.batches("test", data.num_examples("test"), seed=0, shuffle=False, epochs=1))
    assert (batch["targets"] != NO_LABEL).sum() == sum(len(piece) + 1 for piece in pieces(data, "test"))
    found = task.baseline(data)
    (other,) = found["others"]
    hits = total = 0
    for piece in pieces(data, "test"):
        whole = [*piece, 0]
        hits += sum(whole[t] == whole[t - 4] for t in range(4, len(whole)))
        total += len(whole)
    assert hits / total <= other["scores"]["test"]["accuracy"] <= (hits + 4 * len(pieces(data, "test"))) / total
    assert other["scores"]["test"]["loss"] < found["scores"]["test"]["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transpose": -1}, "chorales: transpose must be an int of at least 0, got -1"),
        ({"stride": 2000}, "chorales: stride must be at most max_len 1024, got 2000"),
        ({"test_share": 1.0}, "chorales: test_share must be a number between 0 and 1"),
        ({"path": 3}, "chorales: path must be a string, got 3"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Chorales(**options)


# Music.

SCORE = np.array([[72, 60], [72, 60], [REST, 62], [74, 62], [74, 62]])


def test_notes_are_runs_of_a_pitch():
    assert notes(SCORE[:, 0]) == [(0, 2, 72), (3, 5, 74)] and notes(SCORE[:, 1]) == [(0, 2, 60), (2, 5, 62)]


def test_midi_plays_what_was_written(tmp_path):
    mido = pytest.importorskip("mido")
    music.write_midi(tmp_path / "a.mid", SCORE, quarters_a_minute=60.0)
    file = mido.MidiFile(tmp_path / "a.mid")
    played, now = {}, 0.0
    for message in file:  # in seconds; a sixteenth is a quarter of a second
        now += message.time
        if message.type == "note_on":
            played[message.channel, round(now * 4)] = (message.note, None)
        elif message.type == "note_off":
            start = max(step for channel, step in played if channel == message.channel)
            assert played[message.channel, start][0] == message.note
            played[message.channel, start] = (message.note, round(now * 4))
    found = {(channel, start, stop, pitch) for (channel, start), (pitch, stop) in played.items()}
    assert found == {(voice, *one) for voice in range(2) for one in notes(SCORE[:, voice])}


def test_a_piano_roll_shows_each_note_and_what_was_given():
    image = pytest.importorskip("PIL.Image")
    png = music.picture({"Bach": SCORE, "model": SCORE[:3]}, given_steps=2, title="a piece")
    pixels = np.asarray(image.open(io.BytesIO(png)).convert("RGB")).reshape(-1, 3)
    for colour in ("0072b2", "e69f00"):  # the colours of the two voices
        assert (pixels == np.frombuffer(bytes.fromhex(colour), np.uint8)).all(axis=1).sum() > 100
    assert not (pixels == np.frombuffer(bytes.fromhex("009e73"), np.uint8)).all(axis=1).any()


@pytest.mark.parametrize("score", [np.zeros(3, int), np.zeros((3, 2)), np.full((2, 2), 128)])
def test_what_is_no_score_is_refused(score):
    with pytest.raises(ValueError, match="a score must be int"):
        music.picture({"a": score})


# Runs.


def test_the_comparison_changes_positions_only():
    loaded = comparison.load_comparison(f"{CONFIGS}/compare_chorales.py")
    runs = {variant: run for variant, seed, run in comparison.comparison_runs(loaded) if seed == 0}
    assert {name: run.model.position_embedding for name, run in runs.items()} == {
        "full": "learned", "shaw": "none", "music": "none"
    }  # fmt: skip
    assert {name: run.attention.position.name for name, run in runs.items()} == {
        "full": "none", "shaw": "shaw", "music": "music"
    }  # fmt: skip
    assert all(run.attention.causal for run in runs.values()) and loaded.seeds == (0, 1, 2)


@pytest.mark.full
def test_a_run_is_continued_as_midi_and_pictures(tmp_path, folder, compile_cache, capsys):  # noqa: F811
    mido = pytest.importorskip("mido")
    common = [f"--workdir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'data'}"]
    sizes = ("task.max_len=48", "model.num_layers=1", "model.width=16", "model.mlp_dim=16", "train.batch_size=4")
    sizes += ("train.num_steps=4", f"task.path={folder}", "train.mesh={'data': 1}", "train.eval_every=4")
    argv = [f"--config={CONFIGS}/chorales.py:music", *common, *(f"--config.{one}" for one in sizes)]
    assert cli.exit_code(run.command, argv) == 0
    out = tmp_path / "music"
    argv = [*common, f"--out={out}", "--pieces=2", "--given=6", "--added=4"]
    assert cli.exit_code(command.command, argv) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        f"piece_{number}{end}" for number in (0, 1) for end in (".mid", ".png", "_bach.mid")
    ]
    data = Chorales(path=str(folder), max_len=48).open(tmp_path / "data").examples("test")
    bach = next(
        score for score in map(chorale_tokens.decode, map(data.__getitem__, range(len(data)))) if len(score) > 6
    )
    tracks = [mido.MidiFile(out / f"piece_0{end}.mid").tracks for end in ("", "_bach")]
    assert all(len(file) == 4 for file in tracks)
    pitches = [message.note for message in tracks[1][0] if message.type == "note_on"]
    assert pitches == [pitch for _, _, pitch in notes(bach[:10, 0])]
    assert next(message.note for message in tracks[0][0] if message.type == "note_on") == pitches[0]
    assert cli.exit_code(command.command, [*common, f"--out={out}", "--given=10", "--added=10"]) == 2
    assert "--added: got 10 + 10 sixteenths, the model reads 12" in capsys.readouterr().err
