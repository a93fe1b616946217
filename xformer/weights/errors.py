"""What is wrong with a folder of weights, or with a model that is to become one."""

from __future__ import annotations


class WeightsError(ValueError):
    """A folder that can't be read, or a model that can't be written there. The message is one line."""
