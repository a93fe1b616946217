"""Models built from `xformer.nn`, from constructor arguments.

A model's positional arguments are sizes that the data gives (`vocab_size`, `num_classes`, `max_len`, ...). Its keywords
are `attention`, `dtype`, `param_dtype`, `rngs` and the keys of a config's `model` section. It is called with
`task.inputs(batch)`, `deterministic` and `rngs`.
"""

from flax import nnx

from xformer.lookup import Table
from xformer.models.bilstm import BiLSTM
from xformer.models.classifier import EncoderClassifier
from xformer.models.convnet import ConvNet
from xformer.models.decoder import Decoder
from xformer.models.encoder import Encoder, EncoderOptions
from xformer.models.encoder_decoder import EncoderDecoder
from xformer.models.masked_lm import MaskedLanguageModel
from xformer.models.separator_decoder import SeparatorDecoder
from xformer.models.seq2seq_lstm import Seq2SeqLSTM
from xformer.models.token_classifier import TokenClassifier
from xformer.models.two_tower import TwoTower
from xformer.models.vision import VisionTransformer

MODELS: Table[type[nnx.Module]] = Table(
    {
        "classifier": EncoderClassifier,
        "two_tower": TwoTower,
        "token_classifier": TokenClassifier,
        "masked_lm": MaskedLanguageModel,
        "decoder": Decoder,
        "bilstm": BiLSTM,
        "encoder_decoder": EncoderDecoder,
        "seq2seq_lstm": Seq2SeqLSTM,
        "vision": VisionTransformer,
        "convnet": ConvNet,
        "separator_decoder": SeparatorDecoder,
    },
    kind=nnx.Module,
)
"""The models by the name that a config gives them."""

__all__ = [
    "MODELS",
    "BiLSTM",
    "ConvNet",
    "Decoder",
    "Encoder",
    "EncoderClassifier",
    "EncoderDecoder",
    "EncoderOptions",
    "MaskedLanguageModel",
    "SeparatorDecoder",
    "Seq2SeqLSTM",
    "TokenClassifier",
    "TwoTower",
    "VisionTransformer",
]
