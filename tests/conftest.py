"""Eight simulated CPU devices and quick compilation for every test: the flags must be set before JAX starts."""

import os

from xla_flags import xla_flags

os.environ["XLA_FLAGS"] = xla_flags(8)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """A process has 65,530 memory maps, a compiled program up to 100: the whole suite in one process would abort."""
    yield
    jax.clear_caches()
