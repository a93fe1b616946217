"""The console command `xformer`, which finds shipped configs from any folder: `COMMANDS` says what it can do."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import NoReturn

from xformer import shipped
from xformer.checks import did_you_mean
from xformer.commands import start

COMMANDS = {
    "run": "train and evaluate one experiment",
    "compare": "train every variant of a comparison and write the report",
    "predict": "what a trained model says of texts in files",
    "generate": "how a trained language model goes on with a text",
    "chorales": "how a trained model goes on with Bach's chorales, as MIDI and as pictures",
    "data": "what data there is, making it, and what it is like",
    "inspect": "shapes, parameters, FLOPs and attention pattern of an experiment; trains nothing",
    "scaling": "laws of loss by size, data and compute, fitted to the runs of comparisons",
    "variants": "what every attention variant can do, what it costs, and which pairs it sees",
    "bench": "time and memory of attention against length",
    "check-device": "checks and times the attention kernels on this machine's GPU or TPU, and keeps what it finds",
}
USAGE = """usage: xformer COMMAND [flags]      xformer COMMAND --help says which

{commands}

--config takes a file (path.py, path.py:ARGUMENT, a run's config.json) or the name of a config that comes with xformer:

  {configs}

as in: xformer run --config=listops:bigbird --workdir=runs/a"""


def main() -> NoReturn:
    """Runs the command that the first argument names; exits with its code."""
    # Nothing slow is imported before the command is known: JAX alone takes a second.
    name, *rest = sys.argv[1:] or [""]
    if name == "--version":
        print(f"xformer-jax {importlib.metadata.version('xformer-jax')}")
        sys.exit(0)
    if name in ("--help", "-h", "help", ""):
        print(usage(), file=sys.stdout if name else sys.stderr)
        sys.exit(0 if name else 2)
    if name not in COMMANDS:
        print(
            f"error: got {name!r}, takes a command: {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.argv = [f"xformer {name}", *rest]  # argparse names the program by it
    start.run(name.replace("-", "_"))


def usage() -> str:
    """What `xformer --help` prints."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name.ljust(width)}  {what}" for name, what in COMMANDS.items())
    return USAGE.format(commands=commands, configs=", ".join(shipped.names()))
