"""Accelerator kernels behind the same call: what each can do, and which one a call gets."""

from __future__ import annotations

import jax

from xformer.attention.call import Controls, Inputs, Settings
from xformer.attention.kernels import block_sparse, cudnn, splash
from xformer.attention.pattern import Pattern

KERNELS = {"pallas": block_sparse, "splash": splash, "cudnn": cudnn}
BEST: dict[str, tuple[str, ...]] = {
    "gpu": ("cudnn", "pallas"),
    "tpu": ("splash",),
}  # on each platform, the first that can


def choose(implementation: str | None, inputs: Inputs, controls: Controls, settings: Settings, pattern: Pattern) -> str:
    """The implementation of a call, of which only shapes, dtypes and static choices are read.

    Raises NotImplementedError when the kernel that was asked for can't do the call.
    """
    call = inputs, controls, settings, pattern
    if implementation is None:
        able = (name for name in BEST.get(jax.default_backend(), ()) if not KERNELS[name].refusals(*call))
        return next(able, "xla")
    reasons = KERNELS[implementation].refusals(*call) if implementation in KERNELS else []
    if reasons:
        raise NotImplementedError(f'implementation="{implementation}" cannot do this call: {"; ".join(reasons)}')
    return implementation
