"""What a compiled program of generation is made for, and the numbers that one call gives it."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Settings(NamedTuple):
    """What a compiled program is made for.

    Attributes:
      max_tokens: room for new tokens; capacity: tokens that the caches have room for.
      uniform: all prompts are equally long.
      greedy, top_k, top_p: how a token is drawn; whether there is a `top_p`.
      num_beams: 1 for no beam search.
    """

    max_tokens: int
    capacity: int
    uniform: bool
    greedy: bool
    top_k: int | None
    top_p: bool
    num_beams: int


class Numbers(NamedTuple):
    """What may differ between the calls of one program; see `xformer.generate.generate`.

    Attributes:
      limit: int32, tokens that are generated at most.
      temperature, top_p, length_penalty: float32. end_id: int32, -1 for none. seed: uint32.
    """

    limit: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    length_penalty: jax.Array
    end_id: jax.Array
    seed: jax.Array
