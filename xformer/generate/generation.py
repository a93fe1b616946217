"""The function `generate`: one compiled program for each bucket of shapes."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx

from xformer.generate import beam_search, sampling
from xformer.generate.prefill import prefill
from xformer.generate.request import make_request
from xformer.generate.settings import Numbers, Settings

Array = jax.Array


def generate(
    model: Any,
    tokens: Any,
    lengths: Any,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int = 1,
    length_penalty: float = 0.6,
    end_id: int | None = None,
    seed: int = 0,
) -> Array:
    """Token ids that follow the prompts, or that a model makes of sources.

    A token costs what the layers do for one token and its attention to what their caches hold: nothing of the prompt
    is computed again. Prompts and new tokens have room in powers of two, and one program is compiled for each such
    shape. What a row draws depends on the seed, its number and its own tokens, not on other rows.

    Args:
      model: one that decodes, see `xformer.generate`.
      tokens: int `[batch, longest]`, prompts or sources, padded at the right with anything.
      lengths: int `[batch]`, tokens of each, at least one.
      max_tokens: tokens that are generated for each prompt at most.
      temperature: 0: the likeliest token each time, the first of equals. Else tokens are drawn with the probabilities
        softmax(logits / temperature).
      top_k: draws from the so many likeliest only (Fan et al. 2018).
      top_p: draws from the fewest likeliest that have together at least this probability (Holtzman et al. 2020), after
        `temperature` and `top_k`.
      num_beams: above 1: beam search with so many beams; gives the best of each prompt by log probability /
        ((5 + length) / 6) ** length_penalty (Wu et al. 2016, equation 14), the end being a token of the length.
      length_penalty: 0: none.
      end_id: the token that ends a text; None: no token does.
      seed: of what is drawn.

    Returns:
      int32 `[batch, max_tokens]`; after `end_id` come zeros.

    Raises:
      ValueError: an argument out of range, `num_beams` with a temperature, or more tokens than the model's `max_len`;
        of targets, than its `target_max_len`.
    """
    request = make_request(
        model,
        tokens,
        lengths,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_beams=num_beams,
        length_penalty=length_penalty,
        end_id=end_id,
        seed=seed,
    )
    graphdef, state = nnx.split(model)
    out = _run(graphdef, state, request.tokens, request.lengths, request.numbers, request.settings)
    return out[:, :max_tokens]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _run(graphdef: Any, state: Any, tokens: Array, lengths: Array, numbers: Numbers, settings: Settings) -> Array:
    model: Any = nnx.merge(graphdef, state).unrolled()
    logits, caches, context = prefill(model, tokens, lengths, settings.capacity, uniform=settings.uniform)
    run = beam_search.run if settings.num_beams > 1 else sampling.run
    return run(model, logits, caches, context, settings, numbers)
