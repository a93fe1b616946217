"""Choices of all queries sorted by block say what a list of tiles of each query says, at a fraction of the work."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import close

from xformer.attention import ALiBi, MusicRelative, Shape, Shaw, T5Bias, TopKBlocks
from xformer.attention.token_rows import at_tiles, sorted_by, sum_rows, take_rows

BATCH, LENGTH, HEADS, DEPTH = 2, 150, 4, 8


@dataclasses.dataclass(frozen=True)
class ByQuery(TopKBlocks):
    """As few queries are attended: each with a list of its own."""

    def _sorts(self, q_len, kv_len):
        return False


def arrays(kv_heads=HEADS, length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    sizes = (HEADS, DEPTH), (kv_heads, DEPTH), (kv_heads, DEPTH - 3)
    return [jnp.asarray(rng.standard_normal((BATCH, length, *size)), jnp.float32) for size in sizes]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "position", [None, ALiBi(), T5Bias(num_buckets=8, max_distance=30), Shaw(max_distance=5)], ids=str
)
@pytest.mark.parametrize("options", ["plain", "padding", "keys"])
def test_equals_a_list_for_each_query(causal, position, options):
    """Forward and backward, with grouped heads; a bias of keys has no gradient from places that hold no choice."""
    op = TopKBlocks(block_size=8, num_blocks=4, causal=causal, position=position)
    query, key, value = arrays(kv_heads=2)
    rng = np.random.default_rng(1)
    given = {
        "params": op.init(jax.random.key(0), Shape(BATCH, LENGTH, LENGTH, HEADS, DEPTH, 2, DEPTH - 3)),
        "bias": None,
    }
    fixed = {}
    if options == "padding":
        real = np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - 43]])
        fixed["mask"] = jnp.asarray(real)[:, None, None]
        key = key.at[1, -43:].set(jnp.nan)
    if options == "keys":
        given["bias"] = jnp.asarray(rng.standard_normal((BATCH, 1, 1, LENGTH)), jnp.float32)
        fixed |= {"sinks": jnp.asarray(rng.standard_normal(HEADS), jnp.float32), "softcap": 5.0}
    weights = jnp.asarray(rng.standard_normal((BATCH, LENGTH, HEADS, DEPTH - 3)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def both(op):
        loss = lambda query, key, value, given: (op(query, key, value, **given, **fixed) * weights).sum()
        out = op(query, key, value, **given, **fixed)
        return out, *jax.tree.leaves(jax.grad(loss, (0, 1, 2, 3))(query, key, value, given))

    fields = {field.name: getattr(op, field.name) for field in dataclasses.fields(op)}
    assert op._sorts(LENGTH, LENGTH)
    for got, want in zip(both(op), both(ByQuery(**fields)), strict=True):
        close(got, want, 3e-5)


def test_later_tokens_round_no_earlier_output():
    op = TopKBlocks(block_size=8, num_blocks=4, causal=True)
    run = jax.jit(lambda *call: op(*call))
    changed = [x.at[:, 101:].set(other[:, 101:]) for x, other in zip(arrays(), arrays(seed=5), strict=True)]
    np.testing.assert_array_equal(run(*arrays())[:, :101], run(*changed)[:, :101])


def test_goes_by_query_where_sorting_does_not_pay():
    op = TopKBlocks(block_size=8, num_blocks=4)
    assert op._sorts(LENGTH, LENGTH) and not op._sorts(1, LENGTH)
    assert not dataclasses.replace(op, num_blocks=1)._sorts(LENGTH, LENGTH)
    assert not dataclasses.replace(op, gate="block")._sorts(LENGTH, LENGTH)
    assert not dataclasses.replace(op, implementation="reference")._sorts(LENGTH, LENGTH)
    # A tile of choices would meet the whole table.
    assert not dataclasses.replace(op, position=MusicRelative(max_len=4096))._sorts(LENGTH, LENGTH)


def test_rows_are_gathered_both_ways():
    """Three places of each of five tokens, in tiles of four that begin with a bucket."""
    bucket = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 1, 1, 15)), jnp.int32)
    order, places = (x[:, 0, 0] for x in at_tiles(*sorted_by(bucket, 3), bucket, 3, 4))
    for example in range(2):
        placed = np.asarray(order[example])
        assert sorted(placed[placed < 15]) == list(range(15))
        np.testing.assert_array_equal(placed[np.asarray(places[example])], np.arange(15))
        held = np.where(placed < 15, np.asarray(bucket)[example, 0, 0][np.minimum(placed, 14)], -1).reshape(-1, 4)
        assert all(len(set(tile[tile >= 0])) <= 1 for tile in held)  # one bucket a tile
    rows, back = order // 3, places.reshape(2, 5, 3)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 4)), jnp.float32)
    plain = lambda x: jnp.where((rows < 5)[..., None], jax.vmap(lambda x, rows: x[rows])(x, jnp.minimum(rows, 4)), 0)
    out, pull = jax.vjp(lambda x: take_rows(x, rows, back), x)
    want, plain_pull = jax.vjp(plain, x)
    np.testing.assert_array_equal(out, want)
    y = jnp.asarray(np.random.default_rng(2).standard_normal(out.shape), jnp.float32)
    close(pull(y)[0], plain_pull(y)[0], 1e-6)
    total, pull = jax.vjp(lambda y: sum_rows(y, back, rows), y)
    close(total, plain_pull(y)[0], 1e-6)
    np.testing.assert_array_equal(pull(x)[0], want)
