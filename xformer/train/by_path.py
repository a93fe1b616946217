"""Learning rates by the place of a parameter: none for some, and less for the layers below."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xformer.checks import ArgumentError, did_you_mean
from xformer.tree_paths import BLOCKS, Blocks, path_name

EMBEDDINGS = r"(embed|positions|token_types|embedding_norm|cls|mask_vector)(/|$)"


def frozen(params: Any, patterns: Sequence[str]) -> Any:
    """Which parameters a pattern names: True where one matches the beginning of its path.

    Raises:
      ArgumentError: a pattern that names nothing, or patterns that leave nothing to train.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in patterns:
        if not any(re.match(pattern, path) for path in paths):
            parts = sorted({path.partition("/")[0] for path in paths})
            raise ArgumentError(
                "freeze",
                f"freeze: got {pattern!r}, which begins the path of no parameter; takes regular expressions such as "
                f"'blocks/0/', and paths begin with {', '.join(parts)}{did_you_mean(pattern, parts)}",
            )
    held = jax.tree_util.tree_map_with_path(
        lambda path, _: any(re.match(pattern, path_name(path)) for pattern in patterns), params
    )
    if patterns and all(jax.tree.leaves(held)):
        raise ArgumentError("freeze", f"freeze: got {tuple(patterns)}, which leaves no parameter to train")
    return held


def factors(params: Any, decay: float, blocks: Blocks | None = None) -> Any:
    """What the learning rate of each parameter is multiplied by (Howard and Ruder 2018, section 3.2).

    1 for heads, `decay` for the last block, its square for the block before, and so on down to the embeddings. Of
    stacked blocks an array `[layers, 1, ...]`; what layers share moves as the last of them does.

    Args:
      params: a tree of parameters.
      decay: of one layer.
      blocks: how the layers lie in the tree; None: in a list, or stacked with one op for all, as the tree shows.
    """
    named = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    inside = [(name, leaf) for name, leaf in named if name.startswith(f"{BLOCKS}/")]
    if not inside:
        return jax.tree.map(lambda _: 1.0, params)
    lie = blocks or _seen(inside)

    def factor(path: tuple, leaf: Any) -> Any:
        name = path_name(path)
        if not name.startswith(f"{BLOCKS}/"):
            return decay ** (lie.num_layers + 1) if re.match(EMBEDDINGS, name) else 1.0
        layers, _ = lie.layers(name)
        if not lie.scanned or lie.is_shared(name):
            return decay ** (lie.num_layers - layers[-1])
        power = lie.num_layers - jnp.array(layers, jnp.float32)
        return (decay**power).reshape(len(layers), *[1] * (leaf.ndim - 1))

    return jax.tree_util.tree_map_with_path(factor, params)


def _seen(inside: Sequence[tuple[str, Any]]) -> Blocks:
    """How blocks lie, as far as paths and shapes tell."""
    places = [name.split("/")[1] for name, _ in inside]
    if all(place.isdigit() for place in places):
        return Blocks(1 + max(map(int, places)))
    return Blocks(inside[0][1].shape[0], scanned=True)


def wrap(
    optimizer: optax.GradientTransformation,
    freeze: Sequence[str],
    layer_decay: float | None,
    blocks: Blocks | None = None,
) -> optax.GradientTransformation:
    """The optimizer with frozen parameters left as they are, and the updates of layers scaled.

    What is frozen has no gradient: it counts in no norm, and does not decay.
    """

    def hold(updates: optax.Updates) -> optax.Updates:
        if not freeze:
            return updates
        held = frozen(updates, freeze)
        return jax.tree.map(lambda still, x: jnp.zeros_like(x) if still else x, held, updates)

    def init(params: optax.Params) -> optax.OptState:
        frozen(params, freeze)
        return optimizer.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = optimizer.update(hold(updates), state, params)
        if layer_decay is not None:
            updates = jax.tree.map(
                lambda x, factor: (x * factor).astype(x.dtype), updates, factors(updates, layer_decay, blocks)
            )
        return hold(updates), state

    return optax.GradientTransformation(init, update)
