"""What was found on a device: which kernels are right there, how fast they are, and with which tiles.

`xformer check-device` writes such a table; `implementation=None` reads it, once a process. The user's own comes first,
then one that ships with the package, for the same kind of device and versions. A table of another device or version, or
a damaged one, is passed over with one line in the log.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import logging
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from xformer.attention.device import Device, present
from xformer.attention.pattern import Causal, Full, Pattern, Window, split_causal

logger = logging.getLogger(__name__)

VARIABLE = "XFORMER_DEVICE_TABLES"
KERNELS = ("cudnn", "pallas", "splash")
STATE = "pallas_state"  # what tables call implementation="pallas" of linear attention
IMPLEMENTATIONS = (*KERNELS, STATE, "xla")
PATTERNS = ("full", "causal", "window", "blocks", "state")
DTYPES = ("bfloat16", "float32")
FORMAT = 1
MOST_BYTES = 2**20
LARGEST_TILE = {"pallas": 128, "splash": 1024}  # that `xformer check-device` times: no table has larger ones


@dataclasses.dataclass(frozen=True)
class Timing:
    """One case that was timed, forward and backward.

    Attributes:
      pattern: one of `PATTERNS`, see `pattern_kind`; "state" is causal linear attention.
      dtype: one of `DTYPES`.
      length, head_dim: of the call.
      seconds: implementation -> median of a call, forward and backward, with its best tiles.
      tiles: implementation -> (query tile, key tile) in tokens, those that were fastest.
    """

    pattern: str
    dtype: str
    length: int
    head_dim: int
    seconds: Mapping[str, float]
    tiles: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Table:
    """The table of a device.

    Attributes:
      device: `Device.key` of the device and versions that it is of.
      passed: kernels of which every check that ran was passed.
      failed: kernel -> what was wrong.
      timings: the cases.
      source: where it comes from, for messages.
    """

    device: Mapping[str, str]
    passed: frozenset[str] = frozenset()
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timings: tuple[Timing, ...] = ()
    source: str = "this process"

    def nearest(
        self,
        pattern: Pattern | Literal["state"],
        dtype: str | None,
        length: int,
        head_dim: int,
        *,
        as_wide: bool = False,
    ) -> Timing | None:
        """The case most like a call, of its kind of pattern and (None: any) dtype; lengths count by their ratio.

        float16 counts as bfloat16. With `as_wide` only cases whose heads are as wide as the call's, or wider.
        """
        kind = pattern if isinstance(pattern, str) else pattern_kind(pattern)
        dtype = "bfloat16" if dtype == "float16" else dtype
        alike = [x for x in self.timings if x.pattern == kind and dtype in (None, x.dtype)]
        alike = [x for x in alike if x.head_dim >= head_dim or not as_wide]
        far = lambda x: (abs(math.log2(x.head_dim / head_dim)), abs(math.log2(x.length / length)))
        return min(alike, key=far, default=None)

    def as_json(self) -> dict[str, Any]:
        """What a file holds."""
        return {
            "format": FORMAT,
            "device": dict(self.device),
            "passed": sorted(self.passed),
            "failed": dict(self.failed),
            "timings": [dataclasses.asdict(one) for one in self.timings],
        }


def pattern_kind(pattern: Pattern) -> str:
    """Which of `PATTERNS` stands for a pattern in a table."""
    if isinstance(pattern, Full | Causal):
        return "full" if isinstance(pattern, Full) else "causal"
    base, _ = split_causal(pattern)
    return "window" if isinstance(base, Window) and base.unit == 1 else "blocks"


def parse(content: Any, source: str) -> Table:
    """The table in a JSON value. Raises ValueError with one line for anything that is no table."""
    _need(isinstance(content, dict) and content.get("format") == FORMAT, f"no table of format {FORMAT}")
    device, passed, failed, timings = (content.get(name) for name in ("device", "passed", "failed", "timings"))
    text = lambda x: isinstance(x, dict) and all(isinstance(y, str) for y in x.values())
    _need(text(device) and {"kind", "driver", "jax", "xformer", "kernels"} <= {*device}, "no device is named")
    _need(isinstance(passed, list) and {*map(str, passed)} <= {*IMPLEMENTATIONS}, "unknown kernels under passed")
    _need(text(failed) and {*failed} <= {*IMPLEMENTATIONS}, "unknown kernels under failed")
    _need(isinstance(timings, list), "no timings")
    both = {*passed} & {*failed}
    _need(not both, f"{', '.join(sorted(both))} passed and failed")
    return Table(device, frozenset(passed), failed, tuple(_timing(x) for x in timings), source)


def _timing(x: Any) -> Timing:
    names = [field.name for field in dataclasses.fields(Timing)]
    _need(isinstance(x, dict) and {*x} == {*names}, f"a timing must have {', '.join(names)}")
    _need(x["pattern"] in PATTERNS and x["dtype"] in DTYPES, "a timing of an unknown pattern or dtype")
    whole = lambda n, most: isinstance(n, int) and not isinstance(n, bool) and 0 < n <= most
    _need(whole(x["length"], 2**30) and whole(x["head_dim"], 2**16), "a length or head_dim is no such number")
    seconds, tiles = x["seconds"], x["tiles"]
    time = lambda s: isinstance(s, int | float) and not isinstance(s, bool) and 0 < s < math.inf
    _need(isinstance(seconds, dict) and {*seconds} <= {*IMPLEMENTATIONS}, "times of unknown implementations")
    _need(all(map(time, seconds.values())), "a time is no positive number")
    _need(isinstance(tiles, dict) and {*tiles} <= {*LARGEST_TILE}, "tiles of an implementation that has none")
    size = lambda n, most: whole(n, most) and n >= 16 and not n & (n - 1)
    for name, pair in tiles.items():
        most = LARGEST_TILE[name]
        fine = isinstance(pair, list | tuple) and len(pair) == 2 and all(size(n, most) for n in pair)
        _need(fine, f"tiles of {name} must be two powers of two from 16 to {most}")
    return Timing(**x | {"tiles": {name: tuple(pair) for name, pair in tiles.items()}})


def _need(fine: bool, wrong: str) -> None:
    if not fine:
        raise ValueError(wrong)


def own_folder() -> Path:
    """Where the user's tables lie: `$XFORMER_DEVICE_TABLES`, else `xformer/devices` in the cache folder of the user."""
    given = os.environ.get(VARIABLE)
    try:
        if given:
            return Path(given).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xformer" / "devices"
    except RuntimeError:  # a user without a home
        return Path(given or "/nonexistent/xformer/devices")


