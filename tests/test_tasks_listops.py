"""ListOps: the distribution of Long Range Arena, drawn fast, the same everywhere."""

import dataclasses
import hashlib
import itertools
import random
import statistics

import numpy as np
import pytest

from xformer.tasks import ListOps, listops, listops_trees, vocab
from xformer.tasks.listops_trees import Grammar

VOCABULARY = vocab.Symbols(listops_trees.SYMBOLS)
OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def naive_tree(source: random.Random, grammar: Grammar, depth: int = 1) -> list[str]:
    """One tree, written down from the definition node by node."""
    r = source.random() if depth < grammar.max_depth else 1
    if r > 0.25:
        return [str(source.randrange(10))]
    children = [naive_tree(source, grammar, depth + 1) for _ in range(source.randint(2, grammar.max_args))]
    return [source.choice(list(OPERATORS)), *itertools.chain(*children), "]"]


def evaluate(tokens: list[str]) -> tuple[int, int, int]:
    """Value, greatest depth and greatest number of arguments of an expression."""
    stack: list[tuple[str, list[int]]] = []
    depth = arguments = 0
    for token in tokens:
        depth = max(depth, len(stack) + 1)
        if token in OPERATORS:
            stack.append((token, []))
            continue
        value = int(token) if token.isdigit() else None
        if value is None:
            operator, values = stack.pop()
            arguments = max(arguments, len(values))
            value = OPERATORS[operator](values)
        if not stack:
            return value, depth, arguments
        stack[-1][1].append(value)
    raise AssertionError("unbalanced expression")


def sample(grammar: Grammar, num_roots: int, seed: int = 0):
    return listops_trees.sample(grammar, np.random.Philox(seed), num_roots)


@pytest.mark.parametrize("preset", listops.PRESETS)
def test_labels_are_the_values_of_the_expressions(preset):
    grammar = listops.PRESETS[preset].grammar
    trees = sample(grammar, 400)
    assert len(trees) > 50
    depths, arguments, operators = [], [], set()
    for index in range(len(trees)):
        tokens = VOCABULARY.decode(trees[index]).split()
        value, depth, count = evaluate(tokens)
        assert value == trees.labels[index]
        assert grammar.min_length < len(tokens) < grammar.max_length
        depths.append(depth)
        arguments.append(count)
        operators.add(tokens[0])
    assert max(depths) == grammar.max_depth and max(arguments) == grammar.max_args
    assert operators == set(OPERATORS)


@pytest.mark.parametrize(
    ("grammar", "draws"), [(listops.PRESETS["listops_2k"].grammar, 9_000), (Grammar(16, 128, 5, 10), 24_000)]
)
def test_distribution_is_that_of_the_definition(grammar, draws):
    source = random.Random(1)
    drawn = [naive_tree(source, grammar) for _ in range(draws)]
    naive = [tree for tree in drawn if grammar.min_length < len(tree) < grammar.max_length]
    fast = sample(grammar, 12_000)
    count = len(naive), len(fast)

    # The fast sampler draws operators at the root only, which are a quarter of all trees.
    kept = count[0] / draws, count[1] / 12_000 / 4
    spread = np.sqrt(kept[0] / draws + kept[0] / 48_000)
    assert abs(kept[0] - kept[1]) < 4 * spread

    # Kolmogorov-Smirnov on the lengths, at the 0.1 % level.
    naive_lengths, fast_lengths = np.sort([len(tree) for tree in naive]), np.sort(fast.lengths)
    grid = np.concatenate([naive_lengths, fast_lengths])
    naive_share = np.searchsorted(naive_lengths, grid, "right") / count[0]
    distance = np.abs(naive_share - np.searchsorted(fast_lengths, grid, "right") / count[1]).max()
    assert distance < 1.95 * np.sqrt(sum(count) / (count[0] * count[1]))

    # Two-sample chi-square on labels and on root operators, at the 0.1 % level (9 and 3 degrees of freedom).
    roots = np.array([VOCABULARY.encode(tree[0])[0] for tree in naive])
    for ours, theirs, low, size, bound in (
        (fast.labels, np.array([evaluate(tree)[0] for tree in naive]), 0, 10, 27.9),
        (fast.tokens[fast.offsets[:-1]], roots, 11, 4, 16.3),
    ):
        a, b = (np.bincount(values - low, minlength=size).astype(float) for values in (ours, theirs))
        statistic = ((a * np.sqrt(b.sum() / a.sum()) - b * np.sqrt(a.sum() / b.sum())) ** 2 / (a + b)).sum()
        assert statistic < bound


