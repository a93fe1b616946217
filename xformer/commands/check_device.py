"""Checks and times the attention kernels on this machine's device, and keeps what it finds for `implementation=None`.

  xformer check-device                 on a GPU or TPU: every kernel against the reference, then times and tile sizes
  xformer check-device --interpret     on a CPU: the same checks on tiny shapes, in Pallas's interpreter

The table lies in $XFORMER_DEVICE_TABLES, else in ~/.cache/xformer/devices. A kernel that fails is never chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from xformer.attention.device import Device, present
from xformer.attention.kernels import choice, tables
from xformer.attention.kernels.tables import Table
from xformer.bench import device_check, device_times
from xformer.commands import cli
from xformer.schema import ConfigError
from xformer.train import workdir as folders

SECONDS = 600.0
INTERPRETED = ("pallas", tables.STATE, "splash")


def command(argv: Sequence[str]) -> None:
    """The command."""
    parser = cli.Parser(__doc__ or "")
    parser.add_argument("--interpret", action="store_true", help="tiny checks in Pallas's interpreter, on a CPU")
    parser.add_argument("--check_only", action="store_true", help="time nothing")
    parser.add_argument(
        "--seconds",
        help=f"for the times, {SECONDS:g} by default, after the checks; for the checks where nothing is timed",
    )
    parser.add_argument("--out", help="folder of the table (default: where implementation=None looks)")
    args, overrides = parser.parse(argv)
    if overrides:
        raise ConfigError(f"--config.{overrides[0]}: check-device takes no config")
    seconds = SECONDS if args.seconds is None else _seconds(args.seconds)
    timed = not (args.interpret or args.check_only)
    for_checks = device_check.SECONDS if timed or args.seconds is None else seconds
    folder = tables.own_folder() if args.out is None else parser.folder("--out", args.out)
    device = present()
    unusable = {} if args.interpret else choice.unusable(device)
    kernels = tuple(name for name, why in unusable.items() if not why)
    if "pallas" in kernels:
        kernels += (tables.STATE,)
    kernels = INTERPRETED if args.interpret else kernels
    for name, why in unusable.items():
        if why:
            cli.say(
                f"{device.kind}: {name} is not checked: {why}, this has {'.'.join(map(str, device.capability or ()))}"
            )
    if args.interpret and device.platform != "cpu":
        raise ConfigError(f"--interpret: for CPUs; this is a {device.kind}, whose kernels are checked without it")
    if not kernels:
        print(f"{device.kind}: no kernel runs here, calls without a named implementation run xla.")
        if device.platform == "cpu":
            print("There is nothing to time; --interpret checks the kernels on tiny shapes.")
        return
    path = folder / tables.file_name(device.key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        named = tables.VARIABLE if args.out is None else "--out"
        raise ConfigError(f"{named}: got {str(folder)!r}, takes a folder that can be made: {error.strerror}") from error
    cli.say(f"{device.kind}: checking {', '.join(kernels)} against the reference")
    try:
        table = device_check.check_all(kernels, cli.say, tiny=args.interpret, seconds=for_checks)
        earlier = tables.read(path, device.key)
        table = dataclasses.replace(table, timings=earlier.timings if earlier else ())  # until there are new ones
        folders.write_json(path, table.as_json())
        if timed:
            cli.say(f"{device.kind}: timing, up to {seconds:g} s")
            write = lambda timings: folders.write_json(path, dataclasses.replace(table, timings=timings).as_json())
            passed = [name for name in kernels if name in table.passed]
            if timings := device_times.measure(passed, seconds, cli.say, write):
                table = dataclasses.replace(table, timings=timings)
    except KeyboardInterrupt:
        raise cli.CommandFailed(f"interrupted; what was written until then, if anything, is in {path}") from None
    tables.find.cache_clear()
    read = folder.absolute() == tables.own_folder().absolute()
    print("\n".join(report(device, table, kernels, path, read=read)))
    if table.failed:
        names = ", ".join(table.failed)
        chosen = " and will not be chosen on this device" if read else ""
        raise cli.CommandFailed(f"{names} failed the check{chosen}; see {path}")


def report(device: Device, table: Table, kernels: Sequence[str], path: Path, *, read: bool = True) -> list[str]:
    """What was found, in lines to read and to paste into an issue. `read`: whether calls look for it there."""
    lines = ["", "--- xformer check-device, to paste into an issue ---"]
    lines += [f"{name}: {value}" for name, value in table.device.items() if value]
    for name in kernels:
        state = "passed every check" if name in table.passed else table.failed.get(name, "not every check was run")
        lines.append(f"{name}: {'FAILED ' if name in table.failed else ''}{state}")
    for row in device_times.rows(table.timings, table.failed):
        times = sorted(row["seconds"].items(), key=lambda item: item[1])
        spelt = ", ".join(f"{device_times.label(name, row['tiles'].get(name))} {1e3 * x:.3g} ms" for name, x in times)
        case = f"{row['pattern']} {row['dtype']} {row['length']} x {row['head_dim']}"
        lines.append(f"{case}: {row['chosen']}, the fastest of {spelt}")
    lines.append("---")
    if device.platform == "cpu":
        return [*lines, f"Written to {path}; on a CPU calls without a named implementation run xla all the same."]
    if not read:
        return [*lines, f"Written to {path}; implementation=None reads it where {tables.VARIABLE} names that folder."]
    why = "the fastest in the case most like a call" if table.timings else "checked kernels first, no times"
    return [*lines, f"Written to {path}; implementation=None takes from it {why}."]


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"--seconds: got {text!r}, takes a positive number")
    return number
