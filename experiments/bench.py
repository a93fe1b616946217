"""Time and memory of attention against length, every variant beside its peers.

See `python -m experiments.bench --help`, and `xformer.commands.bench` for the code.
"""

from xformer.commands.main import run

if __name__ == "__main__":
    run("bench")
