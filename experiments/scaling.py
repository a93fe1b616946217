"""Scaling laws fitted to the runs of comparisons.

See `python -m experiments.scaling --help`, and `xformer.commands.scaling` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("scaling")
