"""What a compiled program of generation is made for."""

from __future__ import annotations

from typing import NamedTuple


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
