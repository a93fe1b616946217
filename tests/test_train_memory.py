"""The memory that a step needs is held against what there is before the step runs."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from train_fake import compile_cache, make_trainer  # noqa: F401

from xformer.commands import start
from xformer.train import OutOfMemory, memory

GIB = 2**30


class Card:
    device_kind = "H200"

    def __init__(self, limit):
        self.limit = limit

    def memory_stats(self):
        return {"bytes_limit": self.limit}


def test_a_plan_is_that_of_the_compiler():
    compiled = jax.jit(lambda x: x @ x.T).lower(jnp.ones((64, 32))).compile()
    plan = memory.Plan.of(compiled)
    assert plan.arguments == 64 * 32 * 4 and plan.beside >= 64 * 64 * 4 and plan.total == plan.arguments + plan.beside


@pytest.mark.parametrize(("limits", "fits"), [([8 * GIB], True), ([4 * GIB], True), ([8 * GIB, 4 * GIB - 1], False)])
def test_a_step_that_no_device_has_room_for_is_refused(limits, fits, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Card(limit) for limit in limits])
    plan = memory.Plan(GIB, 3 * GIB)
    if fits:
        return memory.check("training step", plan)
    with pytest.raises(OutOfMemory) as error:
        memory.check("training step", plan)
    message = str(error.value)
    assert message.startswith("the training step needs 4 GiB of each device, and JAX may take 4 GiB on H200")
    assert (
        "train.batch_size" in message
        and "model.remat=True" in message
        and "fsdp in train.mesh" in message
        and "\n" not in message
    )


def test_a_run_that_does_not_fit_ends_before_its_first_step(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path / "work")
    monkeypatch.setattr("xformer.train.memory.jax.local_devices", lambda: [Card(1000)])
    with pytest.raises(OutOfMemory, match="the training step needs"):
        trainer.fit()


@pytest.mark.parametrize("free", [None, GIB, GIB // 4])
def test_a_cpu_that_is_short_of_memory_is_a_warning(free, monkeypatch, caplog):
    monkeypatch.setattr(memory, "available", lambda: free)
    monkeypatch.setattr(jax, "local_devices", lambda: [type("Cpu", (), {"memory_stats": lambda self: None})()] * 2)
    memory.check("evaluation step", memory.Plan(5 * GIB, GIB // 4))
    assert ("needs 0.5 GiB of this machine, which has 0.25 GiB left" in caplog.text) == (free == GIB // 4)
    assert ("train.eval_batch_size" in caplog.text) == (free == GIB // 4)


HUGE = """
import re
from xformer.commands import start
start.use_huge_pages()
import numpy as np
block = np.ones(2**25)
print(re.search(r"AnonHugePages: *(\\d+)", open("/proc/self/smaps_rollup").read())[1])
"""


@pytest.mark.skipif(not start.gives_huge_pages(), reason="this system does not give huge pages to those that ask")
@pytest.mark.parametrize(
    ("own", "before", "huge"),
    [({}, "", True), ({"MALLOC_ARENA_MAX": "2"}, "", False), ({}, "import sys; sys.settrace(lambda *a: None)", False)],
    ids=["plain", "environment", "debugger"],
)
def test_large_blocks_have_huge_pages(own, before, huge):
    """Else the system maps a step's memory anew in pages of 4 KiB; what the environment says of it comes first."""
    env = {name: x for name, x in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))}
    command = [sys.executable, "-c", before + HUGE]
    out = subprocess.run(
        command, env=env | own | {"NUMPY_MADVISE_HUGEPAGE": "0"}, capture_output=True, text=True, check=True
    ).stdout
    assert (int(out) > 200 * 1024) == huge, "a block of 256 MiB"
