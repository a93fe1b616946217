"""Generated examples in chunks, made by threads, the same whatever their number, and none of them twice."""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor

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


def splits(
    make: Make, sizes: Mapping[str, int], seed: int, what: str, *, num_workers: int | None = None, progress: Progress
) -> dict[str, Ragged]:
    """So many examples of each split, each from a stream of its own and no two alike, in one split or in two.

    The splits of `sizes` come in its order, but the last is made first: a small test split stays the same whatever the
    size of the training split. `progress` gets a line every few seconds, in which `what` says what is counted.
    """
    seen: set[bytes] = set()
    said = time.monotonic()

    def made() -> None:
        nonlocal said
        if progress and time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            progress(what.replace("COUNT", f"{len(seen):,} of {sum(sizes.values()):,}"))

    found = {}
    for index, split in enumerate(reversed(list(sizes))):
        chunks = stream(make, seed, index, num_workers=num_workers)
        found[split] = _distinct(chunks, sizes[split], seen, made)
    return {split: found[split] for split in sizes}


def _distinct(chunks: Generator[Ragged], count: int, seen: set[bytes], made: Callable[[], None]) -> Ragged:
    """The first `count` examples of a stream that are not in `seen`; adds them to it, and calls `made` at times."""
    sequences: list[np.ndarray] = []
    labels: list[int] = []
    while len(labels) < count:
        chunk = next(chunks)
        made()
        for index in range(len(chunk)):
            digest = hashlib.blake2b(chunk[index].tobytes(), digest_size=16).digest()
            if digest not in seen and len(labels) < count:
                seen.add(digest)
                sequences.append(chunk[index])
                labels.append(int(chunk.labels[index]))
    chunks.close()
    return Ragged.from_lists(sequences, labels, np.uint8)
