"""ListOps expressions by the million: the tree distribution of Long Range Arena, whole levels at a time.

A tree is drawn as `tree(depth=1)`: below the depth limit it is with probability 1/4 an operator (MIN, MAX, MED, SM,
uniform) over 2 to `max_args` subtrees (uniform), and otherwise, or at the limit, a digit (uniform). Its length is 1 for
a digit and 2 plus the lengths of its children for an operator, which is its number of tokens here. MED is the floor of
the median, SM the sum modulo 10. Trees with `min_length < length < max_length` are kept. (Nangia & Bowman 2018,
arXiv:1804.06028; Tay et al. 2021, arXiv:2011.04006, section 2.1, with the numbers of the released generator.)
"""

from __future__ import annotations

import dataclasses

import numpy as np

from xformer.tasks.ragged import Ragged

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""Tokens in the order of their ids; id 0 is padding, so a symbol's id is its place here plus one."""

_DIGIT, _OPERATOR, _CLOSE = 1, 11, 15
_MIN, _MAX, _MED = range(3)
_ROOTS = 4096


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The tree distribution: both length bounds exclusive, depth counted from 1 at the root."""

    min_length: int
    max_length: int
    max_depth: int = 10
    max_args: int = 10


@dataclasses.dataclass(frozen=True)
class _Level:
    """All nodes of one depth, left to right: tree int64, is_op bool, op, digit and num_args uint8, each [nodes]."""

    tree: np.ndarray
    is_op: np.ndarray
    op: np.ndarray
    digit: np.ndarray
    num_args: np.ndarray

    def select(self, nodes: np.ndarray) -> _Level:
        return _Level(*(getattr(self, field.name)[nodes] for field in dataclasses.fields(self)))


def _draw(grammar: Grammar, source: np.random.Philox, num_roots: int) -> tuple[list[_Level], np.ndarray]:
    """Levels of `num_roots` trees and which of the trees are kept, bool [num_roots].

    Every root is an operator: a digit is 1 token long and never kept, so drawing one would only cost time. A tree stops
    growing once it can't be short enough any more. Neither changes the distribution of the kept trees.
    """
    levels: list[_Level] = []
    tree = np.arange(num_roots)
    length = np.zeros(num_roots, np.int64)
    alive = np.ones(num_roots, bool)
    for depth in range(1, grammar.max_depth + 1):
        # One 64-bit word a node. Raw words, because NumPy promises their values for ever and those of `integers` not.
        word = source.random_raw(tree.size)
        if depth == 1:
            is_op = np.ones(tree.size, bool)
        elif depth == grammar.max_depth:
            is_op = np.zeros(tree.size, bool)
        else:
            is_op = word >> np.uint64(62) == 0
        op = (word >> np.uint64(60)).astype(np.uint8) & 3
        num_args = 2 + (
            (word >> np.uint64(32) & np.uint64(0xFFFFFFF)) * np.uint64(grammar.max_args - 1) >> np.uint64(28)
        )
        digit = (word & np.uint64(0xFFFFFFFF)) * np.uint64(10) >> np.uint64(32)
        level = _Level(tree, is_op, op, digit.astype(np.uint8), num_args.astype(np.uint8))
        levels.append(level)
        operators = np.flatnonzero(is_op)
        parents = tree[operators]
        length += np.bincount(tree, minlength=num_roots) + np.bincount(parents, minlength=num_roots)
        pending = np.bincount(parents, level.num_args[operators], minlength=num_roots).astype(np.int64)
        alive &= length + pending < grammar.max_length
        tree = np.repeat(parents, np.where(alive[parents], level.num_args[operators], 0))
        if not tree.size:
            break
    return levels, alive & (length > grammar.min_length)


def _evaluate(op: np.ndarray, num_args: np.ndarray, child_value: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Values of the operators from those of their children, which lie side by side from `start`: uint8 [operators]."""
    value = (np.add.reduceat(child_value, start, dtype=np.int64) % 10).astype(np.uint8)
    value = np.where(op == _MIN, np.minimum.reduceat(child_value, start), value)
    value = np.where(op == _MAX, np.maximum.reduceat(child_value, start), value)
    median = np.flatnonzero(op == _MED)
    if median.size:
        count = num_args[median].astype(np.int64)
        member = np.repeat(op == _MED, num_args)
        group = np.repeat(np.arange(median.size, dtype=np.int32) << 4, count)
        ordered = np.sort(group | child_value[member]) & 15
        first = np.cumsum(count) - count
        value[median] = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) // 2
    return value


def sample(grammar: Grammar, source: np.random.Philox, num_roots: int = _ROOTS) -> Ragged:
    """The kept ones of `num_roots` trees drawn with an operator at the root: token ids uint8, labels 0-9."""
    levels, kept = _draw(grammar, source, num_roots)
    levels = [level.select(kept[level.tree]) for level in levels]

    # Per level, from the deepest up.
    value: list[np.ndarray] = []
    size: list[np.ndarray] = []
    start: list[np.ndarray] = []
    for level in reversed(levels):
        level_value = level.digit.copy()
        level_size = np.ones(level.tree.size, np.int64)
        num_args = level.num_args[level.is_op]
        level_start = np.cumsum(num_args, dtype=np.int64) - num_args
        if num_args.size:
            level_value[level.is_op] = _evaluate(level.op[level.is_op], num_args, value[-1], level_start)
            level_size[level.is_op] = 2 + np.add.reduceat(size[-1], level_start)
        value.append(level_value)
        size.append(level_size)
        start.append(level_start)
    value, size, start = value[::-1], size[::-1], start[::-1]

    offsets = np.concatenate([[0], np.cumsum(size[0])])
    tokens = np.empty(offsets[-1], np.uint8)
    position = offsets[:-1]
    for depth, level in enumerate(levels):
        tokens[position] = np.where(level.is_op, _OPERATOR + level.op, _DIGIT + level.digit)
        operators = np.flatnonzero(level.is_op)
        if not operators.size:
            break
        tokens[position[operators] + size[depth][operators] - 1] = _CLOSE
        before = np.cumsum(size[depth + 1]) - size[depth + 1]  # tokens of the level's nodes to the left
        first = position[operators] + 1 - before[start[depth]]
        position = np.repeat(first, level.num_args[operators]) + before
    return Ragged(tokens, offsets, value[0].astype(np.int32))
