"""What every attention variant can do, what it costs, and which pairs it sees.

See `python -m experiments.variants --help`, and `xformer.commands.variants` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("variants")
