"""The caches after the prompts, or before the first token of a translation, and the logits for the first new token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
START = 0  # the id before the first token of a target


def reads_sources(model: Any) -> bool:
    """Whether the model makes targets from sources; else it goes on with prompts."""
    return hasattr(model, "read")


def prefill(model: Any, tokens: Array, lengths: Array, capacity: int, *, uniform: bool) -> tuple[Array, Any, Any]:
    """Reads the prompts, or the sources, in one pass.

    Args:
      model: one that decodes.
      tokens: int32 `[batch, longest]`; lengths: int32 `[batch]`, tokens of each prompt.
      capacity: tokens that the caches have room for, at least `longest`.
      uniform: all prompts are equally long, so that caches need count one length only.

    Returns:
      Logits float32 `[batch, vocab_size]` for the token after each prompt, or for the first of each target, the caches,
      and what the steps to come read of the sources: None of prompts.
    """
    batch, longest = tokens.shape
    mask = jnp.arange(longest) < lengths[:, None]
    if reads_sources(model):
        context, first = model.read(tokens, mask), jnp.full((batch, 1), START, jnp.int32)
        logits, caches = model.decode(first, model.init_caches(batch, capacity), context=context)
        return logits.dense()[:, 0], caches, context
    logits, caches = model.decode(tokens, model.init_caches(batch, capacity), mask)
    if uniform:
        caches = [_one_length(cache) for cache in caches]
    last_Bx1xW = jnp.take_along_axis(logits.hidden, (lengths - 1)[:, None, None], axis=1)
    return dataclasses.replace(logits, hidden=last_Bx1xW).dense()[:, 0], caches, None


def next_logits(model: Any, tokens: Array, caches: Any, context: Any = None) -> tuple[Array, Any]:
    """Logits float32 `[batch, vocab_size]` after one more token of each, int32 `[batch]`, and the next caches."""
    given = {} if context is None else {"context": context}
    logits, caches = model.decode(tokens[:, None], caches, **given)
    return logits.dense()[:, 0], caches


def _one_length(cache: Any) -> Any:
    """A cache of keys with one length for all examples: attention then need not go through them one by one."""
    fields = {field.name for field in dataclasses.fields(cache)}
    return dataclasses.replace(cache, length=cache.length[0]) if {"key_rows", "length"} <= fields else cache
