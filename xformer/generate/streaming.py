"""The function `stream`: tokens as they come, from two compiled programs for each bucket of shapes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from xformer.generate import sampling
from xformer.generate.prefill import prefill
from xformer.generate.request import Request, make_request
from xformer.generate.settings import Numbers, Settings

Array = jax.Array


def stream(
    model: Any,
    tokens: Any,
    lengths: Any,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    end_id: int | None = None,
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """The tokens of `generate`, one of each row at a time.

    One program reads the prompts and one takes a step, its caches updated where they stand; both are compiled once for
    each shape of prompts and new tokens, as there.

    Args:
      model, tokens, lengths, max_tokens, temperature, top_k, top_p, end_id, seed: see `generate`. Beam search has no
        text before it ends.

    Yields:
      int32 `[batch]`, up to `max_tokens` times; zeros for rows that have ended. It stops when all have.

    Raises:
      ValueError: as `generate`, when called.
    """
    request = make_request(
        model,
        tokens,
        lengths,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_beams=1,
        length_penalty=0.0,
        end_id=end_id,
        seed=seed,
    )
    return _steps(model, request, max_tokens)


def _steps(model: Any, request: Request, max_tokens: int) -> Iterator[np.ndarray]:
    graphdef, state = nnx.split(model)
    texts, caches, context = begin(graphdef, state, request.tokens, request.lengths, request.numbers, request.settings)
    for step in range(1, max_tokens + 1):
        token, done = np.asarray(texts.token), bool(np.asarray(texts.done).all())
        yield token
        if done or step == max_tokens:
            return
        until = np.int32(step + 1)
        texts, caches = go_on(graphdef, state, texts, caches, context, until, request.numbers, request.settings)


@functools.partial(jax.jit, static_argnums=(0, 5))
def begin(
    graphdef: Any, state: Any, tokens: Array, lengths: Array, numbers: Numbers, settings: Settings
) -> tuple[sampling.Texts, Any, Any]:
    """The first token of each text, the caches, and what the steps to come read of the sources."""
    model: Any = nnx.merge(graphdef, state).unrolled()
    logits, caches, context = prefill(model, tokens, lengths, settings.capacity, uniform=settings.uniform)
    return sampling.begin(logits, settings, numbers), caches, context


@functools.partial(jax.jit, static_argnums=(0, 7), donate_argnums=(2, 3))
def go_on(
    graphdef: Any,
    state: Any,
    texts: sampling.Texts,
    caches: Any,
    context: Any,
    until: Array,
    numbers: Numbers,
    settings: Settings,
) -> tuple[sampling.Texts, Any]:
    """The texts of `until` tokens and the caches after them. Those given are used up."""
    model: Any = nnx.merge(graphdef, state).unrolled()
    return sampling.advance(model, texts, caches, context, until, settings, numbers)
