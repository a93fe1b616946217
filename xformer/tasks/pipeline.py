"""Batches: Grain shuffles, repeats and cuts the order of examples, and each batch is read from memory in one go."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from xformer import extras
from xformer.tasks.ragged import Cut, Ragged

if TYPE_CHECKING:
    import grain

Change = Callable[[dict[str, np.ndarray], np.ndarray, np.ndarray], dict[str, np.ndarray]]
"""Makes a batch of one that was read, given the index and the epoch of each of its examples, int64 [examples]."""


Read = Callable[..., dict[str, np.ndarray]]
"""Makes a batch of the numbers of its examples and the epoch of each, int64 [examples], and of nothing else; where
batches are by length also of that which theirs are padded to. There are fewer than the batch has rows where fillers are
to complete it."""

SORTED = 32  # batches whose examples are sorted by length together, and then come in any order
EXAMPLE_INDEX = "example_index"  # as `xformer.train` calls it in the batches that it evaluates


@dataclasses.dataclass(frozen=True, eq=False)
class ByLength:
    """How examples of like length meet in a batch.

    lengths: tokens of each example as it is read, int64 [examples].
    padded: what batches are padded to, ascending; each to the least that its longest example fits.
    """

    lengths: np.ndarray
    padded: tuple[int, ...]


def bucket_lengths(max_len: int, buckets: int) -> tuple[int, ...]:
    """`max_len`, half of it, a quarter and so on, `buckets` of them, rounded up, ascending."""
    return tuple(sorted({-(-max_len // 2**index) for index in range(buckets)}))


def reader(
    examples: Ragged,
    batch_size: int,
    *,
    max_len: int,
    center: float = 0.0,
    scale: float | None = None,
    cut: Cut = "head",
    class_weights: np.ndarray | None = None,
    change: Change | None = None,
) -> Read:
    """What reads batches of texts for `batches`.

    A batch has `inputs` int32 [batch_size, max_len], or as long as it is asked for (0 is padding), `inputs2`
    likewise where examples have two documents, and what `read_targets` gives. What `change` makes of it has to
    depend on its arguments alone, so that a run goes on exactly, on any number of shards.
    """

    def read(mine: np.ndarray, epoch: np.ndarray, length: int = max_len) -> dict[str, np.ndarray]:
        found = {"inputs": examples.pad(mine, batch_size, length, cut)}
        if examples.tokens2 is not None:
            found["inputs2"] = examples.pad_second(mine, batch_size, length, cut)
        numbers: dict[str, Any] = {"center": center, "scale": scale, "class_weights": class_weights}
        found |= read_targets(examples, mine, batch_size, max_len=length, **numbers)
        return found if change is None else change(found, mine, epoch)

    return read


def batches(
    num_examples: int,
    batch_size: int,
    read: Read,
    *,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    shard_index: int = 0,
    shard_count: int = 1,
    by_length: ByLength | None = None,
) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    """A Grain iterator of the batches that `read` makes, with exact `get_state()` and `set_state()`.

    Batches have `weights` float32 [batch_size]: 1, or 0 for the fillers that complete the last batch of a finite number
    of epochs. With `epochs=None` it never ends and batches run across the ends of epochs, so no example is ever left
    out. Without shuffling, examples come in their order.

    The order of the examples depends on `seed` and the epoch only. Shard s of n takes rows s * batch_size to (s + 1) *
    batch_size of each global batch of n * batch_size, so all shards yield equally many batches and n shards together
    see the batches that one would see with n times the batch size, row for row. The state counts global batches and is
    the same in every shard.

    With `by_length` the examples of `SORTED` batches at a time are sorted by length, cut into batches, and these
    come in an order that depends on `seed` and where they stand only; without shuffling all examples are sorted,
    and batches have `example_index`, int32 [batch_size], the number of each example, -1 of fillers. All shards pad
    to one length.

    Raises ValueError for a batch size, shard or number of epochs that makes no sense, and for a split without examples.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not 0 <= shard_index < shard_count:
        raise ValueError(f"shard_index must be in 0..shard_count - 1, got {shard_index} of {shard_count}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be at least 1, or None for no end, got {epochs}")
    if not num_examples:
        raise ValueError("a split without examples has no batches")

    grain = extras.load("grain")
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    order = grain.MapDataset.range(num_examples)
    if shuffle:
        # Grain shuffles epoch e with seed + e: unhashed, seed 0 would see in epoch 1 what seed 1 sees in epoch 0.
        order = order.shuffle(seed=hashed)
    numbered = order.repeat(epochs).map_with_index(lambda place, example: (example, place // num_examples))
    size, rows = batch_size * shard_count, slice(shard_index * batch_size, (shard_index + 1) * batch_size)
    pairs = lambda chosen: np.asarray(chosen, np.int64).reshape(-1, 2)
    if by_length is None:
        read_rows = lambda chosen: read(*pairs(chosen[rows]).T)
        dataset = numbered.batch(size, drop_remainder=False, batch_fn=read_rows)
    else:
        total = sys.maxsize if epochs is None else num_examples * epochs
        group = SORTED if shuffle else -(-total // size)  # batches
        lengths, padded = np.minimum(by_length.lengths, by_length.padded[-1]), np.asarray(by_length.padded)

        @functools.lru_cache(maxsize=2)
        def grouped(number: int) -> list[np.ndarray]:
            first = number * group * size
            found = pairs([numbered[place] for place in range(first, min(first + group * size, total))])
            found = found[np.argsort(lengths[found[:, 0]], kind="stable")]
            cut = [found[start : start + size] for start in range(0, len(found), size)]
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence([hashed, number]))).random(len(cut))
            return [cut[place] for place in np.argsort(random, kind="stable")] if shuffle else cut

        def read_sorted(number: int) -> dict[str, np.ndarray]:
            chosen = grouped(number // group)[number % group]
            longest = lengths[chosen[:, 0]].max()
            mine = chosen[rows]
            batch = read(*mine.T, int(padded[np.searchsorted(padded, longest)]))
            index = np.full(batch_size, -1, np.int32)
            index[: len(mine)] = mine[:, 0]
            return batch if shuffle else {**batch, EXAMPLE_INDEX: index}

        dataset = grain.MapDataset.range(sys.maxsize if epochs is None else -(-total // size)).map(read_sorted)
    # No threads: a batch takes a fraction of a millisecond, and handing it between threads costs more than making it.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def read_targets(
    examples: Ragged,
    indices: np.ndarray,
    rows: int,
    *,
    max_len: int,
    center: float = 0.0,
    scale: float | None = None,
    class_weights: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """`targets` [rows, ...] and `weights` float32 [rows] of the named examples; rows beyond them are fillers.

    Where there is a `scale`, labels are numbers: targets are (label - center) / scale, float32, and the batch holds
    `center` and `scale`, float32 [rows], to turn them back. With `class_weights` it holds that of each target as
    `loss_weights`, float32 [rows].
    """
    targets = examples.targets(indices, rows, max_len)
    weights = np.zeros(rows, np.float32)
    weights[: len(indices)] = 1
    if class_weights is not None:
        return {"targets": targets, "weights": weights, "loss_weights": class_weights[targets] * weights}
    if scale is None:
        return {"targets": targets, "weights": weights}
    whole = lambda value: np.full(rows, value, np.float32)
    standard = np.where(weights > 0, (targets.astype(np.float64) - center) / scale, 0).astype(np.float32)
    return {"targets": standard, "weights": weights, "center": whole(center), "scale": whole(scale)}
