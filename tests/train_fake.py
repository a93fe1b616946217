"""A tiny model, task and data set, so that training is tested without the other rooms."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from waiting import HANG
from xla_flags import xla_flags

from xformer.train import TrainConfig, Trainer, optimizers

LENGTH, VOCAB = 6, 11
GATED = 6
SIZES = {"train": 40, "validation": 10, "test": 7}


class TinyModel(nnx.Module):
    """Embedding, one hidden layer under dropout, mean over real tokens, two classes."""

    def __init__(self, rngs: nnx.Rngs, dropout_rate: float, dtype: Any) -> None:
        self.embed = nnx.Embed(VOCAB, 8, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(dropout_rate)
        self.norm = nnx.LayerNorm(8, dtype=dtype, rngs=rngs)
        self.classify = nnx.Linear(8, 2, dtype=dtype, rngs=rngs)
        self.scale = jnp.arange(1.0, 2.0)  # an array that is no variable

    def __call__(
        self, inputs: jax.Array, mask: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        x = self.embed(inputs)
        for layer in self.layers:
            x = x + self.dropout(nnx.gelu(layer(x)), deterministic=deterministic, rngs=rngs)
        x = jnp.where(mask[..., None], self.norm(x), 0).sum(1) / jnp.maximum(mask.sum(1, keepdims=True), 1)
        return self.classify(x).astype(jnp.float32) * self.scale


@dataclasses.dataclass(frozen=True)
class FakeTask:
    """Two classes; the loss of an example that holds token `poison` is infinite."""

    poison: int = -1
    better: ClassVar[dict[str, str]] = {"accuracy": "max", "loss": "min"}

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"inputs": batch["inputs"], "mask": batch["inputs"] > 0}

    def metrics(self, outputs: jax.Array, batch: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
        weights = batch["weights"]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["targets"][:, None], axis=1)[:, 0]
        poisoned = jnp.any(batch["inputs"] == self.poison, axis=1)
        losses = losses * jnp.where(poisoned, jnp.inf, 1.0)
        correct = jnp.argmax(outputs, axis=1) == batch["targets"]
        return {"loss": (losses, weights), "accuracy": (correct, weights)}

    def finish(self, sums: Any) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in sums.items()}

    def records(self, outputs: jax.Array, batch: Any) -> dict[str, jax.Array]:
        return {"targets": batch["targets"], "predictions": jnp.argmax(outputs, axis=1)}

    def details(self, records: Any, data: Any) -> dict[str, Any]:
        return {"kept": sorted(records)}

    def baseline(self, data: Any) -> dict[str, Any]:
        return {"name": "answers 0", "scores": {"test": {"accuracy": float(np.mean(data.arrays("test")[1] == 0))}}}


class FakeBatches:
    """Batches by number: which examples a batch holds depends on the seed and its number alone.

    Shard i of n has the i-th of n equal parts of each batch.
    """

    def __init__(
        self,
        data: FakeData,
        split: str,
        batch_size: int,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        shard: tuple[int, int],
    ) -> None:
        self.data, self.split, self.batch_size, self.number = data, split, batch_size, 0
        self.seed, self.shuffle, self.epochs, self.shard = seed, shuffle, epochs, shard

    def __iter__(self) -> FakeBatches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        size = self.data.sizes[self.split]
        index, count = self.shard
        if self.epochs is not None and self.number * count * self.batch_size >= size:
            raise StopIteration
        time.sleep(self.data.pause)
        while self.data.gate and self.split == "train" and self.number >= GATED and not Path(self.data.gate).exists():
            time.sleep(0.01)
        rows = (self.number * count + index) * self.batch_size + np.arange(self.batch_size)
        weights = np.ones(self.batch_size, np.float32)
        if self.epochs is not None:
            weights[rows >= size] = 0
            rows = np.minimum(rows, size - 1)
        epoch, place = np.divmod(rows, size)
        if self.shuffle:
            place = [
                np.random.default_rng([self.seed, e]).permutation(size)[p] for e, p in zip(epoch, place, strict=True)
            ]
        self.number += 1
        inputs, targets = self.data.arrays(self.split)
        return {"inputs": inputs[place], "targets": targets[place], "weights": weights}

    def get_state(self) -> Any:
        return str(self.number).encode() if self.data.bytes_state else {"number": self.number}

    def set_state(self, state: Any) -> None:
        self.number = int(state.decode()) if isinstance(state, bytes) else state["number"]


@dataclasses.dataclass(frozen=True)
class FakeData:
    """Random token sequences; the class is the parity of the first token. Lengths differ.

    `pause`: seconds before each batch; `gate`: a file, until whose appearance there are `GATED` training batches.
    """

    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: dict(SIZES))
    bytes_state: bool = False
    pause: float = 0.0
    gate: str = ""
    info: dict[str, Any] = dataclasses.field(default_factory=lambda: {"majority_accuracy": {"test": 0.5}})

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"sizes": self.sizes}

    def num_examples(self, split: str) -> int:
        return self.sizes[split]

    def facts_by_example(self, split: str) -> dict[str, np.ndarray]:
        return {"length": (self.arrays(split)[0] > 0).sum(axis=1)}

    def arrays(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(sorted(SIZES).index(split))
        inputs = random.integers(1, VOCAB, (self.sizes[split], LENGTH), dtype=np.int32)
        lengths = random.integers(1, LENGTH + 1, self.sizes[split])
        inputs[np.arange(LENGTH) >= lengths[:, None]] = 0
        return inputs, inputs[:, 0] % 2

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> FakeBatches:
        return FakeBatches(self, split, batch_size, seed, shuffle, epochs, (shard_index, shard_count))

    def save(self, directory: Path) -> None:
        (Path(directory) / "preprocessing.txt").write_text("the class is the parity of the first token\n")


def make_trainer(
    workdir: str | Path,
    *,
    dropout_rate: float = 0.2,
    seed: int = 3,
    schedule: str = "cosine",
    data: FakeData | None = None,
    task: FakeTask | None = None,
    dtype: Any = jnp.float32,
    callbacks: Any = (),
    model_fn: Any = None,
    **settings: Any,
) -> Trainer:
    """A trainer of ten steps of eight examples on one device unless `settings` say otherwise."""
    defaults = {"num_steps": 10, "batch_size": 8, "eval_every": 4, "checkpoint_every": 3, "log_every": 2}
    settings = defaults | {"mesh": {"data": 1}} | settings
    train = TrainConfig(**settings)
    optimizer, rate = optimizers.build(
        learning_rate=0.01,
        schedule=schedule,
        warmup_steps=2,
        weight_decay=0.1,
        clip_norm=1.0,
        num_steps=train.num_steps,
    )
    return Trainer(
        model_fn=model_fn or (lambda rngs: TinyModel(rngs, dropout_rate, dtype)),
        data=data or FakeData(),
        task=task or FakeTask(),
        optimizer=optimizer,
        schedule=rate,
        train=train,
        workdir=Path(workdir),
        seed=seed,
        name="fake",
        attention="none",
        callbacks=callbacks,
        config={
            "seed": seed,
            "optimizer": {"schedule": schedule},
            "model": {"dropout_rate": dropout_rate},
            "train": dataclasses.asdict(train),
        },
    )


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Compiles each program once for all tests of training and their processes; the folder."""
    folder = str(tmp_path_factory.getbasetemp() / "compile-cache")
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


