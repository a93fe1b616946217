"""What data there is, making it, and what it is like.

See `python -m experiments.data --help`, and `xformer.commands.data` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("data")
