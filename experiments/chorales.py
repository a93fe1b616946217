"""How a trained model goes on with Bach's chorales, as MIDI and as pictures.

See `python -m experiments.chorales --help`, and `xformer.commands.chorales` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("chorales")