def shipped_folder() -> Path:
    """Tables that come with xformer: inside an installed package, in `benchmarks/results/devices` of a checkout."""
    package = Path(__file__).parents[2]
    installed = package / "devices"
    return installed if installed.is_dir() else package.parent / "benchmarks" / "results" / "devices"


def file_name(key: Mapping[str, str]) -> str:
    """The name of the file for a device and versions."""
    return f"{_slug(key['kind'])}-{zlib.crc32(json.dumps(sorted(key.items())).encode()):08x}.json"


def _slug(kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") or "device"


_given = contextvars.ContextVar[Table | None]("given", default=None)


@contextlib.contextmanager
def using(table: Table) -> Iterator[None]:
    """Within it choices are made by this table."""
    token = _given.set(table)
    try:
        yield
    finally:
        _given.reset(token)


def current() -> Table | None:
    """The table for the device that calls are traced for; files are read once a process."""
    table = _given.get()
    return find(present(), own_folder(), shipped_folder()) if table is None else table


def tiles(
    implementation: str, pattern: Pattern, length: int, head_dim: int, dtype: str | None = None
) -> tuple[int, int] | None:
    """The query and key tile that were fastest for such a call; None where none was measured.

    Not those of narrower heads or of another dtype: a tile of what is larger may not fit where that one did.
    """
    table = current()
    timing = None if table is None else table.nearest(pattern, dtype, length, head_dim, as_wide=True)
    return None if timing is None else timing.tiles.get(implementation)


@functools.lru_cache(maxsize=64)
def find(device: Device, own: Path, shipped: Path) -> Table | None:
    """The table for a device: the user's own, else a shipped one, whose driver may be another; None without one.

    Where a program has several processes, which must all choose alike, the user's own count only if the environment
    names their folder: the cache folders of different machines may differ.
    """
    if device.platform == "cpu":
        return None
    wanted = device.key
    if device.processes == 1 or os.environ.get(VARIABLE):
        if (table := read(own / file_name(wanted), wanted)) is not None:
            return table
        for path in _of_kind(own, wanted) - {own / file_name(wanted)}:
            read(path, wanted)  # says why it is passed over
    alike = {name: value for name, value in wanted.items() if name != "driver"}
    for path in sorted(_of_kind(shipped, wanted)):
        if (table := read(path, alike)) is not None:
            return table
    return None


def _of_kind(folder: Path, key: Mapping[str, str]) -> set[Path]:
    return {
        path for path in folder.glob(f"{_slug(key['kind'])}-*.json") if re.search(r"-[0-9a-f]{8}\.json$", path.name)
    }


def read(path: Path, wanted: Mapping[str, str]) -> Table | None:
    """The table in a file, if there is one for this device and these versions."""
    try:
        if not path.is_file():
            return None
        _need(path.stat().st_size <= MOST_BYTES, f"it has more than {MOST_BYTES:,} bytes")
        table = parse(json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        logger.warning("%s is ignored, it is damaged: %s; xformer check-device writes it anew", path, why)
        return None
    other = [f"{name} {table.device[name]!r}, here {value!r}" for name, value in wanted.items()
             if table.device[name] != value]  # fmt: skip
    if other:
        logger.warning("%s is ignored, it is of %s; xformer check-device makes one", path, "; of ".join(other))
        return None
    return table
