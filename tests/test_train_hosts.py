"""A run over two processes of four devices each, talking over loopback."""

import signal

import numpy as np
import pytest
from train_fake import arrays, compile_cache, make_trainer, rows, start_process  # noqa: F401
from waiting import HANG, free_port, has_rows, wait_for

SETTINGS = {"mesh": {"data": 2, "fsdp": 4}, "dropout_rate": 0.2, "log_every": 1}


def start_both(workdir, cache, **settings):
    address = f"localhost:{free_port()}"
    hosts = [{"coordinator_address": address, "num_processes": 2, "process_id": i} for i in range(2)]
    # JAX writes what is compiled from the first process alone, not all at once: the other could read half a file.
    caches = (cache, "")
    return [start_process(workdir, c, 4, hosts=h, **SETTINGS, **settings) for c, h in zip(caches, hosts, strict=True)]


def test_two_processes_stop_together_and_end_like_one_process(tmp_path, compile_cache):  # noqa: F811
    make_trainer(tmp_path / "one", **SETTINGS | {"mesh": {"data": 1}}).fit()
    workdir = tmp_path / "two"

    gate = tmp_path / "gate"  # the signal comes while there are steps left, however busy the machine
    both = start_both(workdir, compile_cache, gate=str(gate))
    wait_for(lambda: has_rows(workdir, 2), both[0])
    both[1].send_signal(signal.SIGTERM)
    gate.touch()
    outputs = ["".join(process.communicate(timeout=HANG)) for process in both]
    assert [process.returncode for process in both] == [75, 75], outputs
    lines = {next(line for line in output.splitlines() if "stopped after step" in line) for output in outputs}
    assert len(lines) == 1, outputs

    make_trainer(workdir, **SETTINGS | {"mesh": {"data": 1}}).fit()  # one process goes on for the two
    for one, two in zip(rows(tmp_path / "one"), rows(workdir), strict=True):
        assert (one["step"], one["split"], one["examples"]) == (two["step"], two["split"], two["examples"])
        assert two["loss"] == pytest.approx(one["loss"], rel=2e-5)
    for one, two in zip(arrays(tmp_path / "one", 10), arrays(workdir, 10), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)
