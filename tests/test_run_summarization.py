"""A user's own texts and summaries: trained, judged and summarised, by each row of the WikiSum table."""

import json

import numpy as np
import pytest
from conformance_tasks import write_pairs

import xformer
from xformer import comparison, experiment
from xformer.commands import run as running
from xformer.config import load_config

SMALL = (
    "train.num_steps=2", "train.batch_size=4", "train.eval_every=2", "model.num_layers=2", "model.width=16",
    "model.num_heads=2", "model.mlp_dim=32", "task.max_len=40", "task.target_max_len=20", "task.vocab=bytes",
    "task.vocab_size=None", "task.num_test=5", "task.num_validation=4", "task.num_beams=2", "optimizer.warmup_steps=2",
    "train.mesh={'data': 1}",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("model.num_experts=3",)], ids=["dense", "experts"])
@pytest.mark.parametrize("row", ["t_ed", "t_d", "t_dmca"])
def test_one_command_from_a_table_to_scored_summaries(row, more, tmp_path, monkeypatch):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    monkeypatch.setenv("XFORMER_DATA", str(tmp_path / "data"))
    workdir, own = tmp_path / "run", f"--config.task.path={write_pairs(tmp_path)}"
    running.command([f"--config=summarization:{row}", f"--workdir={workdir}", own,
                     *(f"--config.{key}" for key in (*SMALL, *more))])  # fmt: skip
    result = json.loads((workdir / "result.json").read_text())
    rows = [json.loads(line) for line in (workdir / "test_outputs.jsonl").read_text().splitlines()]
    assert len(rows) == 5 and np.isfinite(result["test"]["perplexity"])
    scored = [scorer.score(row["reference"], row["output"]) for row in rows]
    for name in ("rouge1", "rouge2", "rougeL"):
        assert result["test"][name] == pytest.approx(np.mean([score[name].fmeasure for score in scored]))
        assert len(result["test_details"]["intervals"][name]) == 2
    assert [method["title"] for method in result["baseline"]["others"]] == ["lead", "nearest"]
    texts = xformer.load(workdir).generate([row["source"] for row in rows], max_tokens=20, num_beams=2)
    assert texts == [row["output"] for row in rows]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "experts"), [("dense", 1), ("experts", 4)])
def test_the_rows_differ_in_model_and_attention_alone(name, experts):
    compared = comparison.load_comparison(f"compare_summarization:{name}")
    runs = {row: run.to_dict() for row, _, run in comparison.comparison_runs(compared)}
    models = {row: (config["model"]["name"], config["attention"]["name"]) for row, config in runs.items()}
    assert models == {
        "t_ed": ("encoder_decoder", "full"),
        "t_d": ("separator_decoder", "full"),
        "t_dmca": ("separator_decoder", "layers"),
    }
    own = ("name", "decoder_attention", "cross_attention", "num_decoder_layers", "shared_embeddings")
    shared = [{key: x for key, x in config["model"].items() if key not in own} for config in runs.values()]
    assert all(model["num_experts"] == experts for model in shared)
    assert all(model == shared[0] for model in shared)
    for section in ("task", "optimizer", "train"):
        assert all(config[section] == runs["t_ed"][section] for config in runs.values())


def test_attention_is_made_for_source_and_target():
    """What a section leaves open is chosen for the positions of both, and positions reach as far."""
    config = load_config("summarization:t_d", ["attention={'name': 'local', 'causal': True}", "task.max_len=960",
                                               "task.target_max_len=64"])  # fmt: skip
    assert experiment.build(config).attention.block_size == 64
    shorter = load_config("summarization:t_d", ["attention={'name': 'local', 'causal': True}", "task.max_len=448",
                                                "task.target_max_len=64"])  # fmt: skip
    assert experiment.build(shorter).attention.block_size == 32
