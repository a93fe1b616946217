"""What data a run was begun with: recorded in `data.json`, compared whenever the run is used again.

A run that goes on with other data would mix two data sets in one result, and one that is evaluated on other data would
be told a wrong score. So both are refused, and nothing rewrites what a started run stores of its data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xformer.train import workdir as folders
from xformer.train.engine import Data
from xformer.train.errors import DataChanged

logger = logging.getLogger(__name__)

FILE = "data.json"


def record(workdir: Path, data: Data) -> None:
    """Stores the preprocessing of a run that begins, and what its data is."""
    data.save(workdir)
    folders.write_json(workdir / FILE, dict(data.fingerprint))


def check(workdir: Path, fingerprint: Mapping[str, Any]) -> None:
    """Compares the data with that of the started run in the folder, if there is one; changes nothing.

    A run of an older version has no record of its data: a warning says so.

    Raises:
      DataChanged: it differs; the message says in what.
    """
    if not folders.started(workdir):
        return
    recorded = folders.read_object(workdir / FILE)
    if recorded is None:
        logger.warning("%s does not record its data (an older version made it): changes can't be found", workdir)
    elif changes := differences(recorded, fingerprint):
        raise DataChanged(
            f"{workdir} was begun with other data: {', '.join(changes)} changed; "
            "bring that data back or choose another workdir"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The parts in which two fingerprints differ, in words; those that are no digests with both values."""
    found = []
    for part in dict.fromkeys([*before, *now]):
        old, new = (json.loads(json.dumps(side.get(part))) for side in (before, now))
        if old != new and part != "digest":
            shown = "" if isinstance(old, str) or isinstance(new, str) else f" ({_short(old)} there, {_short(new)} now)"
            found.append(part + shown)
    return found or ([] if before.get("digest") == now.get("digest") else ["contents"])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
