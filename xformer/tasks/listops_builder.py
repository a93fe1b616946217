"""ListOps as a TFDS builder of its own: `ListOpsBuilder(config="listops_2k", file_format="array_record")`."""

from __future__ import annotations

import numpy as np

from xformer.tasks.builders import TokenBuilder, TokenConfig
from xformer.tasks.listops import PRESETS, ListOps


def listops_config(name: str, task: ListOps) -> TokenConfig:
    """The configuration that makes the splits of a ListOps task."""
    return TokenConfig(
        name=name,
        description=f"ListOps (Nangia & Bowman 2018), {task}",
        class_names=list("0123456789"),
        dtype=np.dtype(np.uint8),
        make=task.generate,
    )


class ListOpsBuilder(TokenBuilder, skip_registration=True):  # type: ignore[call-arg]
    """ListOps with the distribution of Long Range Arena, by preset."""

    name = "listops"
    BUILDER_CONFIGS = [listops_config(preset, ListOps(preset)) for preset in PRESETS]  # noqa: RUF012
