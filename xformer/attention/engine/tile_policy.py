"""How large the tiles of a call are, and how many a step of the engine takes."""

from __future__ import annotations

import jax

from xformer.attention.device import present
from xformer.attention.engine import attend as engine
from xformer.attention.engine import sequence_parallel
from xformer.attention.engine.offset_tiles import list_at_offset
from xformer.attention.engine.plan_making import make_tile_plan
from xformer.attention.engine.relative_tiles import LONGEST_ROW
from xformer.attention.engine.tile_plan import TilePlan, ceil_div, round_up
from xformer.attention.pattern import Full, Pattern

MAX_TILE = 512, 256  # queries and keys; on CPUs faster than others (benchmarks/README.md)
LARGE_TILE = 1024, 1024  # on accelerators; on paper (benchmarks/README.md)
MIN_TILE = 64  # tokens: blocks too large for one tile are cut into tiles no smaller


def plan_tiles(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    num_heads: int,
    *,
    block: int | None = None,
    num_embeddings: int = 0,
    constant_beyond: int | None = None,
    query_offset: int | jax.Array | None = 0,
) -> TilePlan:
    """The plan of a pattern's tiles, in sizes that suit it.

    Args:
      pattern: which pairs exist.
      q_len, kv_len: lengths in tokens.
      num_heads: query heads of a layer.
      block: tile size that suits the pattern, in tokens; None where large tiles do.
      num_embeddings, constant_beyond: of the position term, see `Position`; 0 and None without one.
      query_offset: position of the first query. Of an array, which is known only at run time, follow the tiles that
        the plan lists, and not how many: all where the pattern does not bound what a query sees, and where devices
        share out the queries. None: queries may stand anywhere, so all tiles are listed.
    """
    if query_offset is None:
        pattern, query_offset, constant_beyond = Full(), 0, None
    if isinstance(pattern, Full) and constant_beyond is None:
        query_offset = 0  # of no consequence
    # A tile has as many distances as queries and keys: where each needs a product, tiles had better be wide.
    wide = num_embeddings > LONGEST_ROW
    largest = largest_tile()
    most_queries, most_keys = largest[::-1] if wide else largest
    if block is None or isinstance(pattern, Full):
        # Devices that share out the queries need a tile each at least.
        most_queries = min(most_queries, max(ceil_div(q_len, sequence_parallel.num_shards()), 16))
        q_block, kv_block = even_block(q_len, most_queries), even_block(kv_len, most_keys)
    else:
        q_block, kv_block = min(block, q_len), min(block, kv_len)
    # Tiles too small to be worth a step are attended several at a time.
    several = min(max(engine.STEP_SCORES // (num_heads * q_block), 512), 2048)
    chunk_tokens = kv_block if 2 * kv_block > most_keys else several
    if not isinstance(query_offset, int):
        alone = sequence_parallel.num_shards() == 1
        listed = list_at_offset(pattern, query_offset, q_len, kv_len, q_block, kv_block) if alone else None
        if listed is None:
            return plan_tiles(pattern, q_len, kv_len, num_heads, num_embeddings=num_embeddings, query_offset=None)
        return listed.plan(q_len, kv_len, num_heads)
    return make_tile_plan(pattern, q_len, kv_len, q_block, kv_block, chunk_tokens, query_offset, constant_beyond)


def largest_tile() -> tuple[int, int]:
    """The most queries and keys of a tile where no block of a pattern says, on the device that calls are traced for."""
    return MAX_TILE if present().platform == "cpu" else LARGE_TILE


def even_block(length: int, most: int) -> int:
    """The tile size of at most about `most` tokens that cuts a length into equal tiles with little padding."""
    if length <= most:
        return length
    return round_up(ceil_div(length, ceil_div(length, most)), 8)


def tile_of_blocks(block_size: int) -> int:
    """The tile size of a pattern of blocks: a block, or where that is too large the largest part that divides it."""
    divisors = [size for size in range(MIN_TILE, block_size) if block_size % size == 0]
    fitting = [size for size in divisors if size <= MAX_TILE[0]]
    if block_size <= MAX_TILE[0] or not divisors:
        return block_size
    return fitting[-1] if fitting else divisors[0]


def tile_of_window(width: int, length: int) -> int | None:
    """The tile size of a window of so many keys among `length`; None where large tiles do as well."""
    if 2 * width > length:
        return None
    return min(max(1 << (width // 4).bit_length(), 32 if width < 64 else 64), 256)
