"""Which pairs each variant considers: shapes, windows, and BigBird's blocks against their definition."""

import dataclasses
import os
import subprocess
import sys

import conformance
import hypothesis
import numpy as np
import pytest
import references
from hypothesis import strategies as st

from xformer.attention import BigBird, Full, Linformer, Window


@pytest.mark.parametrize("length", [1, 2, 17, 65])
def test_full_and_window(length):
    at = np.arange(length)
    for causal in (False, True):
        np.testing.assert_array_equal(
            Full(causal=causal).pattern(length, length, 3), references.full_pattern(at, at, causal)
        )
        for left, right in ((0, 0), (4, 0), (1, 3), (100, 100)):
            op = Window(left=left, right=right, causal=causal)
            want = references.window_pattern(at, at, left, right, causal)
            np.testing.assert_array_equal(op.pattern(length, length, 2), want)


def test_pattern_is_a_numpy_bool_array_and_none_without_pairs():
    assert Linformer().pattern(8, 8, 2) is None
    for op in (Full(), Window(), BigBird()):
        pattern = op.pattern(130, 130, 4)
        assert isinstance(pattern, np.ndarray) and pattern.dtype == bool
        assert pattern.shape in ((1, 130, 130), (4, 130, 130))
        np.testing.assert_array_equal(op.pattern(100, 130, 4), pattern[:, :100])  # positions count from 0


