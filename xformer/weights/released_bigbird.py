"""BigBird as the released PyTorch code computes it in evaluation, to compare logits with."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from xformer.attention import BigBird
from xformer.attention.call import Call
from xformer.attention.pattern import Full, Pattern
from xformer.attention.signature import Params


@dataclasses.dataclass(frozen=True)
class ReleasedBigBird(BigBird):
    """`BigBird` with what transformers 5 does in evaluation in place of random blocks.

    There all random blocks of a row are block 0, which is global, so it counts `1 + num_random_blocks` times in the
    softmax of the rows between the first and the last block: a score more by the logarithm of that. Up to
    `(5 + 2 num_random_blocks) block_size` positions attention is full. The term is an array `[length, length]`: this op
    is for comparing, and `BigBird` is what the paper defines.
    """

    def token_pattern(self, kv_len: int, num_heads: int) -> Pattern:
        return Full() if self.sees_all(kv_len) else self._plain().token_pattern(kv_len, num_heads)

    def sees_all(self, num_positions: int) -> bool:
        return num_positions <= (5 + 2 * self.num_random_blocks) * self.block_size

    def _plain(self) -> BigBird:
        keys = ("block_size", "num_window_blocks", "num_global_blocks", "causal", "implementation", "position")
        return BigBird(**{key: getattr(self, key) for key in keys}, num_random_blocks=0)

    def _attend(self, call: Call, params: Params, *, with_lse: bool):
        q_len, kv_len = call.lengths
        if q_len != kv_len or self.causal:
            raise NotImplementedError("ReleasedBigBird: as many queries as keys, and no causal cut")
        if not self.sees_all(kv_len):
            last = (kv_len - 1) // self.block_size * self.block_size
            row, column = jnp.arange(q_len)[:, None], jnp.arange(kv_len)
            again = (row >= self.block_size) & (row < last) & (column < self.block_size)
            term = jnp.where(again, jnp.log1p(self.num_random_blocks), 0.0)[None, None]
            call = dataclasses.replace(call, bias=term if call.bias is None else call.bias + term, plan=None)
        return super()._attend(call, params, with_lse=with_lse)
