"""Weights of Hugging Face folders in and out: no PyTorch, no network, no pickles."""

from xformer.weights.errors import WeightsError
from xformer.weights.loading import Pretrained, load, sections
from xformer.weights.moved import moved
from xformer.weights.saving import save
from xformer.weights.vit import load_vision

__all__ = ["Pretrained", "WeightsError", "load", "load_vision", "moved", "save", "sections"]
