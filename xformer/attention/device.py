"""The device that a program is made for: what the choice of kernels and of tile sizes needs to know of it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device and how many of them JAX computes on.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the name that the maker gives it, as in `jax.devices()[0].device_kind`.
      driver: versions of what drives it, in one line; empty where nobody says.
      capability: (major, minor) of an NVIDIA GPU; None on all others.
      count: devices that JAX computes on, over all processes.
      processes: of one program; all of them must choose alike.
    """

    platform: str
    kind: str
    driver: str = ""
    capability: tuple[int, int] | None = None
    count: int = 1
    processes: int = 1

    @property
    def made_for_half(self) -> bool:
        """Whether it has units for bfloat16 that float32 does not use: TPUs, and NVIDIA GPUs from Ampere on."""
        return self.platform == "tpu" or (self.capability is not None and self.capability >= (8, 0))

    @property
    def key(self) -> dict[str, str]:
        """What a table of checks and times is valid for."""
        return {"kind": self.kind, "driver": self.driver, **versions()}


_aimed = contextvars.ContextVar[Device | None]("aimed", default=None)


@contextlib.contextmanager
def aimed_at(device: Device) -> Iterator[None]:
    """Within it implementations are chosen for another device than the one at hand, as `jax.export` may want.

    A function that was traced before keeps what was chosen for it then.
    """
    token = _aimed.set(device)
    try:
        yield
    finally:
        _aimed.reset(token)


def present() -> Device:
    """The device that calls are traced for: the first of JAX's, or what `jax.default_device` or `aimed_at` names."""
    aimed, default = _aimed.get(), getattr(jax.config, "jax_default_device", None)
    if aimed is not None:
        return aimed
    if isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return _describe(jax.local_devices()[0] if default is None else default)


@functools.cache
def _describe(device: jax.Device) -> Device:
    capability = getattr(device, "compute_capability", None) if "cuda" in device.client.platform_version else None
    return Device(
        "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform,
        device.device_kind,
        _driver(device),
        None if capability is None else tuple(int(part) for part in str(capability).split(".")[:2]),  # type: ignore
        jax.device_count(),
        jax.process_count(),
    )


def _driver(device: Any) -> str:
    known = [" ".join(str(device.client.platform_version).split())]
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    if device.platform in ("gpu", "cuda") and (found := re.search(r"\b\d{3,}(\.\d+)+\b", text)):
        known.append(f"driver {found[0]}")
    return ", ".join(known)[:200]


@functools.cache
def versions() -> dict[str, str]:
    """Versions of JAX and of this package, and a checksum of the kernels' source, which changes between releases."""
    try:
        own = importlib.metadata.version("xformer-jax")
    except importlib.metadata.PackageNotFoundError:
        own = "source"
    source = b"".join(path.read_bytes() for path in sorted((Path(__file__).parent / "kernels").glob("*.py")))
    return {"jax": jax.__version__, "xformer": own, "kernels": f"{zlib.crc32(source):08x}"}
