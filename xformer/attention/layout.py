"""Which tiles of the score matrix hold pairs, listed by query tile: the plan that the engine follows.

A layout is made on the host from a pattern and handed to the engine as integer operands. Only its shapes are static and
they do not depend on a pattern's seed, so one trace serves every layer. Query tiles that visit about equally many key
tiles form a group, so that global rows do not make the others longer.
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
    data_fields=["rows", "columns", "tests"],
    meta_fields=["far_chunks", "full_chunks"],
)
@dataclasses.dataclass(frozen=True)
class Group:
    """Query tiles that visit the same number of key tiles.

    Attributes:
      rows: int32 `[num_rows]`, indices of query tiles.
      columns: int32 `[heads or 1, num_rows, num_chunks, chunk]`, indices of the key tiles that each row visits.
      tests: int32 like `columns`, index into `Layout.bank` of the pairs that exist in the tile.
      far_chunks: so many chunks of every row come first and hold full tiles only, whose pairs are all beyond the reach.
      full_chunks: so many come first and hold full tiles only, which need no test; far ones are among them.
    """

    rows: np.ndarray
    columns: np.ndarray
    tests: np.ndarray
    far_chunks: int
    full_chunks: int

    @property
    def num_rows(self) -> int:
        """Query tiles in the group."""
        return self.rows.shape[0]

    @property
    def num_tiles(self) -> int:
        """Tiles computed for each head, padding of the rows included."""
        _, num_rows, num_chunks, chunk = self.columns.shape
        return num_rows * num_chunks * chunk

    @property
    def num_near_tiles(self) -> int:
        """Those that are not in far chunks."""
        return self.num_tiles - self.num_rows * self.far_chunks * self.columns.shape[3]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["groups", "bank"],
    meta_fields=["q_block", "kv_block"],
)
@dataclasses.dataclass(frozen=True)
class Layout:
    """Groups that together hold every query tile once.

    Attributes:
      groups: the groups.
      bank: bool `[num_tests, q_block, kv_block]`, the distinct pair tests of partial tiles; 0 is all, 1 is none.
      q_block, kv_block: tile sizes in tokens.
    """

    groups: tuple[Group, ...]
    bank: np.ndarray
    q_block: int
    kv_block: int

    @property
    def num_tiles(self) -> int:
        """Tiles computed for each head."""
        return sum(group.num_tiles for group in self.groups)

    @property
    def near_per_row(self) -> float:
        """Key tiles in other than far chunks that a query tile visits, on average."""
        return sum(group.num_near_tiles for group in self.groups) / sum(group.num_rows for group in self.groups)

    def by_layer(self, num_layers: int) -> list[Layout]:
        """The layouts of layers whose heads follow each other here. All have the same shapes, rows and bank."""
        cut = lambda x: np.split(x, num_layers)
        parts = [zip(cut(group.columns), cut(group.tests), strict=True) for group in self.groups]
        return [
            dataclasses.replace(
                self,
                groups=tuple(
                    dataclasses.replace(group, columns=columns, tests=tests)
                    for group, (columns, tests) in zip(self.groups, layer, strict=True)
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
def make_layout(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    q_block: int,
    kv_block: int,
    chunk_tokens: int,
    query_offset: int = 0,
    reach: int | None = None,
) -> Layout:
    """Lists the tiles of `pattern` for queries at `query_offset + [0, q_len)` and keys at `[0, kv_len)`.

    Args:
      pattern: which pairs exist.
      q_len, kv_len: lengths in tokens; the last tiles may reach past them.
      q_block, kv_block: tile sizes in tokens.
      chunk_tokens: at most so many keys (but at least one tile) are attended in one go.
      query_offset: position of the first query.
      reach: distances this far apart and more are alike; None where they aren't.
    """
    n_q, n_k = ceil_div(q_len, q_block), ceil_div(kv_len, kv_block)
    q_first, k_first = np.arange(n_q) * q_block + query_offset, np.arange(n_k) * kv_block
    # Bounds end at the true lengths, or a tile that only padding makes partial would need a test.
    q_last = np.minimum(q_first + q_block, q_len + query_offset) - 1
    k_last = np.minimum(k_first + kv_block, kv_len) - 1
    some, every = pattern.tiles(Bounds(q_first, q_last, k_first, k_last))

    bank = Bank(pattern, q_block, kv_block)
    counts = some.sum(-1).max(0)  # [n_q]
    far = np.zeros_like(every)
    if reach is not None:
        ahead, behind = k_first - (q_first + q_block - 1)[:, None], q_first[:, None] - (k_first + kv_block - 1)
        far = every & (np.maximum(ahead, behind) >= reach)
    rank = 3 - some - every - far  # full and far key tiles first, then full, then partial, each in order
    order = np.argsort(rank, axis=-1, kind="stable")
    groups = []
    for rows in _group_rows(counts):
        width = max(int(counts[rows].max()), 1)
        chunk = min(max(chunk_tokens // kv_block, 1), width)
        # Even chunks: as many as are needed, each as short as that allows.
        num_chunks = ceil_div(width, chunk)
        chunk = ceil_div(width, num_chunks)
        columns = np.zeros((some.shape[0], len(rows), num_chunks * chunk), np.int32)
        tests = np.ones_like(columns)
        columns[:, :, :width] = order[:, rows, :width]
        listed = np.take_along_axis(some[:, rows], columns[:, :, :width], -1)
        full = np.take_along_axis(every[:, rows], columns[:, :, :width], -1)
        tests[:, :, :width] = np.where(full, 0, 1)
        columns[:, :, :width] *= listed
        for head, row, place in np.argwhere(listed & ~full):
            first = q_first[rows[row]], k_first[columns[head, row, place]]
            tests[head, row, place] = bank.index(head, *first)
        shape = (some.shape[0], len(rows), num_chunks, chunk)
        alike = np.take_along_axis(far[:, rows], columns, -1) & (tests == 0)
        far_chunks, full_chunks = (
            int(np.logical_and.accumulate(kind.reshape(shape).all((0, 1, 3))).sum()) for kind in (alike, tests == 0)
        )
        shaped = columns.reshape(shape), tests.reshape(shape)
        groups.append(Group(rows.astype(np.int32), *shaped, far_chunks, full_chunks))
    return Layout(tuple(groups), bank.array(), q_block, kv_block)


class Bank:
    """Pair tests of partial tiles, each kept once."""

    def __init__(self, pattern: Pattern, q_block: int, kv_block: int) -> None:
        self.pattern, self.shape = pattern, (q_block, kv_block)
        self.tests = [np.ones(self.shape, bool), np.zeros(self.shape, bool)]
        self.known = {test.tobytes(): place for place, test in enumerate(self.tests)}
        self.places: dict[tuple[int, int], list[int]] = {}

    def index(self, head: int, q_first: int, k_first: int) -> int:
        if (q_first, k_first) not in self.places:
            allowed = self.pattern.allows(np.arange(self.shape[0]) + q_first, np.arange(self.shape[1]) + k_first)
            tests = np.broadcast_to(allowed, (allowed.shape[0], *self.shape))
            self.places[q_first, k_first] = [self._place(test) for test in tests]
        places = self.places[q_first, k_first]
        return places[min(head, len(places) - 1)]

    def _place(self, test: np.ndarray) -> int:
        place = self.known.setdefault(test.tobytes(), len(self.tests))
        if place == len(self.tests):
            self.tests.append(np.ascontiguousarray(test))
        return place

    def array(self) -> np.ndarray:
        return np.stack(self.tests)


def _group_rows(counts: np.ndarray) -> list[np.ndarray]:
    """Splits rows into at most `MAX_GROUPS` groups of like counts so that the padded work is least."""
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
