"""What every command shares: flags, config overrides, exit codes, one line for every failure that can be foreseen."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from xformer.commands import hosts
from xformer.extras import MissingExtra, explain
from xformer.schema import ConfigError, nearest
from xformer.tasks import DataMissing
from xformer.train import (
    CallbackFailed,
    CheckpointError,
    Diverged,
    Interrupted,
    OutOfMemory,
    ProcessLost,
    WarmStartError,
    WorkdirBusy,
    WorkdirMismatch,
)

FINISHED, FAILED, WRONG_ARGUMENTS, RESUMABLE = 0, 1, 2, 75


class CommandFailed(RuntimeError):
    """A command did not do all it was asked for; the message says what is left."""


# OSError: a full or read-only disk.
FORESEEN = (
    DataMissing, MissingExtra, Diverged, CallbackFailed, CheckpointError, OutOfMemory, ProcessLost, WorkdirBusy,
    OSError, CommandFailed, MemoryError,
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An argument parser whose every complaint is a ConfigError and that collects `--config.a.b=value` overrides."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    @staticmethod
    def folder(flag: str, value: str) -> Path:
        """The folder that a flag names. ConfigError where none can be: the name is empty, or a file is in the way."""
        path = Path(value)
        if any("\udc80" <= char <= "\udcff" for char in str(path.absolute())):  # orbax and array_record take no other
            raise ConfigError(f"{flag}: got {value!a}, takes a folder whose whole name is UTF-8")
        there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        if not value or not there.is_dir():
            raise ConfigError(f"{flag}: got {value!r}, takes a folder" + (f", but {there} is a file" if value else ""))
        return path

    def picture(self, given: str | None) -> Path | None:
        """The file that `--out` names, None where it isn't given; ConfigError where no picture can be written there."""
        if given is None:
            return None
        out = Path(given)
        self.folder("--out", str(out.parent))
        if out.is_dir() or out.suffix != ".png":
            raise ConfigError(f"--out: got {given!r}, takes a file that ends in .png")
        return out

    def workdir(self, args: argparse.Namespace) -> Path:
        """The folder that `--workdir` names, which all but `--config.help` needs."""
        if args.workdir is None and not args.config_help:
            self.error("the following arguments are required: --workdir")
        return self.folder("--workdir", args.workdir if args.workdir is not None else ".")

    def trained(self, args: argparse.Namespace, overrides: Sequence[str]) -> Path:
        """The folder of a trained run that `--workdir` names, of whose config nothing is overridden."""
        if overrides:
            raise ConfigError(f"--config.{overrides[0]}: a trained run keeps its config")
        workdir = self.workdir(args)
        if not (workdir / "config.json").is_file():
            raise ConfigError(f"--workdir: {workdir} holds no run (no config.json)")
        return workdir

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The flags, and the overrides as `a.b=value`; `config_help` is True where `--config.help` is among them.

        Raises:
          ConfigError: an unknown flag, a missing or misplaced value.
        """
        args, rest = self.parse_known_args(list(argv))
        overrides = []
        args.config_help = "--config.help" in rest
        rest = [flag for flag in rest if flag != "--config.help"]
        while rest:
            flag, equals, value = rest.pop(0).partition("=")
            if not flag.startswith("--config."):
                flags = [option for action in self._actions for option in action.option_strings]
                raise ConfigError(f"{flag}: no such flag; takes {', '.join(flags)}{nearest(flag, flags)}")
            if not equals:
                if not rest or rest[0].startswith("--"):
                    raise ConfigError(f"{flag}: no value given; takes {flag}=value")
                value = rest.pop(0)
            overrides.append(f"{flag.removeprefix('--config.')}={value}")
        return args, overrides


def main(command: Callable[[Sequence[str]], None]) -> NoReturn:
    """Runs a command on the process's arguments and exits with its code: 0, 1, 2 or 75."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", force=True)
    logging.getLogger(hosts.CHOICES).setLevel(logging.INFO)
    # Before and after the trainer listens to signals itself, SIGTERM ends the program as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        code = exit_code(command, sys.argv[1:])
    except Exception:
        if not hosts.joined():
            raise
        traceback.print_exc()
        code = FAILED
    if code in (FAILED, WRONG_ARGUMENTS) and hosts.joined():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # JAX would wait for the others, which wait for this one or are gone
    sys.exit(code)


def exit_code(command: Callable[[Sequence[str]], None], argv: Sequence[str]) -> int:
    """Runs a command; foreseen failures become one line on stderr and their exit code."""
    try:
        command(argv)
        sys.stdout.flush()
    except (ConfigError, CommandFailed) as error:  # the same in all processes of a run
        code = _say(error, WRONG_ARGUMENTS if isinstance(error, ConfigError) else FAILED)
        hosts.leave()
        return code
    except (WorkdirMismatch, WarmStartError) as error:
        return _say(error, WRONG_ARGUMENTS)
    except Interrupted as error:
        return _say(error, RESUMABLE)
    except KeyboardInterrupt:
        return _say("interrupted; the same command goes on from the last checkpoint", RESUMABLE)
    except BrokenPipeError:  # `| head` closed the pipe; nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ModuleNotFoundError as error:
        if (line := explain(error)) is None:
            raise
        return _say(line, FAILED)
    except FORESEEN as error:
        return _say(error, FAILED)
    return FINISHED


def say(line: str) -> None:
    """One line on stderr, by process 0 alone where there are several."""
    if hosts.is_main():
        print(line, file=sys.stderr, flush=True)


def _say(message: object, code: int) -> int:
    line = " ".join(str(message).split())
    if code == FAILED:  # may be this process's alone
        print(f"error: {hosts.prefix()}{line}", file=sys.stderr, flush=True)
    else:
        say(f"{'stopped' if code == RESUMABLE else 'error'}: {line}")
    return code


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
