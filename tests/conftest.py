"""Eight simulated CPU devices for every test: the flag must be set before JAX starts."""

import os

flag = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """A process has 65,530 memory maps, a compiled program up to 100: the whole suite in one process would abort."""
    yield
    jax.clear_caches()
