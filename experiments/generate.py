"""How a trained language model goes on with a text.

See `python -m experiments.generate --help`, and `xformer.commands.generate` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("generate")
