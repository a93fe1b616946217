"""Eight simulated CPU devices and quick compilation for every test: the flags must be set before JAX starts."""

import collections
import itertools
import os
import zlib
from pathlib import Path

from xla_flags import xla_flags

os.environ["XLA_FLAGS"] = xla_flags(8)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

TESTS = itertools.count()
MOST_MAPS = 40_000  # memory maps of a process, of which Linux allows 65,530


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """A compiled program takes up to 100 memory maps: the whole suite in one process would abort."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _forget_them_sooner():
    """So would one file that compiles hundreds of programs; looked at after every tenth test."""
    yield
    maps = Path("/proc/self/maps")
    if next(TESTS) % 10 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `sampled(n)`, n cases all over its table are for `make test`, the others for `make test-full`.

    So the time of `make test` stays as it is when a variant joins the table. Where the first case stands differs from
    test to test, so that together they see every row. Of the tests for `make test-full`, every eighth is marked
    `optimized`: it runs the code that users run, the others are compiled as quickly as those of `make test`. Each is of
    the `first_half` or the `second_half`, so that a slow machine may run one of them.
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
    for item in items:
        if item.get_closest_marker("full") is not None:
            number = zlib.crc32(item.nodeid.encode())
            item.add_marker("first_half" if number % 2 else "second_half")
            if number // 2 % 8 == 0:
                item.add_marker("optimized")


def spread(total, wanted, seed):
    """`wanted` of the numbers below `total`, or all if there are fewer, evenly spread from where the seed says."""
    return {(seed + index * total // wanted) % total for index in range(wanted)}
