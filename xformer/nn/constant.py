"""Variables that are saved with a model and not trained."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from xformer.attention import Attention, Shape


class Constant(nnx.Variable):
    """An array that is saved and not trained: what an op's `constants` drew (PyTorch: a buffer).

    No parameter: no optimizer, weight decay or parameter count sees it. While training it goes through a step as other
    variables of a model do: carried from one micro-batch to the next; over the devices of pmap, numbers with a fraction
    are averaged and others are those of the first device; on a mesh there is one for all.
    """


def draw(op: Attention, shape: Shape, rngs: nnx.Rngs | None) -> dict[str, Any]:
    """The constants of an op as variables, from the stream `params`, or from the op's seed where there is no stream."""
    if not jax.eval_shape(lambda: op.constants(jax.random.key(0), shape)):
        return {}
    rng = jax.random.key(getattr(op, "seed", 0)) if rngs is None else rngs.params()
    return jax.tree.map(Constant, op.constants(rng, shape))


def values(tree: Any) -> Any:
    """The arrays of a tree of variables."""
    return jax.tree.map(lambda x: x[...], tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
