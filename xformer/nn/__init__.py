"""Flax NNX layers around the functional core; `xformer.nn.linen` has the Linen adapter."""

from xformer.nn.attention_fn import AttentionFn
from xformer.nn.block import EncoderBlock
from xformer.nn.cache import Cache
from xformer.nn.constant import Constant
from xformer.nn.embedding import LearnedPositions, SinusoidalPositions, TokenEmbedding, make_positions
from xformer.nn.experts import MixtureOfExperts
from xformer.nn.feed_forward import Activation, FeedForward
from xformer.nn.logits import Logits
from xformer.nn.multi_head import MultiHeadAttention
from xformer.nn.norm import LayerNorm, NormType, RMSNorm
from xformer.nn.patches import LearnedGrid, PatchEmbedding, SinusoidalGrid
from xformer.nn.pooling import AttentionPooling, at_places, masked_mean
from xformer.nn.recurrent import LSTM, BidirectionalLSTM

__all__ = [
    "LSTM",
    "Activation",
    "AttentionFn",
    "AttentionPooling",
    "BidirectionalLSTM",
    "Cache",
    "Constant",
    "EncoderBlock",
    "FeedForward",
    "LayerNorm",
    "LearnedGrid",
    "LearnedPositions",
    "Logits",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "NormType",
    "PatchEmbedding",
    "RMSNorm",
    "SinusoidalGrid",
    "SinusoidalPositions",
    "TokenEmbedding",
    "at_places",
    "make_positions",
    "masked_mean",
]
