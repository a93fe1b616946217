"""The pieces of a training step as calls to time, served by a process of their own: see `benchmarks.step`.

    python benchmarks/step_pieces.py SIZE PIECE,PIECE,...     # each line on stdin, a piece's name: one call of it

Only `xformer` is imported, from wherever PYTHONPATH finds it, so pieces of two commits can be set side by side.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

STARTED = time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batch."""

    batch: int
    length: int
    layers: int
    width: int
    heads: int
    mlp_dim: int
    vocab: int
    classes: int
    block: int
    dropout: float = 0.0


SIZES = {
    "small": Size(16, 1024, 2, 64, 2, 128, 1024, 2, 32),
    "dropout": Size(16, 1024, 2, 64, 2, 128, 1024, 2, 32, dropout=0.3),
    "wide": Size(1, 4096, 4, 512, 8, 1024, 256, 10, 64),
    "short": Size(4, 1024, 4, 512, 8, 1024, 256, 10, 32),
    "tiny": Size(2, 64, 1, 16, 2, 16, 32, 2, 16),  # for tests
}
OPS = ("floor", "full", "bigbird", "linformer")
PIECES = (
    "gemm", "feed_forward", "norm", "embedding", "loss", "optimizer",
    *(f"{kind}_{op}" for kind in ("attention", "block", "step") for op in OPS),
)  # fmt: skip
Made = tuple[Callable[[], Any], int]  # what runs a piece once and waits for it, and its FLOPs


def attention(name: str, size: Size) -> Any:
    """The op; `floor` is attention of each token to itself alone, hardly any at all."""
    from xformer.attention import BigBird, Full, Linformer, Window

    if name == "bigbird":
        return BigBird(block_size=size.block, num_random_blocks=3, num_window_blocks=3, num_global_blocks=2)
    if name == "linformer":
        return Linformer(rank=min(256, size.length), max_len=size.length)
    return Window(left=0, right=0) if name == "floor" else Full()


def both_ways(function: Callable[..., Any], *args: Any) -> Made:
    """A function and its gradient to all of `args`, from one given gradient of its result."""
    import jax
    import jax.numpy as jnp

    from xformer.cost import count

    out = jax.eval_shape(function, *args)
    given = jax.tree.map(lambda x: jax.random.normal(jax.random.key(9), x.shape, jnp.float32).astype(x.dtype), out)

    def run(args: Any, given: Any) -> Any:
        out, back = jax.vjp(function, *args)
        return out, back(given)

    compiled = jax.jit(run)
    return lambda: jax.block_until_ready(compiled(args, given)), count(run, args, given).flops


def layer(module: Any, size: Size) -> Made:
    """A layer on random `[batch, length, width]`, with gradients to its parameters and to its input."""
    import jax
    from flax import nnx

    graph, params, rest = nnx.split(module, nnx.Param, ...)
    x_BxTxW = jax.random.normal(jax.random.key(1), (size.batch, size.length, size.width))
    return both_ways(lambda params, x: nnx.merge(graph, params, rest)(x), params, x_BxTxW)


def make(piece: str, size: Size) -> Made:
    """The piece of that name."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from xformer import nn
    from xformer.bench.machine import gemm
    from xformer.nn.norm import LayerNorm

    kind, _, name = piece.rpartition("_")
    rngs = nnx.Rngs(0)
    if piece == "gemm":
        return gemm()
    if piece == "feed_forward":
        return layer(nn.FeedForward(size.width, size.mlp_dim, rngs=rngs), size)
    if piece == "norm":
        return layer(LayerNorm(size.width, rngs=rngs), size)
    if piece == "embedding":
        graph, params = nnx.split(nn.TokenEmbedding(size.vocab, size.width, rngs=rngs))
        tokens = jnp.asarray(data(size)["inputs"])
        return both_ways(lambda params: nnx.merge(graph, params)(tokens), params)
    if piece == "loss":
        return loss(size)
    if piece == "optimizer":
        params = nnx.split(model(attention("floor", size), size)(rngs), nnx.Param, ...)[1]
        optimizer = optax.adamw(1e-4)
        update = jax.jit(lambda grads, moments: optimizer.update(grads, moments, params))
        moments = optimizer.init(params)
        return lambda: jax.block_until_ready(update(params, moments)), 0
    op = attention(name, size)
    if kind == "attention":
        shape = (size.batch, size.length, size.heads, size.width // size.heads)
        inputs = [jax.random.normal(jax.random.key(seed), shape) for seed in range(3)]
        fn = nn.AttentionFn(op, num_heads=size.heads, head_dim=shape[-1], rngs=rngs)
        return both_ways(lambda *qkv: fn(*qkv), *inputs)
    if kind == "block":
        return layer(nn.EncoderBlock(size.width, size.heads, size.mlp_dim, attention_fn=op, rngs=rngs), size)
    return step(op, size)


def loss(size: Size) -> Made:
    """From the last layer's output: the mean over tokens, the logits and all that the task makes of them."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from xformer.nn import masked_mean
    from xformer.train.sums import reduce

    batch = jax.tree.map(jnp.asarray, data(size))
    graph, params = nnx.split(nnx.Linear(size.width, size.classes, rngs=nnx.Rngs(0)))
    x_BxTxW = jax.random.normal(jax.random.key(1), (size.batch, size.length, size.width))

    def value(params: Any, x: Any) -> Any:
        logits = nnx.merge(graph, params)(masked_mean(x, batch["inputs"] > 0))
        sums = reduce(task().metrics(logits, batch))
        return sums["loss"][0], sums

    run = jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))
    return lambda: jax.block_until_ready(run(params, x_BxTxW)), 0


