"""Models built from `xformer.nn`, from constructor arguments."""

from xformer.models.encoder import EncoderClassifier

__all__ = ["EncoderClassifier"]