def start_process(workdir: Path, cache: str, devices: int = 1, **arguments: Any) -> subprocess.Popen:
    """Starts `make_trainer(workdir, **arguments).fit()` in a process of its own; see train_process.py."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent.parent),  # this checkout, whatever is installed
        "XLA_FLAGS": xla_flags(devices),
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    script = Path(__file__).with_name("train_process.py")
    command = [sys.executable, "-W", "error", str(script), json.dumps({"workdir": str(workdir), **arguments})]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=script.parent.parent
    )


def run_process(workdir: Path, cache: str, devices: int = 1, **arguments: Any) -> tuple[int, str]:
    """(exit code, what was printed) of `start_process`, run to its end."""
    process = start_process(workdir, cache, devices, **arguments)
    output, errors = process.communicate(timeout=HANG)
    return process.returncode, output + errors


def rows(workdir: Path, split: str | None = None) -> list[dict[str, Any]]:
    """Rows of the metrics file without their times, which no two runs share."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in lines if split in (None, row["split"])]


def arrays(workdir: Path, step: int) -> list[np.ndarray]:
    """Every array of a checkpoint: parameters, other variables, optimizer, step."""
    folder = (workdir / "checkpoints" / str(step)).absolute()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        trees = []
        for part in ("model", "optimizer"):
            stored = checkpointer.metadata(folder / part).item_metadata.tree
            target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), stored)
            trees.append(checkpointer.restore(folder / part, args=ocp.args.StandardRestore(target)))
    return [np.asarray(x) for x in jax.tree.leaves(trees)]
