"""performer-pytorch, and torchscale's retention: running sums instead of a softmax."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from performer_pytorch.performer_pytorch import (
    FastAttention,
    causal_linear_attention_noncuda,
    generalized_kernel,
    linear_attention,
    softmax_kernel,
)
from torchscale.component.multiscale_retention import MultiScaleRetention

from benchmarks.oracles.comparison import (
    Comparison,
    Difference,
    Run,
    arrays,
    call,
    heads_first,
    lengths,
    padding,
    projected,
    weights_of,
)
from xformer.attention import Linear, Performer, Retention

BATCH, LENGTH, HEADS, DEPTH = 2, 29, 2, 8
SHAPE = (BATCH, LENGTH, HEADS, DEPTH)
FLOAT32 = 1e-6  # torchscale's norm computes in float32
QKV = arrays(50, query=SHAPE, key=SHAPE, value=SHAPE)


def comparisons() -> list[Comparison]:
    return [linear(), performer(), retention()]


def its_sums(given: dict[str, torch.Tensor], features: Any, causal: bool) -> torch.Tensor:
    """performer-pytorch's attention over features of queries and of keys, nothing added to its divisors."""
    query, key, value = (heads_first(given[name]) for name in ("query", "key", "value"))
    attend = partial(causal_linear_attention_noncuda, eps=0.0) if causal else linear_attention
    return heads_first(attend(features(query, is_query=True), features(key, is_query=False), value))


def linear() -> Comparison:
    elu = lambda x: torch.nn.functional.elu(x) + 1

    def features(x: torch.Tensor, is_query: bool) -> torch.Tensor:
        return generalized_kernel(x, projection_matrix=None, kernel_fn=elu, kernel_epsilon=0.0, normalize_data=False)

    return Comparison(
        "linear", "performer-pytorch", "generalized_kernel(elu + 1), linear_attention",
        tuple(
            Run(
                "causal" if causal else "bidirectional", QKV,
                lambda given, causal=causal: Linear(causal=causal)(given["query"], given["key"], given["value"]),
                lambda given, causal=causal: its_sums(given, features, causal),
            )
            for causal in (False, True)
        ),
    )  # fmt: skip


