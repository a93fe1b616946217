"""Texts as they come: what each step adds to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

UNKNOWN = "\ufffd"  # what bytes become that are no UTF-8, or not yet


def pieces(steps: Iterable[np.ndarray], decode: Callable[[np.ndarray], str]) -> Iterator[list[str]]:
    """What every text gains, a step at a time; together it is what `decode` makes of all tokens.

    Args:
      steps: int `[batch]` of each step, a token of every text.
      decode: the text of tokens int `[count]`. That of more tokens begins with that of fewer, but for `UNKNOWN` at the
        end: it is held back until something follows or the steps end.
    """
    given: list[str] = []
    tokens: list[np.ndarray] = []
    texts: list[str] = []
    for step in steps:
        tokens.append(step)
        given = given or [""] * len(step)
        texts = [decode(row) for row in np.stack(tokens, axis=1)]
        sure = [text.rstrip(UNKNOWN) for text in texts]
        yield [new[len(old) :] for new, old in zip(sure, given, strict=True)]
        given = sure
    rest = [text[len(old) :] for text, old in zip(texts, given, strict=True)]
    if any(rest):
        yield rest
