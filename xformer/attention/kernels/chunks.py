"""How the kernels of the running state cut a call: chunks of tokens, blocks of features."""

from __future__ import annotations

import dataclasses

from xformer.attention.engine.tile_plan import round_up

CHUNK, BLOCK = 64, 64  # tokens of a chunk; most features of keys or values that a program holds of a state


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of a call, padded to whole chunks and blocks, which are powers of two as Triton's arrays must be.

    Attributes:
      tokens, features, values: of the call.
    """

    tokens: int
    features: int
    values: int

    @property
    def chunk(self) -> int:
        return _power(self.tokens, CHUNK)

    @property
    def length(self) -> int:
        return round_up(self.tokens, self.chunk)

    @property
    def num_chunks(self) -> int:
        return self.length // self.chunk

    @property
    def size_block(self) -> int:
        return _power(self.features, BLOCK)

    @property
    def size(self) -> int:
        return round_up(self.features, self.size_block)

    @property
    def depth_block(self) -> int:
        return _power(self.values, BLOCK)

    @property
    def depth(self) -> int:
        return round_up(self.values, self.depth_block)

    @property
    def num_depth_blocks(self) -> int:
        return self.depth // self.depth_block

    @property
    def enter_flops(self) -> int:
        """Of one token that enters the state."""
        return 2 * self.size * self.depth

    @property
    def read_flops(self) -> int:
        """Of one query; every block of values computes the chunk's pairs anew."""
        return 2 * (self.size * self.depth + self.chunk * (self.size * self.num_depth_blocks + self.depth))


def _power(size: int, most: int) -> int:
    """The power of two that holds `size`, 16 at least and `most` at most."""
    return min(max(1 << (size - 1).bit_length(), 16), most)
