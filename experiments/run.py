"""Train and evaluate one experiment.

See `python -m experiments.run --help`, and `xformer.commands.run` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("run")
