"""What the experiment files share: the attention variants by short name, and the shape of an encoder experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict


def attention(variant: str, *, max_len: int, block_size: int, rank: int) -> dict[str, Any]:
    """The attention section of a variant: an op (`bigbird`), a position with full attention (`shaw`) or `op+position`.

    Args:
      max_len: longest input in tokens.
      block_size: of BigBird; the window reaches as far as BigBird's three window blocks do.
      rank: of Linformer.
    """
    ops: dict[str, dict[str, Any]] = {
        "full": {},
        "window": {"left": block_size, "right": block_size},
        "bigbird": {"block_size": block_size, "num_window_blocks": 3, "num_random_blocks": 3, "num_global_blocks": 2},
        "linformer": {"rank": rank, "max_len": max_len, "sharing": "headwise"},
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
    """An experiment with seed 0, AdamW and a cosine schedule; keys that are given win over these."""
    optimizer = {"name": "adamw", "schedule": "cosine", "weight_decay": 0.01, "clip_norm": 1.0, **optimizer}
    sections = {"attention": attention, "model": model, "task": task, "optimizer": optimizer, "train": train}
    return ConfigDict({"name": name, "seed": 0, **{key: dict(value) for key, value in sections.items()}})
