"""A user's two files: trained, judged, loaded and translated, with one command each."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from conformance_tasks import write_pairs

import xformer
from xformer import experiment
from xformer.commands import generate as generating
from xformer.config import load_config
from xformer.schema import ConfigError

SMALL = (
    "train.num_steps=2", "train.batch_size=4", "model.num_layers=1", "model.width=16", "model.num_heads=2",
    "model.mlp_dim=32", "task.max_len=40", "task.vocab=bytes", "task.vocab_size=None", "task.num_test=5",
    "task.num_validation=4", "task.num_beams=2", "task.test_share=0.2", "optimizer.warmup_steps=2",
    "train.mesh={'data': 1}",
)  # fmt: skip


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def config_of(folder, *overrides):
    rows = read_lines(write_pairs(folder))
    for side in ("source", "target"):
        (folder / f"a.{side}").write_text("".join(row[side] + "\n" for row in rows), encoding="utf-8")
    own = (f"task.path={folder / 'a.source'}", f"task.target_path={folder / 'a.target'}")
    return load_config("translation:full", [*own, *SMALL, *overrides])


def test_from_two_files_to_a_translated_one(tmp_path, capsys, monkeypatch):
    sacrebleu = pytest.importorskip("sacrebleu")
    workdir = tmp_path / "run"
    result = experiment.build(config_of(tmp_path, "task.length_penalty=1.0")).trainer(workdir, tmp_path / "data").fit()
    rows = read_lines(workdir / "test_outputs.jsonl")
    pairs = {row["source"]: row["target"] for row in read_lines(tmp_path / "pairs.jsonl")}
    assert len(rows) == 5 and all(pairs[row["source"]] == row["reference"] for row in rows)
    texts, references = ([row[key] for row in rows] for key in ("output", "reference"))
    for name, metric in (("bleu", sacrebleu.BLEU()), ("chrf", sacrebleu.CHRF())):
        assert result["test"][name] == pytest.approx(metric.corpus_score(texts, [references]).score)
        assert result["test_details"]["signatures"][name] == str(metric.get_signature())
    assert np.isfinite(result["test"]["perplexity"]) and result["baseline"]["scores"]["test"]["perplexity"] > 1

    run = xformer.load(workdir)
    assert run.generate([row["source"] for row in rows], max_tokens=40, num_beams=2) == texts
    with pytest.raises(ValueError, match="at most 40, got 41"):
        run.generate(["red"], max_tokens=41)
    with pytest.raises(ValueError, match="texts must not be empty"):
        run.generate(["red", " "], max_tokens=4)
    with pytest.raises(ValueError, match="no class for a text"):
        run.predict(["red"])

    given, out = tmp_path / "in.txt", tmp_path / "new" / "out.txt"
    given.write_text(f"{rows[1]['source']}\n\n{rows[0]['source']}\n", encoding="utf-8")
    generating.command([f"--workdir={workdir}", f"--input={given}", f"--out={out}", "--max_tokens=40"])
    assert (
        out.read_text(encoding="utf-8") == f"{' '.join(texts[1].splitlines())}\n\n{' '.join(texts[0].splitlines())}\n"
    )
    for flags, message in (
        ([f"--input={given}", f"--out={given}"], r"--out: got .*in\.txt', which is --input, takes another file"),
        ([f"--input={given}", f"--out={tmp_path}"], "--out: got .*, which is a folder, takes a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            generating.command([f"--workdir={workdir}", *flags])
    with pytest.raises(ConfigError, match="--input: missing"):
        generating.command([f"--workdir={workdir}"])
    with pytest.raises(ConfigError, match=r"--input: got .*none\.txt.*, takes a file that is there"):
        generating.command([f"--workdir={workdir}", f"--input={tmp_path / 'none.txt'}"])
    asked = []

    def record(model, tokens, lengths, *, max_tokens, num_beams, length_penalty, **options):
        asked.append((num_beams, length_penalty))
        return np.zeros((len(tokens), max_tokens), np.int32)

    monkeypatch.setattr(xformer.loading, "generate", record)
    for flags, keywords, expected in (
        ([], {}, (2, 1.0)),  # those of the task
        (["--num_beams=3", "--length_penalty=0.5"], {"num_beams": 3, "length_penalty": 0.5}, (3, 0.5)),
        (["--temperature=0.5"], {"temperature": 0.5}, (1, 1.0)),
    ):
        generating.command([f"--workdir={workdir}", "--prompt=red", *flags])
        run.generate(["red"], max_tokens=4, **keywords)
        assert asked[-2:] == [expected] * 2


@pytest.mark.full
def test_devices_change_nothing(tmp_path):
    """Data, parameters and lengths cut over two devices each, in bfloat16 and with scanned, recomputed layers."""
    assert jax.device_count() >= 8
    losses = {}
    for name, more in {"one": (), "many": ("train.mesh={'data': 2, 'tensor': 2, 'sequence': 2}",)}.items():
        options = ("model.scan_layers=True", "model.remat=True", "model.num_layers=2", "task.num_beams=1", *more)
        result = experiment.build(config_of(tmp_path, *options)).trainer(tmp_path / name, tmp_path / "data").fit()
        losses[name] = result["test"]["loss"]
    assert losses["one"] == pytest.approx(losses["many"], rel=1e-4)


@pytest.mark.full
def test_a_run_goes_on_exactly(tmp_path):
    results = []
    for name, stops in {"whole": [None], "parts": [1, None]}.items():
        for stop in stops:
            config = config_of(tmp_path, f"train.stop_at_step={stop}", "train.checkpoint_every=1")
            trainer = experiment.build(config).trainer(tmp_path / name, tmp_path / "data")
            if stop is None:
                results.append(trainer.fit()["test"])
            else:
                with pytest.raises(Exception, match="stop_at_step is 1"):
                    trainer.fit()
    assert results[0] == results[1]


REFUSED = {
    "op": (
        "model.cross_attention={'name': 'bigbird'}",
        r"^model\.cross_attention\.name: cross_attention takes an op to which positions mean nothing, [^()]*"
        "none of its source; BigBird depends on positions$",
    ),
    "causal": ("model.decoder_attention.name=linformer", "model.decoder_attention.*causal"),
    "packing": (
        "model.cross_attention.name=linformer",
        r"^task\.packing: got True, takes False with this attention: Linformer cannot honour segment_ids",
    ),
    "name": ("model.cross_attention.name=ful", r"model\.cross_attention\.name: got 'ful'.*'full'"),
    "key": ("model.cross_attention={'name': 'full', 'left': 3}", r"model\.cross_attention\.left: got 3"),
    "segments": ("attention={'name': 'linformer'}", "segment_ids"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_slots_are_checked_as_attention_is(name, tmp_path):
    override, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as error:
        experiment.build(config_of(tmp_path, override))
    assert "\n" not in str(error.value)