def blocks_of(pattern, block_size, causal):
    """Bool `[heads, blocks, blocks]`, having checked that the pattern is whole blocks (cut at the diagonal)."""
    length = pattern.shape[1]
    count = -(-length // block_size)
    starts = np.arange(count) * block_size
    blocks = np.logical_or.reduceat(np.logical_or.reduceat(pattern, starts, axis=1), starts, axis=2)
    whole = blocks.repeat(block_size, axis=1).repeat(block_size, axis=2)[:, :length, :length]
    np.testing.assert_array_equal(pattern, np.tril(whole) if causal else whole)
    return blocks


def check_bigbird(op, length, num_heads=3):
    """Global and window blocks are all there; what is beyond them is the right number of drawn blocks."""
    pattern = op.pattern(length, length, num_heads)
    blocks = blocks_of(pattern, op.block_size, op.causal)
    always, candidates = references.bigbird_blocks(
        blocks.shape[1], op.num_window_blocks, op.num_global_blocks, op.causal
    )
    assert not (always & ~blocks).any(), "a window or global block is missing"
    drawn = blocks & ~always
    assert not (drawn & ~candidates).any(), "a random block from outside its candidates"
    want = np.minimum(candidates.sum(axis=-1), op.num_random_blocks)
    np.testing.assert_array_equal(drawn.sum(axis=-1), np.broadcast_to(want, drawn.shape[:2]))
    return drawn


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 13, 20, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_bigbird_at_any_length(length, causal):
    """One block, fewer blocks than it wants, and lengths that are no multiple of the block."""
    check_bigbird(BigBird(4, num_random_blocks=2, num_window_blocks=3, num_global_blocks=2, causal=causal), length)


@conformance.drawn(60)
@hypothesis.given(
    block=st.integers(1, 9),
    random=st.integers(0, 4),
    window=st.sampled_from([1, 3, 5]),
    globals_=st.integers(0, 5),
    causal=st.booleans(),
    length=st.integers(1, 120),
    seed=st.integers(0, 2**31 - 1),
)
def test_bigbird_drawn(block, random, window, globals_, causal, length, seed):
    op = BigBird(
        block_size=block,
        num_random_blocks=random,
        num_window_blocks=window,
        num_global_blocks=globals_,
        causal=causal,
        seed=seed,
    )
    check_bigbird(op, length)


def test_first_and_last_block_are_global_in_the_released_setting():
    pattern = BigBird(block_size=8, num_global_blocks=2, num_random_blocks=0, num_window_blocks=1).pattern(64, 64, 1)[0]
    assert pattern[:8].all() and pattern[-8:].all() and pattern[:, :8].all() and pattern[:, -8:].all()
    assert pattern[8:-8, 8:-8].sum() == 6 * 64
    three = BigBird(block_size=8, num_global_blocks=3, num_random_blocks=0, num_window_blocks=1).pattern(64, 64, 1)[0]
    assert three[:16].all() and not three[16:24].all() and three[-8:].all()


def test_random_blocks_are_uniform_over_the_whole_length():
    """Each candidate of a row is drawn equally often over seeds and heads: within five standard deviations."""
    count, heads, seeds, drawn_per_row = 48, 8, 120, 3
    drawn = np.zeros((count, count))
    for seed in range(seeds):
        op = BigBird(block_size=1, num_random_blocks=3, num_window_blocks=3, num_global_blocks=2, seed=seed)
        drawn += check_bigbird(op, count, heads).sum(axis=0)
    _, candidates = references.bigbird_blocks(count, 3, 2, False)
    for row in range(1, count - 1):
        available = candidates[row].sum()
        chance = drawn_per_row / available
        deviation = np.sqrt(heads * seeds * chance * (1 - chance))
        observed = drawn[row][candidates[row]]
        assert np.abs(observed - heads * seeds * chance).max() < 5 * deviation, f"row {row}"


def test_causal_random_blocks_are_uniform_over_the_past():
    """Each pair of blocks that a row may draw is drawn equally often over seeds and heads: five standard deviations."""
    count, heads, seeds = 12, 8, 250
    rows = []
    for seed in range(seeds):
        op = BigBird(1, num_random_blocks=2, num_window_blocks=1, num_global_blocks=1, causal=True, seed=seed)
        rows.append(check_bigbird(op, count, heads)[:, -1])
    drawn = np.concatenate(rows)  # of the last row, which draws two of blocks 1 to 10
    together = np.einsum("ni,nj->ij", drawn.astype(int), drawn.astype(int))[1:11, 1:11]
    chance, tries = 1 / 45, heads * seeds
    observed = together[np.triu_indices(10, 1)]
    assert observed.sum() == tries
    assert np.abs(observed - tries * chance).max() < 5 * np.sqrt(tries * chance * (1 - chance))


@conformance.drawn(60)
@hypothesis.given(
    block=st.integers(1, 9),
    random=st.integers(0, 4),
    window=st.sampled_from([1, 3, 5]),
    globals_=st.integers(0, 5),
    tokens=st.integers(0, 20),
    lengths=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    heads=st.integers(1, 3),
    seed=st.integers(0, 2**31 - 1),
)
def test_causal_rows_do_not_depend_on_the_length(block, random, window, globals_, tokens, lengths, heads, seed):
    op = BigBird(block, random, window, globals_, num_global_tokens=tokens, seed=seed, causal=True)
    short, long = sorted(lengths)
    wide = lambda pattern: np.broadcast_to(pattern, (heads, *pattern.shape[1:]))  # heads that see all share one
    inner = wide(op.pattern(long, long, heads))[:, :short, :short]
    np.testing.assert_array_equal(inner, wide(op.pattern(short, short, heads)))


def test_the_first_256_causal_rows_see_the_same_keys_at_512_tokens():
    """The value of the report: 176 of them saw others."""
    op = BigBird(block_size=16, causal=True)
    np.testing.assert_array_equal(op.pattern(512, 512, 4)[:, :256, :256], op.pattern(256, 256, 4))


def test_random_blocks_reach_past_1024_tokens():
    """Fault 10: the 64 rows of blocks draw from anywhere in 4096 tokens, a quarter of it in the first 1024."""
    op = BigBird(block_size=64, num_random_blocks=3)
    drawn = op.pattern(4096, 4096, 2)[:, ::64, ::64]
    always, _ = references.bigbird_blocks(64, op.num_window_blocks, op.num_global_blocks, False)
    columns = np.nonzero(drawn & ~always)[2]
    assert (columns < 16).mean() < 0.35 and columns.max() >= 60 and len(set(columns)) > 55


def test_heads_layers_and_seeds_differ_and_repeat():
    op = BigBird(block_size=2, num_random_blocks=2, seed=5)
    pattern = op.pattern(100, 100, 4)
    assert len({head.tobytes() for head in pattern}) == 4
    layers = [op.at_layer(index).pattern(100, 100, 4).tobytes() for index in range(4)]
    assert len(set(layers)) == 4
    assert op.at_layer(2).pattern(100, 100, 4).tobytes() == layers[2] and op.at_layer(2) == op.at_layer(2)
    assert dataclasses.replace(op, seed=6).pattern(100, 100, 4).tobytes() not in layers
    np.testing.assert_array_equal(BigBird(block_size=2, num_random_blocks=2, seed=5).pattern(100, 100, 4), pattern)
    for other in (Full(), Window(left=2, right=2), Linformer()):
        assert other.at_layer(3) == other


def test_same_blocks_in_every_process_and_no_global_state():
    script = (
        "from xformer.attention import BigBird; import hashlib, numpy as np;"
        "np.random.seed(3); before = np.random.get_state()[1].tobytes();"
        "p = BigBird(block_size=4, seed=9).at_layer(1).pattern(200, 200, 3).tobytes();"
        "assert np.random.get_state()[1].tobytes() == before; print(hashlib.sha256(p).hexdigest())"
    )
    digests = set()
    for seed in ("0", "1234"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        digests.add(subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True).stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("causal", [False, True])
def test_etc_tokens_are_global(causal):
    """The first n positions attend to all and are attended by all (the past, if causal)."""
    for tokens in (1, 3, 8, 11):
        op = BigBird(block_size=4, num_global_tokens=tokens, num_global_blocks=0, num_random_blocks=1, causal=causal)
        pattern = op.pattern(50, 50, 2)
        past = np.tril(np.ones((50, 50), bool)) if causal else np.ones((50, 50), bool)
        np.testing.assert_array_equal(pattern[:, :tokens], np.broadcast_to(past[:tokens], (2, tokens, 50)))
        np.testing.assert_array_equal(pattern[:, :, :tokens], np.broadcast_to(past[:, :tokens], (2, 50, tokens)))
        assert not pattern[:, tokens:].all(axis=-1).any() or causal
        assert not (pattern & ~past).any()


@pytest.mark.parametrize("op", [Full(), Window(left=3, right=1), BigBird(block_size=4)], ids=str)
def test_causal_pattern_holds_no_future(op):
    pattern = dataclasses.replace(op, causal=True).pattern(61, 61, 2)
    assert not np.triu(pattern, 1).any() and pattern[:, np.arange(61), np.arange(61)].all()


def test_full_tiles_come_first_and_are_not_tested():
    """A causal row of tiles visits the full ones in chunks without a test, then those on the diagonal with one."""
    plan = Full(causal=True).tile_plan(4096, 4096, 8)
    assert any(group.unmasked_chunks for group in plan.groups)
    for group in plan.groups:
        assert not group.mask_ids[:, :, : group.unmasked_chunks].any()
        if group.num_query_tiles == 1:  # rows of unlike numbers of full tiles share the least
            assert group.mask_ids[:, :, group.unmasked_chunks :].any((0, 1, 3)).all()
    pairs = dense(Full(causal=True), plan, 4096)
    np.testing.assert_array_equal(pairs, np.tri(4096, dtype=bool))


def dense(op, plan, length):
    """The pairs that a plan of shared tiles stands for, bool `[length, length]`."""
    pairs = np.zeros((length, length), bool)
    for group in plan.groups:
        for row, columns, tests in zip(group.query_tiles, group.key_tiles[0], group.mask_ids[0], strict=True):
            for column, test in zip(columns.ravel(), tests.ravel(), strict=True):
                q, k = row * plan.q_block, column * plan.kv_block
                pairs[q : q + plan.q_block, k : k + plan.kv_block] |= plan.pair_masks[test]
    return pairs
