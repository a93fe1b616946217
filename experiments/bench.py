"""Time and memory of attention against length, every variant beside its peers.

See `python -m experiments.bench --help`, and `xformer.commands.bench` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("bench")
