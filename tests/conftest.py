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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `sampled(n)` each n-th case is for `make test`; the others are for `make test-full`."""
    seen = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None or item.get_closest_marker("full") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        number = seen[test] = seen.get(test, -1) + 1
        if number % mark.args[0]:
            item.add_marker("full")
