"""Train every variant of a comparison with every seed, and write the report.

See `python -m experiments.compare --help`, and `xformer.commands.compare` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("compare")