def test_arguments_and_digits_are_uniform():
    trees = sample(Grammar(1, 10_000, max_depth=2), 40_000)  # an operator over digits
    assert len(trees) == 40_000
    for values, size in ((trees.lengths - 4, 9), (trees.tokens[trees.tokens <= 10] - 1, 10)):
        counts = np.bincount(values, minlength=size)
        assert counts.size == size
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 28


def test_same_data_whatever_the_number_of_workers():
    task = ListOps("listops_128", num_train=700, num_validation=50, num_test=50)
    one, three = task.generate(num_workers=1), task.generate(num_workers=3)
    for split in task.split_sizes:
        assert len(one[split]) == task.split_sizes[split]
        for field in dataclasses.fields(one[split]):
            np.testing.assert_array_equal(getattr(one[split], field.name), getattr(three[split], field.name))
    # The data of a published run must not change under the name it has.
    assert hashlib.sha256(one["test"].tokens.tobytes()).hexdigest()[:16] == "7f7af1d0824aa967"


def test_seeds_and_splits_differ_and_no_expression_occurs_twice():
    tiny = ListOps("listops_128", num_train=3000, num_validation=500, num_test=500)
    splits = tiny.generate()
    expressions = [examples[index].tobytes() for examples in splits.values() for index in range(len(examples))]
    assert len(set(expressions)) == len(expressions) == 4000
    other = dataclasses.replace(tiny, data_seed=1, num_train=1).generate()
    assert other["test"][0].tobytes() not in expressions
    larger = dataclasses.replace(tiny, num_train=3001).generate()
    for split in ("validation", "test"):
        np.testing.assert_array_equal(larger[split].tokens, splits[split].tokens)


def test_repeated_expressions_are_left_out(monkeypatch):
    cramped = listops.Preset(Grammar(1, 6, max_depth=2, max_args=2), 8, 300)  # 400 expressions in all
    monkeypatch.setattr(listops, "PRESETS", {"listops_128": cramped})
    splits = ListOps("listops_128", num_validation=40, num_test=40).generate()
    expressions = [examples[index].tobytes() for examples in splits.values() for index in range(len(examples))]
    assert len(set(expressions)) == 380


def test_brackets_survive_tokenisation():
    text = "[SM [MIN 3 1 ] 9 [MAX 0 [MED 5 5 8 ] ] ]"
    ids = VOCABULARY.encode(text)
    assert len(ids) == len(text.split()) and 0 not in ids
    assert VOCABULARY.decode(ids) == text
    assert VOCABULARY.encode("[SM[MIN 31]9[MAX 0[MED 558]]]") == ids
    trees = sample(Grammar(16, 128, 5, 10), 50)
    for index in range(len(trees)):
        assert VOCABULARY.encode(VOCABULARY.decode(trees[index])) == trees[index].tolist()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"preset": "listops_2"}, "preset"),
        ({"num_train": 0}, "num_train"),
        ({"num_test": True}, "num_test"),
        ({"num_validation": None}, "num_validation"),
        ({"data_seed": -1}, "data_seed"),
        ({"max_len": 1998}, "max_len"),
    ],
)
def test_wrong_options_are_named_in_one_line(options, named):
    with pytest.raises(ValueError, match=named) as error:
        ListOps(**options)
    assert "\n" not in str(error.value)
