"""Which tiles of the score matrix hold pairs, listed by query tile: the plan that the engine follows.

A plan is made on the host from a pattern and handed to the engine as integer operands. Only its shapes are static and
they do not depend on a pattern's seed, so one trace serves every layer. Query tiles that visit about equally many key
tiles form a group, so that the few that visit every key tile do not make the others longer.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from xformer.attention.pattern import Bounds, Pattern

MAX_GROUPS = 6


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_tiles", "key_tiles", "mask_ids"],
    meta_fields=["distant_chunks", "unmasked_chunks"],
)
@dataclasses.dataclass(frozen=True)
class TileGroup:
    """Query tiles that visit the same number of key tiles.

    Attributes:
      query_tiles: int32 `[num_query_tiles]`, indices of query tiles.
      key_tiles: int32 `[heads or 1, num_query_tiles, num_chunks, chunk]`, indices of the key tiles that each visits.
      mask_ids: int32 like `key_tiles`, index into `TilePlan.pair_masks` of the pairs that exist in the tile.
      distant_chunks: number of leading chunks that hold only whole tiles whose pairs are all at a distance beyond which
        the position term is constant.
      unmasked_chunks: number of leading chunks, distant ones included, that hold only whole tiles: no mask is needed.
    """

    query_tiles: np.ndarray
    key_tiles: np.ndarray
    mask_ids: np.ndarray
    distant_chunks: int
    unmasked_chunks: int

    @property
    def num_query_tiles(self) -> int:
        """Query tiles in the group."""
        return self.query_tiles.shape[0]

    @property
    def num_tiles(self) -> int:
        """Tiles computed for each head, those that only pad a list of key tiles included."""
        _, num_query_tiles, num_chunks, chunk = self.key_tiles.shape
        return num_query_tiles * num_chunks * chunk

    @property
    def num_near_tiles(self) -> int:
        """Those that are not in distant chunks."""
        return self.num_tiles - self.num_query_tiles * self.distant_chunks * self.key_tiles.shape[3]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["groups", "pair_masks"],
    meta_fields=["q_block", "kv_block"],
)
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Groups that together hold every query tile once.

    Attributes:
      groups: the groups.
      pair_masks: bool `[num_masks, q_block, kv_block]`, the distinct masks of partial tiles; 0 is all, 1 is none.
      q_block, kv_block: tile sizes in tokens.
    """

    groups: tuple[TileGroup, ...]
    pair_masks: np.ndarray
    q_block: int
    kv_block: int

    @property
    def num_tiles(self) -> int:
        """Tiles computed for each head."""
        return sum(group.num_tiles for group in self.groups)

    @property
    def near_per_query_tile(self) -> float:
        """Key tiles in other than distant chunks that a query tile visits, on average."""
        return sum(group.num_near_tiles for group in self.groups) / sum(group.num_query_tiles for group in self.groups)

    def by_layer(self, num_layers: int) -> list[TilePlan]:
        """The plans of layers whose heads follow each other here. All have the same shapes, query tiles and masks."""
        cut = lambda x: np.split(x, num_layers)
        parts = [zip(cut(group.key_tiles), cut(group.mask_ids), strict=True) for group in self.groups]
        return [
            dataclasses.replace(
                self,
                groups=tuple(
                    dataclasses.replace(group, key_tiles=key_tiles, mask_ids=mask_ids)
                    for group, (key_tiles, mask_ids) in zip(self.groups, layer, strict=True)
                ),
            )
            for layer in zip(*parts, strict=True)
        ]


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b not below a."""
    return ceil_div(a, b) * b


@functools.lru_cache(maxsize=128)
def make_tile_plan(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    q_block: int,
    kv_block: int,
    chunk_tokens: int,
    query_offset: int = 0,
    constant_beyond: int | None = None,
) -> TilePlan:
    """Lists the tiles of `pattern` for queries at `query_offset + [0, q_len)` and keys at `[0, kv_len)`.

    Args:
      pattern: which pairs exist.
      q_len, kv_len: lengths in tokens; the last tiles may reach past them.
      q_block, kv_block: tile sizes in tokens.
      chunk_tokens: the most keys (but at least one tile) that are attended in one step.
      query_offset: position of the first query.
      constant_beyond: distance beyond which the position term is constant; None where it never is.
    """
    n_q, n_k = ceil_div(q_len, q_block), ceil_div(kv_len, kv_block)
    q_first, k_first = np.arange(n_q) * q_block + query_offset, np.arange(n_k) * kv_block
    # Bounds end at the true lengths, or a tile that only padding makes partial would need a test.
    q_last = np.minimum(q_first + q_block, q_len + query_offset) - 1
    k_last = np.minimum(k_first + kv_block, kv_len) - 1
    some, every = pattern.tiles(Bounds(q_first, q_last, k_first, k_last))

    masks = PairMasks(pattern, q_block, kv_block)
    counts = some.sum(-1).max(0)  # [n_q]
    distant = np.zeros_like(every)
    if constant_beyond is not None:
        ahead, behind = k_first - (q_first + q_block - 1)[:, None], q_first[:, None] - (k_first + kv_block - 1)
        distant = every & (np.maximum(ahead, behind) >= constant_beyond)
    rank = 3 - some - every - distant  # distant whole key tiles first, then other whole ones, then partial ones
    order = np.argsort(rank, axis=-1, kind="stable")
    groups = []
    for query_tiles in _group_by_count(counts):
        width = max(int(counts[query_tiles].max()), 1)
        chunk = min(max(chunk_tokens // kv_block, 1), width)
        # Even chunks: as many as are needed, each as short as that allows.
        num_chunks = ceil_div(width, chunk)
        chunk = ceil_div(width, num_chunks)
        key_tiles = np.zeros((some.shape[0], len(query_tiles), num_chunks * chunk), np.int32)
        mask_ids = np.ones_like(key_tiles)
        key_tiles[:, :, :width] = order[:, query_tiles, :width]
        listed = np.take_along_axis(some[:, query_tiles], key_tiles[:, :, :width], -1)
        full = np.take_along_axis(every[:, query_tiles], key_tiles[:, :, :width], -1)
        mask_ids[:, :, :width] = np.where(full, 0, 1)
        key_tiles[:, :, :width] *= listed
        for head, index, place in np.argwhere(listed & ~full):
            first = q_first[query_tiles[index]], k_first[key_tiles[head, index, place]]
            mask_ids[head, index, place] = masks.index(head, *first)
        shape = (some.shape[0], len(query_tiles), num_chunks, chunk)
        all_distant = np.take_along_axis(distant[:, query_tiles], key_tiles, -1) & (mask_ids == 0)
        distant_chunks, unmasked_chunks = (
            int(np.logical_and.accumulate(kind.reshape(shape).all((0, 1, 3))).sum())
            for kind in (all_distant, mask_ids == 0)
        )
        shaped = key_tiles.reshape(shape), mask_ids.reshape(shape)
        groups.append(TileGroup(query_tiles.astype(np.int32), *shaped, distant_chunks, unmasked_chunks))
    return TilePlan(tuple(groups), masks.array(), q_block, kv_block)


class PairMasks:
    """Masks of partial tiles, each kept once."""

    def __init__(self, pattern: Pattern, q_block: int, kv_block: int) -> None:
        self.pattern, self.shape = pattern, (q_block, kv_block)
        self.masks = [np.ones(self.shape, bool), np.zeros(self.shape, bool)]
        self.known = {mask.tobytes(): index for index, mask in enumerate(self.masks)}
        self.by_tile: dict[tuple[int, int], list[int]] = {}

    def index(self, head: int, q_first: int, k_first: int) -> int:
        if (q_first, k_first) not in self.by_tile:
            allowed = self.pattern.allows(np.arange(self.shape[0]) + q_first, np.arange(self.shape[1]) + k_first)
            masks = np.broadcast_to(allowed, (allowed.shape[0], *self.shape))
            self.by_tile[q_first, k_first] = [self._index_of(mask) for mask in masks]
        ids = self.by_tile[q_first, k_first]
        return ids[min(head, len(ids) - 1)]

    def _index_of(self, mask: np.ndarray) -> int:
        index = self.known.setdefault(mask.tobytes(), len(self.masks))
        if index == len(self.masks):
            self.masks.append(np.ascontiguousarray(mask))
        return index

    def array(self) -> np.ndarray:
        return np.stack(self.masks)


def _group_by_count(counts: np.ndarray) -> list[np.ndarray]:
    """Splits query tiles into at most `MAX_GROUPS` groups of like counts so that the padded work is least."""
    values = np.unique(counts)
    if len(values) > 64:  # enough steps to choose from; the search below is cubic in them
        values = np.unique(np.quantile(counts, np.linspace(0, 1, 64), method="higher"))
    sizes = [int(((counts <= top) & (counts > low)).sum()) for low, top in zip([-1, *values[:-1]], values, strict=True)]
    overhead = 1.0  # tiles' worth of work that one more group costs
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(values) + 1):
        options = []
        for start in range(end):
            cost, cuts = best[start]
            if len(cuts) < MAX_GROUPS:
                work = float(values[end - 1]) * sum(sizes[start:end]) + overhead
                options.append((cost + work, [*cuts, end]))
        best.append(min(options, key=lambda option: option[0]) if options else (np.inf, [0] * MAX_GROUPS))
    tops = [int(values[end - 1]) for end in best[-1][1]]
    lows = [-1, *tops[:-1]]
    return [np.flatnonzero((counts <= top) & (counts > low)) for low, top in zip(lows, tops, strict=True)]