def performer() -> Comparison:
    num_features, real = 24, lengths(LENGTH, 29, 18)
    projection = np.random.default_rng(51).standard_normal((num_features, DEPTH))
    given_projection = {"projection_matrix": torch.tensor(projection)}

    def ours(given: dict[str, Any], kernel: str = "softmax", causal: bool = False, real: Any = None) -> Any:
        op = Performer(num_features=num_features, kernel=kernel, causal=causal)  # type: ignore[arg-type]
        params = {"constants": {"projection": jnp.asarray(projection)}}
        mask = None if real is None else padding(real)
        return op(given["query"], given["key"], given["value"], mask=mask, params=params)

    def shipped(given: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        layer = FastAttention(DEPTH, num_features, **options).double()
        layer.projection_matrix.copy_(given_projection["projection_matrix"])
        return heads_first(layer(*(heads_first(given[name]) for name in ("query", "key", "value"))))

    def exact(x: torch.Tensor, is_query: bool) -> torch.Tensor:
        return softmax_kernel(x, is_query=is_query, eps=0.0, **given_projection)

    def relu(x: torch.Tensor, is_query: bool) -> torch.Tensor:
        return generalized_kernel(x, kernel_epsilon=0.0, **given_projection)

    def values_masked(given: dict[str, torch.Tensor]) -> torch.Tensor:
        """Its SelfAttention under a mask."""
        return its_sums(given | {"value": given["value"] * torch.tensor(real)[..., None, None]}, exact, False)

    added = Difference(
        "1e-4 is added to every feature (1e-3 with relu); ours adds nothing and divides out the largest exponents",
        "Choromanski et al. 2021, lemma 1 and equation 5: the features without it, of which the estimate is unbiased",
        "ours",
    )
    counted = Difference(
        "a mask zeroes values alone, so that padding counts in the divisor; ours leaves its keys out of both sums",
        "Choromanski et al. 2021, equation 4: the divisor sums the weights of the keys that are attended",
        "ours",
    )
    return Comparison(
        "performer", "performer-pytorch", "FastAttention",
        (
            Run("softmax features, as it ships", QKV, ours, shipped, None, (added,)),
            Run("softmax features, eps=0", QKV, ours, lambda given: its_sums(given, exact, False)),
            Run("softmax features, eps=0, causal", QKV, lambda given: ours(given, causal=True),
                lambda given: its_sums(given, exact, True)),
            Run("relu features, as it ships", QKV, lambda given: ours(given, "relu"),
                lambda given: shipped(given, generalized_attention=True), None, (added,)),
            Run("relu features, kernel_epsilon=0", QKV, lambda given: ours(given, "relu"),
                lambda given: its_sums(given, relu, False)),
            Run("softmax features, eps=0, 29 and 18 of 29 tokens real", QKV, lambda given: ours(given, real=real),
                values_masked, real, (counted,)),
        ),
        (
            Difference(
                "orthogonal directions come from QR as it is; ours corrects the signs, which makes them uniform",
                "Choromanski et al. 2021, section 2.4: a marginally Gaussian direction each; Mezzadri 2007, section 5",
                "ours",
            ),
        ),
    )  # fmt: skip


def retention() -> Comparison:
    width = HEADS * DEPTH
    layers = {
        epsilon: MultiScaleRetention(
            argparse.Namespace(multiway=False, layernorm_eps=epsilon), width, width, HEADS
        ).double()
        for epsilon in (1e-6, 1e-24)
    }
    inputs = arrays(52, x=(BATCH, LENGTH, width)) | weights_of(layers[1e-6], 53)
    decays = 1 - 2.0 ** (-5 - np.arange(HEADS))
    apart = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    decay = torch.tensor(np.where(apart >= 0, decays[:, None, None] ** np.maximum(apart, 0), 0))
    still = torch.zeros(LENGTH, DEPTH), torch.ones(LENGTH, DEPTH)  # sines and cosines: no position turns

    def layer_around(given: dict[str, Any], epsilon: float) -> Any:
        """The paper's layer around our op: a norm for each head, a gate and a projection."""
        query, key, value = (projected(given, f"{name}_proj", HEADS) for name in ("q", "k", "v"))
        out = Retention(causal=True)(query, key, value)
        out = out / jnp.sqrt(jnp.square(out).mean(-1, keepdims=True) + epsilon)
        gate = given["x"] @ given["g_proj.weight"].T
        gated = gate / (1 + jnp.exp(-gate)) * out.reshape(BATCH, LENGTH, width)
        return gated @ given["out_proj.weight"].T

    def theirs(given: dict[str, torch.Tensor], epsilon: float) -> torch.Tensor:
        return call(layers[epsilon], given, given["x"], (still, decay / decay.sum(-1, keepdim=True).sqrt()))

    rounded = Difference(
        "weights are divided by the root of the sum of their decays, and by their own sum where it is above 1; ours "
        "by nothing, since the norm of the layer divides again",
        "Sun et al. 2023, section 2.2: three normalisations that a group norm, which is scale-invariant, undoes",
        "open",
        "the norm's epsilon, 1e-6, is what is left of it",
    )
    return Comparison(
        "retention", "torchscale", "MultiScaleRetention",
        (
            Run("the whole layer, as it ships", inputs, lambda given: layer_around(given, 1e-6),
                lambda given: theirs(given, 1e-6), None, (rounded,)),
            Run("the whole layer, its norm's epsilon 1e-24", inputs, lambda given: layer_around(given, 1e-24),
                lambda given: theirs(given, 1e-24), tolerance=FLOAT32),
        ),
        (
            Difference(
                "angles are 10000^(-i / (d / 2 - 1)), and pairs are neighbours; ours are RoFormer's, in halves",
                "Sun et al. 2023, section 2.1: theta as in xPos, whose angles are RoFormer's", "ours",
            ),
        ),
    )  # fmt: skip
