"""Runs the tiny trainer in a process of its own: `python tests/train_process.py '{"workdir": ..., ...}'`.

Prints what ended it; exits with 0 when finished, 75 when interrupted, 1 otherwise. `pause`, `gate`: of the data;
`file_size_limit`: bytes that a file may have from now on, as if the disk were full; `hosts`: arguments of
`jax.distributed.initialize`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import jax
from train_fake import FakeData, make_trainer

from xformer.train import Interrupted


def main(arguments: dict[str, Any]) -> int:
    hosts = arguments.pop("hosts", None)
    if hosts is not None:
        jax.distributed.initialize(**hosts)
    data = FakeData(pause=arguments.pop("pause", 0.0), gate=arguments.pop("gate", ""))
    limit = arguments.pop("file_size_limit", None)
    trainer = make_trainer(**arguments, data=data)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        trainer.fit()
    except Interrupted as interrupted:
        print(interrupted, flush=True)
        return 75
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        if hosts is not None:
            os._exit(1)  # JAX would wait for the lost process to say goodbye
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
