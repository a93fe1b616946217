"""order"""

from __future__ import annotations

from ml_collections import ConfigDict

from xformer import presets


def get_config(arg: str = "full") -> ConfigDict:
    """The experiment of one attention variant."""
    needle = presets.sibling(__file__, "needle")
    config = needle.get_config(arg)
    config.name = f"order_{arg}"
    config.task = {"name": "order"}
    return config
