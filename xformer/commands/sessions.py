"""Keeps, in a comparison's workdir, which command trained what, when, on which machine and from which commit."""

from __future__ import annotations

import contextlib
import datetime
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from xformer.bench import machine
from xformer.commands import hosts
from xformer.commands.comparison_plan import Planned
from xformer.report import made, results
from xformer.train import workdir as folders

MOST_NAMES = 8


@contextlib.contextmanager
def recorded(workdir: Path, argv: Sequence[str], planned: Callable[[], Sequence[Planned]]) -> Iterator[None]:
    """Adds to `made.json` what has ended when this is left, however it is left; nothing where nothing has.

    Args:
      argv: of the command.
      planned: gives the runs and trials, as they stand when it is called.
    """
    began = datetime.datetime.now(datetime.UTC)
    before = {one.folder for one in planned() if one.ended}
    try:
        yield
    finally:
        ended = [one for one in planned() if one.ended and one.folder not in before]
        if ended and hosts.is_main():
            path = workdir / made.FILE
            kept = (results.read_json(path) or {}).get("sessions")
            entry = {
                "began": f"{began:%Y-%m-%d %H:%M} UTC",
                "command": f"xformer compare {shlex.join(argv)}",
                "trained": _names(ended),
                "machine": machine.describe(),
            }
            folders.write_json(path, {"sessions": [*(kept if isinstance(kept, list) else []), entry]})


def _names(ended: Sequence[Planned]) -> str:
    """`6 trials and 4 runs: full, seed 0; ...`."""
    counts = {role: sum(one.role == role for one in ended) for role in ("trial", "run")}
    count = " and ".join(f"{number} {role}{'' if number == 1 else 's'}" for role, number in counts.items() if number)
    names = [str(one) for one in ended if one.role == "run"]
    if not names:
        return count
    more = f"; and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{count} ({'; '.join(names[:MOST_NAMES])}{more})"
