"""The function `generate`: its arguments checked, shapes put in buckets, one compiled program for each."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xformer.checks import check_integer, is_integer
from xformer.generate import beam_search, sampling
from xformer.generate.prefill import prefill
from xformer.generate.settings import Numbers, Settings

Array = jax.Array
SMALLEST_BUCKET = 16  # tokens; others are the powers of two above


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
    """Token ids that follow the prompts.

    A token costs what the layers do for one token and its attention to what their caches hold: nothing of the prompt
    is computed again. Prompts and new tokens have room in powers of two, and one program is compiled for each such
    shape. What a row draws depends on the seed, its number and its own tokens, not on other rows.

    Args:
      model: one that decodes, see `xformer.generate`.
      tokens: int `[batch, longest]`, prompts, padded at the right with anything.
      lengths: int `[batch]`, tokens of each prompt, at least one.
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
      ValueError: an argument out of range, `num_beams` with a temperature, or more tokens than the model's `max_len`.
    """
    tokens, lengths = np.asarray(tokens), np.asarray(lengths)
    check_integer("max_tokens", max_tokens)
    check_integer("num_beams", num_beams)
    check_integer("seed", seed, at_least=0, at_most=2**32 - 1)
    _check_prompts(tokens, lengths, int(model.max_len), max_tokens)
    _check_drawing(temperature, top_k, top_p, num_beams, length_penalty)
    max_len, rows = int(model.max_len), np.arange(tokens.shape[1])
    longest = min(_bucket(tokens.shape[1]), max_len)
    room = _bucket(max_tokens)
    settings = Settings(
        max_tokens=room,
        capacity=min(longest + room - 1, max_len),
        uniform=len(set(lengths.tolist())) == 1,
        greedy=temperature == 0,
        top_k=None if top_k is None else int(top_k),
        top_p=top_p is not None,
        num_beams=int(num_beams),
    )
    padded = np.zeros((len(tokens), longest), np.int32)
    padded[:, : tokens.shape[1]] = np.where(rows < lengths[:, None], tokens, 0)[:, :longest]
    numbers = Numbers(
        limit=jnp.int32(max_tokens),
        temperature=jnp.float32(temperature or 1.0),
        top_p=jnp.float32(1.0 if top_p is None else top_p),
        length_penalty=jnp.float32(length_penalty),
        end_id=jnp.int32(-1 if end_id is None else end_id),
        seed=jnp.uint32(seed),
    )
    graphdef, state = nnx.split(model)
    return _run(graphdef, state, jnp.asarray(padded), jnp.asarray(lengths, jnp.int32), numbers, settings)[
        :, :max_tokens
    ]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _run(graphdef: Any, state: Any, tokens: Array, lengths: Array, numbers: Numbers, settings: Settings) -> Array:
    model: Any = nnx.merge(graphdef, state).unrolled()
    logits, caches = prefill(model, tokens, lengths, settings.capacity, uniform=settings.uniform)
    run = beam_search.run if settings.num_beams > 1 else sampling.run
    return run(model, logits, caches, settings, numbers)


def _bucket(size: int) -> int:
    """The smallest power of two that is not below `size`, or the smallest bucket."""
    return max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())


def _check_prompts(tokens: np.ndarray, lengths: np.ndarray, max_len: int, max_tokens: int) -> None:
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise ValueError(f"tokens must be integers [batch, longest], got {tokens.dtype} {tokens.shape}")
    if lengths.shape != tokens.shape[:1] or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"lengths must be integers [batch] of tokens {tokens.shape}, got {lengths.dtype} {lengths.shape}"
        )
    if lengths.min() < 1 or lengths.max() > tokens.shape[1]:
        wrong = lengths[(lengths < 1) | (lengths > tokens.shape[1])][0]
        raise ValueError(f"lengths must be from 1 to {tokens.shape[1]}, the width of tokens, got {wrong}")
    if (total := int(lengths.max()) + max_tokens) - 1 > max_len:  # the last token is not read any more
        raise ValueError(
            f"max_tokens must leave prompt and new tokens within the model's max_len {max_len}, got {lengths.max()} + "
            f"{max_tokens} = {total}"
        )


def _check_drawing(
    temperature: float, top_k: int | None, top_p: float | None, num_beams: int, length_penalty: float
) -> None:
    if not 0 <= temperature < np.inf:
        raise ValueError(f"temperature must be a number from 0, got {temperature!r}")
    if top_k is not None and not (is_integer(top_k) and top_k >= 1):
        raise ValueError(f"top_k must be an integer of at least 1, got {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r}")
    if temperature == 0 and (top_k, top_p) != (None, None):
        given = "top_k" if top_k is not None else "top_p"
        raise ValueError(f"{given} is for drawing: give a temperature above 0, got 0")
    if num_beams > 1 and temperature > 0:
        raise ValueError(f"num_beams above 1 takes temperature 0, as beam search draws nothing, got {temperature!r}")
    if not 0 <= length_penalty < np.inf:
        raise ValueError(f"length_penalty must be a number from 0, got {length_penalty!r}")
