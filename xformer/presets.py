"""What the experiment files share: attention variants by short name, and the shape of experiments and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict


def attention(
    variant: str, *, max_len: int, block_size: int, rank: int, projection: str = "learned", random_blocks: int = 3
) -> dict[str, Any]:
    """The attention section of a variant: an op (`bigbird`), a position with full attention (`shaw`) or `op+position`.

    Args:
      max_len: longest input in tokens.
      block_size: of BigBird; the window reaches one such block to each side, as BigBird's three window blocks do.
      rank, projection: of Linformer, which projects keys and values alike, so that it has few parameters of its own.
      random_blocks: of BigBird, for each row of blocks.
    """
    ops: dict[str, dict[str, Any]] = {
        "full": {},
        "window": {"left": block_size, "right": block_size},
        "bigbird": {
            "block_size": block_size,
            "num_window_blocks": 3,
            "num_random_blocks": random_blocks,
            "num_global_blocks": 2,
        },
        "linformer": {"rank": rank, "max_len": max_len, "sharing": "key_value", "projection": projection},
    }
    positions: dict[str, dict[str, Any]] = {
        "shaw": {"max_distance": block_size},
        "music": {"max_len": max_len},
        "t5": {"max_distance": max_len},
        "alibi": {},
        "rotary": {},
    }
    op, _, position = variant.partition("+")
    if op in positions and not position:
        op, position = "full", op
    if op not in ops or (position and position not in positions):
        raise ValueError(f"takes {', '.join([*ops, *positions])}, or op+position such as bigbird+shaw")
    return {"name": op, **ops[op], "position": {"name": position or "none", **positions.get(position, {})}}


def experiment(
    name: str,
    *,
    attention: Mapping[str, Any],
    task: Mapping[str, Any],
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    train: Mapping[str, Any],
) -> ConfigDict:
    """An experiment with seed 0, AdamW, a cosine schedule and all devices; keys that are given win over these."""
    optimizer = {"name": "adamw", "schedule": "cosine", "weight_decay": 0.01, "clip_norm": 1.0, **optimizer}
    train = {"parallel": "jit", "mesh": {"data": -1}, "dtype": "float32", "stop_at_step": None, **train}
    sections = {"attention": attention, "model": model, "task": task, "optimizer": optimizer, "train": train}
    whole = {"name": name, "seed": 0, **{key: dict(value) for key, value in sections.items()}}
    return ConfigDict(whole, sort_keys=False)


def comparison(
    name: str,
    base: ConfigDict,
    attentions: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    report: Mapping[str, Any] | None = None,
) -> ConfigDict:
    """Runs that differ in nothing but attention (and seed): same depth, width, data order and steps."""
    variants = {variant: {"attention": dict(section)} for variant, section in attentions.items()}
    whole = {"name": name, "base": base, "variants": ConfigDict(variants, sort_keys=False), "seeds": tuple(seeds)}
    return ConfigDict(whole | {"report": dict(report or {})}, sort_keys=False)
