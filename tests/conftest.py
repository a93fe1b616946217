"""Eight simulated CPU devices and quick compilation for every test: the flags must be set before JAX starts."""

import collections
import os
import zlib

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
    """Of a test marked `sampled(n)`, n cases all over its table are for `make test`, the others for `make test-full`.

    So the time of `make test` stays as it is when a variant joins the table. Where the first case stands differs from
    test to test, so that together they see every row.
    """
    tests = collections.defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and item.get_closest_marker("full") is None:
            tests[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (test, wanted), cases in tests.items():
        kept = spread(len(cases), wanted, zlib.crc32(test.encode()))
        for number, item in enumerate(cases):
            if number not in kept:
                item.add_marker("full")


def spread(total, wanted, seed):
    """`wanted` of the numbers below `total`, or all if there are fewer, evenly spread from where the seed says."""
    return {(seed + index * total // wanted) % total for index in range(wanted)}
