"""Checks and times the attention kernels on this machine's device.

See `python -m experiments.device --help`, and `xformer.commands.check_device` for the code.
"""

from xformer.commands import start

if __name__ == "__main__":
    start.run("check_device")
