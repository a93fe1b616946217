"""The functional core: arrays in, arrays out.

>>> op = BigBird(block_size=64, num_random_blocks=3)
>>> out = op(query, key, value, mask=mask)  # all [batch, length, num_heads, head_dim]
"""

from xformer.attention.bigbird import BigBird
from xformer.attention.compressed import Compressed
from xformer.attention.cost import Cost
from xformer.attention.dot_product_attention import dot_product_attention
from xformer.attention.engine.trees import NO_PATH, tree_distances, tree_paths
from xformer.attention.full import Full
from xformer.attention.interface import Attention
from xformer.attention.layers import Layers, entries
from xformer.attention.linear import Linear
from xformer.attention.linear_attention import LinearAttention
from xformer.attention.linformer import Linformer
from xformer.attention.local import Local
from xformer.attention.longformer import Longformer
from xformer.attention.merge_parts import merge_parts
from xformer.attention.nystrom import Nystrom
from xformer.attention.performer import Performer
from xformer.attention.position import POSITIONS, ALiBi, MusicRelative, Position, Rotary, Shaw, T5Bias
from xformer.attention.reformer import Reformer
from xformer.attention.registry import ATTENTIONS, build
from xformer.attention.retention import Retention
from xformer.attention.routing import Routing
from xformer.attention.shape import Shape
from xformer.attention.shaw_2d import Shaw2D
from xformer.attention.shaw_tree import ShawTree
from xformer.attention.signature import AttentionCallable, Options
from xformer.attention.sinkhorn import Sinkhorn
from xformer.attention.sparse import Sparse
from xformer.attention.synthesizer import Synthesizer
from xformer.attention.topk_blocks import TopKBlocks
from xformer.attention.window import Window

__all__ = [
    "ATTENTIONS",
    "NO_PATH",
    "POSITIONS",
    "ALiBi",
    "Attention",
    "AttentionCallable",
    "BigBird",
    "Compressed",
    "Cost",
    "Full",
    "Layers",
    "Linear",
    "LinearAttention",
    "Linformer",
    "Local",
    "Longformer",
    "MusicRelative",
    "Nystrom",
    "Options",
    "Performer",
    "Position",
    "Reformer",
    "Retention",
    "Rotary",
    "Routing",
    "Shape",
    "Shaw",
    "Shaw2D",
    "ShawTree",
    "Sinkhorn",
    "Sparse",
    "Synthesizer",
    "T5Bias",
    "TopKBlocks",
    "Window",
    "build",
    "dot_product_attention",
    "entries",
    "merge_parts",
    "tree_distances",
    "tree_paths",
]
