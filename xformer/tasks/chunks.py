"""Generated examples in chunks, made by threads, the same whatever their number, and none of them twice."""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from xformer.tasks.location import Progress
from xformer.tasks.ragged import Ragged

SAY_EVERY = 5.0  # seconds between two lines of progress

Make = Callable[[np.random.Philox], Ragged]
"""Draws a chunk of labelled examples from a source of random bits."""


def stream(make: Make, seed: int, stream_index: int, *, num_workers: int | None = None) -> Generator[Ragged]:
    """Chunks without end, which depend on seed and stream, never on `num_workers` (threads)."""
    num_workers = num_workers or min(os.cpu_count() or 1, 8)

    def chunk(index: int) -> Ragged:
        return make(np.random.Philox(np.random.SeedSequence([seed, stream_index, index])))

    pool = ThreadPoolExecutor(num_workers)  # NumPy releases the interpreter's lock in the loops that cost
    begun = itertools.count()
    try:
        pending = collections.deque([pool.submit(chunk, next(begun))])
        for done in itertools.count(1):
            yield pending.popleft().result()
            while len(pending) < min(2 * done, num_workers + 1):  # not all at once: one chunk may be enough
                pending.append(pool.submit(chunk, next(begun)))
    finally:
        pool.shutdown(cancel_futures=True)


def every_few_seconds(progress: Progress, what: str) -> Callable[[int], None]:
    """What says `what`, in which COUNT stands for the number it is called with, if nothing was said for a while."""
    said = time.monotonic()

    def say(count: int) -> None:
        nonlocal said
        if progress and time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            progress(what.replace("COUNT", f"{count:,}"))

    return say


def splits(
    open_stream: Callable[[int], Generator[Ragged]], sizes: Mapping[str, int], what: str, progress: Progress
) -> dict[str, Ragged]:
    """So many examples of each split, each from a stream of its own and no two alike, in one split or in two.

    The splits of `sizes` come in its order, but the last is made first: a small test split stays the same whatever the
    size of the training split.

    Args:
      open_stream: gives chunks without end for stream 0, 1, ...
      what: a line of progress in which COUNT stands for how many there are; `progress` gets it every few seconds.
    """
    seen: set[bytes] = set()
    say = every_few_seconds(progress, what.replace("COUNT", f"COUNT of {sum(sizes.values()):,}"))
    made = lambda: say(len(seen))
    found = {}
    for index, split in enumerate(reversed(list(sizes))):
        found[split] = _distinct(open_stream(index), sizes[split], seen, made)
    return {split: found[split] for split in sizes}


def _distinct(chunks: Generator[Ragged], count: int, seen: set[bytes], made: Callable[[], None]) -> Ragged:
    """The first `count` examples of a stream that are not in `seen`; adds them to it, calls `made` at each chunk."""
    sequences: list[np.ndarray] = []
    labels: list[Any] = []
    while len(labels) < count:
        chunk = next(chunks)
        made()
        for index in range(len(chunk)):
            digest = hashlib.blake2b(chunk[index].tobytes(), digest_size=16).digest()
            if digest not in seen and len(labels) < count:
                seen.add(digest)
                sequences.append(chunk[index])
                labels.append(chunk.label(index))
    chunks.close()
    make = Ragged.from_lists if chunk.label_offsets is None else Ragged.with_label_sequences
    return make(sequences, labels, chunk.tokens.dtype)
