"""Shapes, parameters and FLOPs of every layer of an experiment, and its attention pattern as a picture. Trains nothing.

See `python -m experiments.inspect --help`, and `xformer.commands.inspect` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("inspect")
