"""Whole training steps, each contender in a process of its own, which takes a step when it is told to.

So memory is that of one contender alone, and steps are still taken in turn, one process at a time:

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

import numpy as np

LAYERS, WIDTH, HEADS, MLP_DIM, BLOCK, VOCAB, CLASSES = 4, 512, 8, 1024, 64, 256, 10
LEARNING_RATE = 1e-5  # so small that the loss stays away from zero, and gradients from numbers that CPUs are slow at

COMMAND = (sys.executable, "-m", "benchmarks.train_steps")


def xformer_step(name: str, batch: int, length: int) -> Callable[[], float]:
    """A step of xformer's encoder with Optax's Adam; returns the loss."""
    import jax

    from xformer.train import memory

    run, state, *rest = compiled_step(name, batch, length)
    memory.release()  # as the trainer does, which keeps the trace for batches of other shapes

    def take() -> float:
        *state[:], value = run(*state, *rest)
        jax.block_until_ready(state)
        return float(value)

    return take


def compiled_step(name: str, batch: int, length: int) -> tuple[Any, list[Any], Any, np.ndarray, np.ndarray]:
    """`step(*state, rest, inputs, labels)`, compiled, and its arguments."""
    import jax
    import optax
    from flax import nnx

    from xformer.attention import ATTENTIONS
    from xformer.models import EncoderClassifier

    model = EncoderClassifier(
        VOCAB, CLASSES, length, attention=ATTENTIONS[name](), num_layers=LAYERS, width=WIDTH, num_heads=HEADS,
        mlp_dim=MLP_DIM, rngs=nnx.Rngs(0),
    )  # fmt: skip
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(LEARNING_RATE)
    state = [params, jax.jit(optimizer.init)(params)]
    del model, params

    def loss(params: Any, rest: Any, inputs: Any, labels: Any) -> Any:
        logits = nnx.merge(graph, params, rest)(inputs, deterministic=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params: Any, moments: Any, rest: Any, inputs: Any, labels: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, rest, inputs, labels)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    inputs, labels = data(batch, length)
    run = jax.jit(step, donate_argnums=(0, 1)).lower(*state, rest, inputs, labels).compile()
    return run, state, rest, inputs, labels


def hugging_face_step(name: str, batch: int, length: int) -> Callable[[], float]:
    """A step of a Transformers model of the same sizes, mean-pooled likewise, with PyTorch's Adam; the loss."""
    import torch
    from transformers import BertConfig, BertModel, BigBirdConfig, BigBirdModel

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": MLP_DIM, "max_position_embeddings": length, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "full":
        body: Any = BertModel(BertConfig(**sizes, attn_implementation="sdpa"), add_pooling_layer=False)
    else:
        config = BigBirdConfig(**sizes, attention_type="block_sparse", block_size=BLOCK, num_random_blocks=3)
        body = BigBirdModel(config, add_pooling_layer=False)
    head = torch.nn.Linear(WIDTH, CLASSES)
    body.train()
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=LEARNING_RATE)
    inputs, labels = (torch.tensor(x, dtype=torch.long) for x in data(batch, length))

    def take() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = head(body(input_ids=inputs).last_hidden_state.mean(1))
        loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return take


def data(batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (none is Transformers' padding id 0) and labels."""
    rng = np.random.default_rng(0)
    return rng.integers(1, VOCAB, (batch, length), np.int32), rng.integers(0, CLASSES, batch, np.int32)


CONTENDERS: dict[str, tuple[Callable[[str, int, int], Callable[[], float]], str]] = {
    "xformer full": (xformer_step, "full"),
    "xformer bigbird": (xformer_step, "bigbird"),
    "Hugging Face BERT": (hugging_face_step, "full"),
    "Hugging Face BigBird": (hugging_face_step, "bigbird"),
}


def serve(contender: str, batch: int, length: int) -> None:
    """Takes a step for each line on stdin and answers with its seconds, its loss and the process's peak memory."""
    make, name = CONTENDERS[contender]
    step = make(name, batch, length)
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
