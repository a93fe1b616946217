"""What a trained model says of texts in files.

See `python -m experiments.predict --help`, and `xformer.commands.predict` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("predict")
