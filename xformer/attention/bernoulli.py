"""Dropout's masks on CPUs: those that JAX draws, in a fraction of its time."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def bernoulli(key: Array, p: float, shape: tuple[int, ...]) -> Array:
    """`jax.random.bernoulli(key, p, shape)`, bit for bit: bool, True with probability `p`.

    On CPUs JAX draws by a loop whose passes each read and write arrays as large as the mask, which is quick to compile.
    Here the rounds are written out, so that the mask is drawn in registers where it is used. Elsewhere, and with other
    generators than JAX's default, it is JAX's own.
    """
    if not _written_out(key, shape):
        return jax.random.bernoulli(key, p, shape)
    draw: Any = jax.lax.platform_dependent
    return draw(key, cpu=lambda key: _bernoulli(key, p, shape), default=lambda key: jax.random.bernoulli(key, p, shape))


def _written_out(key: Array, shape: tuple[int, ...]) -> bool:
    config: Any = jax.config
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    generator = str(jax.random.key_impl(key)) if typed else config.jax_default_prng_impl
    if generator != "threefry2x32" or not config.jax_threefry_partitionable:
        return False
    known = all(isinstance(size, int) for size in shape)  # a size that `jax.export` leaves open is not
    return known and math.prod(shape) < 2**32


def _bernoulli(key: Array, p: float, shape: tuple[int, ...]) -> Array:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    count = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        count = count * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    high, low = threefry(words, jnp.zeros_like(count), count)
    # The mantissa of a number from 1 to 2.
    mantissa = ((high ^ low) >> np.uint32(9)) | np.float32(1).view(np.uint32)
    return jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1 < np.float32(p)


def threefry(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, section 3.3) of the counts `high`, `low` under `key` `[2]`.

    All are uint32; both results have the shape of the counts.
    """
    keys = key[0], key[1], key[0] ^ key[1] ^ _PARITY
    high, low = high + keys[0], low + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            high = high + low
            low = (low << np.uint32(rotation)) | (low >> np.uint32(32 - rotation))
            low = low ^ high
        high = high + keys[(group + 1) % 3]
        low = low + keys[(group + 2) % 3] + np.uint32(group + 1)
    return high, low
