"""Train and evaluate one experiment.

See `python -m experiments.run --help`, and `xformer.commands.run` for the code.
"""

from xformer.commands.main import run

if __name__ == "__main__":
    run("run")