def model(op: Any, size: Size) -> Callable[[Any], Any]:
    from xformer.models import EncoderClassifier

    return lambda rngs: EncoderClassifier(
        size.vocab, size.classes, size.length, attention=op, num_layers=size.layers, width=size.width,
        num_heads=size.heads, mlp_dim=size.mlp_dim, dropout_rate=size.dropout, rngs=rngs,
    )  # fmt: skip


def task() -> Any:
    """Classification of texts, as far as a step needs it."""
    from xformer.tasks.classification import Classification

    class Texts(Classification):
        def inputs(self, batch: Any) -> Any:
            return {"inputs": batch["inputs"], "mask": batch["inputs"] > 0}

    return Texts()


def data(size: Size) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    inputs = rng.integers(1, size.vocab, (size.batch, size.length), np.int32)
    targets = rng.integers(0, size.classes, size.batch, np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones(size.batch, np.float32)}


def step(op: Any, size: Size) -> Made:
    """The runner's own step, from a batch in the host's memory to the report."""
    import jax

    from xformer.train import TrainConfig, optimizers
    from xformer.train.engine import Engine

    started = time.perf_counter()
    # A rate so small that the loss stays away from zero, and gradients from numbers that CPUs are slow at.
    optimizer, schedule = optimizers.build("adamw", 1e-5, num_steps=1000)
    config = TrainConfig(num_steps=1000, batch_size=size.batch)
    engine = Engine(model(op, size), task(), optimizer, schedule, config, 0)
    state, batch = [engine.init()], data(size)
    built = time.perf_counter() - started
    flops, _ = engine.flops(batch)

    def take() -> None:
        state[0], report = engine.step(state[0], batch)
        jax.block_until_ready((state[0], report))

    COMPILING.clear()
    take()
    compiling = sum(COMPILING)
    STARTUP.setdefault("build", built)
    STARTUP.setdefault("trace", engine.train_step.seconds - compiling)
    STARTUP.setdefault("compile", compiling)
    MEMORY.append(engine.train_step.peak_bytes or 0)
    return take, flops


COMPILING: list[float] = []  # seconds of each compilation
MEMORY: list[int] = []  # planned bytes of each whole step
STARTUP: dict[str, float] = {}  # of the first whole step


def serve(size: Size, pieces: list[str]) -> None:
    """Sets pieces up and says what is known of them; then runs one for each line on stdin."""
    import jax

    import xformer.experiment  # noqa: F401  what a run imports
    from xformer.bench import machine

    STARTUP["import"] = time.perf_counter() - STARTED
    compiled = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: COMPILING.append(seconds) if event == compiled else None
    )
    run, flops, planned = {}, {}, {}
    for piece in pieces:
        run[piece], flops[piece] = make(piece, size)
        run[piece]()
        if piece.startswith("step_"):
            planned[piece] = MEMORY[-1]
    known = {"flops": flops, "startup": STARTUP, "planned_bytes": planned, "machine": machine.describe()}
    print(json.dumps(known), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        run[line.strip()]()
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    serve(SIZES[sys.argv[1]], sys.argv[2].split(","))
