"""The functional core: arrays in, arrays out."""

from xformer.attention.interface import Cost, Shape

__all__ = ["Cost", "Shape"]
