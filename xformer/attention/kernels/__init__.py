"""Accelerator kernels behind the same call: what each can do, and which one a call gets."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax.extend import backend as backends

from xformer.attention.engine.operands import Controls, Inputs, Settings
from xformer.attention.kernels import cudnn, pallas, splash
from xformer.attention.pattern import Pattern

KERNELS = {"pallas": pallas, "splash": splash, "cudnn": cudnn}
PLATFORMS = {"pallas": "gpu", "splash": "tpu", "cudnn": "gpu"}
# The first that can do a call where it is made is what `implementation=None` takes. A kernel joins once it has been
# checked and timed on its platform (benchmarks/gpu_kernels.py); until then it runs when it is named.
BEST: tuple[str, ...] = ()

_interpreted = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it "pallas" and "splash" can be called where there is no GPU or TPU, by name.

    On a CPU they run in Pallas's interpreter, right but slow: to test them, and to lower them for their platform.
    """
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def choose(
    implementation: str | None,
    inputs: Inputs,
    controls: Controls,
    settings: Settings,
    pattern: Pattern,
    *,
    anywhere: bool = False,
    with_lse: bool = False,
) -> str:
    """The implementation of a call, of which only shapes, dtypes and static choices are read.

    With `anywhere`, an implementation that is named need not be able to run on this machine; with `with_lse`, it must
    give the log-sum-exp. Raises NotImplementedError when the kernel that was named can't do the call.
    """
    call = _in_one_dtype(inputs), controls, settings, pattern
    if implementation is None:
        if with_lse:
            return "xla"
        if jax.sharding.get_abstract_mesh().size > 1:
            return "xla"  # the compiler cuts up its products along a mesh in scope, a kernel it would only repeat
        able = (name for name in BEST if not _absent(name) and not KERNELS[name].refusals(*call))
        return next(able, "xla")
    if implementation in KERNELS:
        here = [] if anywhere or (_interpreted.get() and implementation != "cudnn") else _absent(implementation)
        reasons = here + KERNELS[implementation].refusals(*call)
        reasons += ["it gives no log-sum-exp"] if with_lse else []
        if reasons:
            raise NotImplementedError(f'implementation="{implementation}" cannot do this call: {"; ".join(reasons)}')
    return implementation


def attend(implementation: str, inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> jax.Array:
    """A kernel's attention, `[batch, q_len, heads, head_dim]`.

    Padded keys and values, those of a mask `[batch, 1, 1, kv_len]`, are zeroed, so it does not matter what stands
    there. A NaN or infinity that only a pattern, a causal cut or segments hide can still reach queries of the same
    tile: kernels multiply it by a weight of zero.
    """
    return KERNELS[implementation].attend(_in_one_dtype(inputs), controls, settings, pattern)


def _in_one_dtype(inputs: Inputs) -> Inputs:
    """Queries in the dtype of the keys. They are in float32 where an array scaled them, which kernels don't take."""
    same = inputs.query.dtype == inputs.key.dtype
    return inputs if same else inputs._replace(query=inputs.query.astype(inputs.key.dtype))


def _absent(name: str) -> list[str]:
    """Why a kernel can't run on this machine."""
    here = jax.default_backend()
    if here != PLATFORMS[name]:
        return [f"it needs a {PLATFORMS[name].upper()}, JAX computes on the {here.upper()} here"]
    if name == "cudnn" and "cuda" not in backends.get_backend().platform_version:
        return ["it needs an NVIDIA GPU"]
    return []
