"""The study compares attention and positions alone, with as many trials and the same budget for all."""

import pytest
from conformance import refuses

from xformer import comparison as comparisons
from xformer import config as configs
from xformer.config import ConfigError

PROBES, TEXTS = ("needle", "order", "recall"), ("reviews", "documents", "documents_pretrained")


def shipped_seeds(part):
    return configs.read_plain(f"study:{part}")["seeds"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", [*PROBES, *TEXTS])
def test_a_part_changes_attention_position_and_seed_alone(part):
    seeds = shipped_seeds(part)
    comparison = comparisons.load_comparison(f"study:{part}", ["seeds=1"])
    assert list(comparison.budget) == ["train_flops"] and ("pretrain" in comparison) == part.endswith("_pretrained")
    assert len(comparison.tune.optimizer.learning_rate) == 4
    assert not any("tune" in change for change in comparison.variants.values())  # one grid for all
    runs = comparisons.comparison_runs(comparison)
    assert (len(runs), seeds) == ((15, (0, 1, 2, 3, 4)) if part in PROBES else (4, (0, 1, 2)))
    for variant, seed, run in runs:
        assert run.seed == seed == 1
        same = {key: run[key] for key in run if key not in ("name", "attention", "model", "seed", "train")}
        assert same == {key: comparison.base[key] for key in same}
        own = {"init_from": run.train.init_from} if "pretrain" in comparison else {}
        assert run.train.to_dict() == comparison.base.train.to_dict() | own
        alone = {"position_embedding": "none"} if "+" in variant else {}
        assert run.model.to_dict() == comparison.base.model.to_dict() | alone
        assert run.attention.position.name == (variant.partition("+")[2] or "none")
        assert run.attention.causal == (part == "recall" and run.attention.name != "linformer")


def test_documents_are_the_same_from_scratch_and_pretrained():
    scratch, pretrained = (comparisons.load_comparison(f"study:{part}") for part in TEXTS[1:])
    assert scratch.base == pretrained.base and scratch.tune == pretrained.tune
    in_all = pretrained.budget.train_flops + pretrained.pretrain.train_flops
    assert scratch.budget.train_flops == in_all
    with refuses(ConfigError, "needle", "documents_pretrained", "reviews2"):
        comparisons.load_comparison("study:reviews2")
