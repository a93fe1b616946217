"""Whole training steps, each contender in a process of its own, which takes a step when it is told to.

So memory is that of one contender alone, and steps are still taken in turn, one process at a time. The C library
allocates as it does by default for all of them, without the huge pages that our commands ask for. To serve one:

    python -m benchmarks.train_steps CONTENDER BATCH LENGTH      # each line on stdin: one step, its seconds on stdout
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

COMMAND = (sys.executable, "-m", "benchmarks.train_steps")


# Of ours and of the peers: the functions of `our_steps` and `peer_steps` that make them, imported in their process.
OURS = {"decoder": "decoder", "vision": "vision", "translation": "encoder_decoder"}
PEERS = {"GPT-2": "gpt2", "ViT": "vit", "Marian": "marian"}
ENCODERS = {"BERT": "bert", "BigBird": "big_bird", "Longformer": "longformer", "Nystromformer": "nystromformer",
            "Reformer": "reformer"}  # fmt: skip


def step_of(contender: str, batch: int, length: int) -> Callable[[], float]:
    """What takes a training step of "xformer NAME", an attention or a key of `OURS`, or of "Hugging Face NAME".

    `length` is in tokens, or the side of an image in pixels. The step returns its loss.
    """
    if contender.startswith("xformer "):
        from benchmarks import our_steps

        name = contender.removeprefix("xformer ")
        make = getattr(our_steps, OURS[name]) if name in OURS else our_steps.encoder(name)
        return our_steps.take(make(batch, length))
    from benchmarks import peer_steps

    name = contender.removeprefix("Hugging Face ")
    body = ENCODERS.get(name)
    there = getattr(peer_steps, PEERS[name]) if body is None else peer_steps.classifier(getattr(peer_steps, body))
    return peer_steps.take(there(batch, length))


def serve(contender: str, batch: int, length: int) -> None:
    """Takes a step for each line on stdin and answers with its seconds, its loss and the process's peak memory."""
    step = step_of(contender, batch, length)
    for _ in sys.stdin:
        started = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_bytes": peak}), flush=True)


def side_by_side(sizes: Mapping[str, tuple[str, int, int]], steps: int) -> dict[str, dict[str, Any]]:
    """Steps taken in turn by one process for each of (contender, batch, length); the first, which compiles, untimed.

    Returns for each name `seconds` (a list), `losses` and `peak_bytes`: the process's, imports and compiler included.
    """
    processes = {
        name: subprocess.Popen([*COMMAND, *map(str, size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, size in sizes.items()
    }
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "losses": []} for name in sizes}
    try:
        for turn in range(steps + 1):
            for name, process in processes.items():
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write("step\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"{name}: its process ended with exit code {process.wait()}")
                answer = json.loads(line)
                found[name]["losses"].append(answer["loss"])
                found[name]["peak_bytes"] = answer["peak_bytes"]
                if turn:
                    found[name]["seconds"].append(answer["seconds"])
    finally:
        for process in processes.values():
            with process:  # closes its pipes and waits
                process.kill()
    return found


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
