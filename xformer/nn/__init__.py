"""Flax NNX layers around the functional core; `xformer.nn.linen` has the Linen adapter."""

from xformer.nn.attention_fn import AttentionFn
from xformer.nn.block import EncoderBlock
from xformer.nn.cache import Cache
from xformer.nn.constant import Constant
from xformer.nn.embedding import LearnedPositions, SinusoidalPositions, TokenEmbedding, make_positions
from xformer.nn.feed_forward import FeedForward
from xformer.nn.multi_head import MultiHeadAttention
from xformer.nn.pooling import at_places, masked_mean

__all__ = [
    "AttentionFn",
    "Cache",
    "Constant",
    "EncoderBlock",
    "FeedForward",
    "LearnedPositions",
    "MultiHeadAttention",
    "SinusoidalPositions",
    "TokenEmbedding",
    "at_places",
    "make_positions",
    "masked_mean",
]
