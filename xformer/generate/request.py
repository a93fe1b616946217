"""What a call of generation asks for: its arguments checked, and put in shapes that programs are compiled for."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xformer.checks import check_integer, is_integer
from xformer.generate.prefill import reads_sources
from xformer.generate.settings import Numbers, Settings

Array = jax.Array
SMALLEST_BUCKET = 16  # tokens; others are the powers of two above


class Request(NamedTuple):
    """The operands of a program, and what it is compiled for.

    Attributes:
      tokens: int32 `[batch, longest]`, zeros after each prompt; lengths: int32 `[batch]`.
      numbers, settings: see there.
    """

    tokens: Array
    lengths: Array
    numbers: Numbers
    settings: Settings


def make_request(
    model: Any,
    tokens: Any,
    lengths: Any,
    *,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    num_beams: int,
    length_penalty: float,
    end_id: int | None,
    seed: int,
) -> Request:
    """The request of a call of `xformer.generate.generate`, which says what the arguments are and what is raised."""
    tokens, lengths = np.asarray(tokens), np.asarray(lengths)
    check_integer("max_tokens", max_tokens)
    check_integer("num_beams", num_beams)
    check_integer("seed", seed, at_least=0, at_most=2**32 - 1)
    sources, rows = reads_sources(model), np.arange(tokens.shape[1] if tokens.ndim == 2 else 0)
    max_len = int(getattr(model, "source_max_len", model.max_len) if sources else model.max_len)
    _check_prompts(tokens, lengths, max_len, 1 if sources else max_tokens)
    if sources and max_tokens > model.target_max_len:
        raise ValueError(
            f"max_tokens must be at most the model's target_max_len {model.target_max_len}, got {max_tokens}"
        )
    _check_drawing(temperature, top_k, top_p, num_beams, length_penalty)
    longest = min(_bucket(tokens.shape[1]), max_len)
    room = _bucket(max_tokens)
    settings = Settings(
        max_tokens=room,
        capacity=min(room, int(model.target_max_len)) if sources else min(longest + room - 1, max_len),
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
    return Request(jnp.asarray(padded), jnp.asarray(lengths, jnp.int32), numbers, settings)


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
