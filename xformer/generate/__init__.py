"""Text from models that decode: greedy, sampled, or by beam search, on arrays of token ids.

A model that decodes has `max_len`, `unrolled()`, `init_caches(batch, max_len)` and `decode(tokens, caches, mask)`, as
`xformer.models.Decoder` has. One that translates has also `target_max_len`, `read(sources, mask)`, which is called
once, and takes what that gives as `decode(..., context=)`, as `xformer.models.EncoderDecoder` does: what is a prompt of
the other is then a source, and its text begins after the id 0.
"""

from xformer.generate.generation import generate
from xformer.generate.pieces import pieces
from xformer.generate.streaming import stream

__all__ = ["generate", "pieces", "stream"]
