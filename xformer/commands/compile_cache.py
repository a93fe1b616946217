"""Keeps what XLA compiled in a comparison's workdir, for the processes that go on with it or add runs to it."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from xformer.bench import machine

FOLDER, DIRECTORY = "compiled", "jax_compilation_cache_dir"
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextlib.contextmanager
def kept(workdir: Path) -> Iterator[None]:
    """While this is open, programs are compiled once for all processes of a comparison.

    They lie in a folder of the processor's own, since programs for a CPU run on its kind only; it may be deleted at any
    time. A user's own setting (`JAX_COMPILATION_CACHE_DIR`) stays.
    """
    folder = workdir / FOLDER / f"{zlib.crc32(machine.cpu().encode()):08x}"
    settings = {DIRECTORY: str(folder.absolute()), **SETTINGS}
    before = {name: getattr(jax.config, name) for name in settings}
    if before[DIRECTORY] is not None:
        yield
        return
    compilation_cache.reset_cache()  # else what was compiled before decides that there is none
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
