"""Text from models that decode: greedy, sampled, or by beam search, on arrays of token ids.

A model that decodes has `max_len`, `unrolled()`, `init_caches(batch, max_len)` and `decode(tokens, caches, mask)`, as
`xformer.models.Decoder` has.
"""

from xformer.generate.generation import generate
from xformer.generate.pieces import pieces
from xformer.generate.streaming import stream

__all__ = ["generate", "pieces", "stream"]
