"""routing-transformer and sinkhorn-transformer: what a query sees depends on data."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import torch
from routing_transformer.routing_transformer import KmeansAttention
from sinkhorn_transformer import sinkhorn_transformer
from sinkhorn_transformer.sinkhorn_transformer import SinkhornAttention, sinkhorn_sorting_operator

from benchmarks.oracles.comparison import Comparison, Difference, Run, arrays, heads_first, lengths, padding
from xformer.attention import Routing, Sinkhorn

BATCH, HEADS, DEPTH = 2, 2, 8


def comparisons() -> list[Comparison]:
    return [routing(), sinkhorn()]


def routing() -> Comparison:
    clusters, window = 5, 6
    length = clusters * window
    rng = np.random.default_rng(41)
    centres = rng.standard_normal((HEADS, clusters, DEPTH))
    centres /= np.linalg.norm(centres, axis=-1, keepdims=True)
    shape = (BATCH, length, HEADS, DEPTH)
    anywhere = arrays(42, query=shape, key=shape, value=shape)
    around = lambda: np.stack(
        [
            np.stack([centres[head, rng.permutation(np.arange(length) % clusters)] for head in range(HEADS)], 1)
            for _ in range(BATCH)
        ]
    )
    apart = {name: 2 * around() + 0.1 * rng.standard_normal(shape) for name in ("query", "key")}
    apart["value"] = anywhere["value"]
    real = lengths(length, 30, 19)
    op = Routing(num_clusters=clusters, window=window)

    def ours(given: dict[str, Any], real: np.ndarray | None = None) -> Any:
        mask = None if real is None else padding(real)
        params = {"constants": {"centres": jnp.asarray(centres)}}
        return op(given["query"], given["key"], given["value"], mask=mask, params=params)

    def theirs(given: dict[str, torch.Tensor], real: np.ndarray | None = None) -> Any:
        layer = KmeansAttention(clusters, window, HEADS, DEPTH).double().eval()
        layer.kmeans.means.data.copy_(torch.tensor(centres))
        layer.kmeans.initted.data.fill_(True)
        mask = None if real is None else torch.tensor(real)
        out = layer(*(heads_first(given[name]) for name in ("query", "key", "value")), query_mask=mask)[0]
        return heads_first(out)

    mean = Difference(
        "a query of several clusters gets the mean of their outputs, its own softmax in each; ours one softmax over "
        "the keys of all of them",
        "Roy et al. 2021, section 4.1: attention over the set of keys in the query's cluster; no line says what "
        "becomes of tokens in several",
        "open",
        "the union of the sets, each key once",
    )
    masked = Difference(
        "padding takes places among a cluster's nearest and is masked there; ours chooses among real tokens",
        "Roy et al. 2021 has no padding", "open", "real outputs must not move with what stands in padding",
    )  # fmt: skip
    return Comparison(
        "routing", "routing-transformer", "KmeansAttention",
        (
            Run(
                "every token nearest in one cluster alone", apart, ours,
                lambda given: theirs(given) * (1 + 1e-5),  # it adds 1e-5 to the number of clusters that it divides by
            ),
            Run("tokens anywhere", anywhere, ours, theirs, None, (mean,)),
            Run(
                "30 and 19 of 30 tokens real, every token nearest in one cluster", apart,
                lambda given: ours(given, real), lambda given: theirs(given, real), real, (masked,),
            ),
        ),
        (
            Difference(
                "scores are of queries and keys as they are, in the package as in ours",
                "Roy et al. 2021, algorithm 1: LayerNorm without scale and bias before both the choice and the scores",
                "neither",
                "a layer's `qk_norm=True` gives such scores, with a trained scale",
            ),
            Difference(
                "centres move to the direction of the sum over queries and keys; ours to that of the mean of two "
                "means, so that neither length nor batch counts",
                "Roy et al. 2021, algorithm 1: half the sum over queries and half that over keys",
                "neither",
                "a sum over a batch of long texts outweighs lambda, whatever it is",
            ),
        ),
    )  # fmt: skip


def sinkhorn() -> Comparison:
    length, size, iterations, temperature = 32, 8, 7, 0.75
    real = lengths(length, 32, 19)
    shape = (BATCH, length, HEADS, DEPTH)
    inputs = arrays(43, query=shape, key=shape, value=shape)
    keys = {name: inputs[name] for name in ("query", "key")}
    op = Sinkhorn(block_size=size, num_iterations=iterations, temperature=temperature)

    def ours(given: dict[str, Any], real: np.ndarray | None = None) -> Any:
        mask = None if real is None else padding(real)
        return op(given["query"], given["key"], given.get("value", given["key"]), mask=mask)

    def theirs(given: dict[str, torch.Tensor], real: np.ndarray | None = None, **options: Any) -> Any:
        sizes = {"bucket_size": size, "dim": HEADS * DEPTH, "dim_heads": DEPTH, "heads": HEADS, "max_seq_len": length}
        layer = SinkhornAttention(**sizes, temperature=temperature, sinkhorn_iter=iterations, **options).double()
        mask = None if real is None else torch.tensor(real)
        given = given | {"value": given.get("value", given["key"])}
        return heads_first(layer(*(heads_first(given[name]) for name in ("query", "key", "value")), q_mask=mask))

    def sorted_by(start: Any, given: dict[str, torch.Tensor], **options: Any) -> Any:
        with mock.patch.object(sinkhorn_transformer, "gumbel_sinkhorn", start):
            return theirs(given, non_permutative=False, **options)

    def without_noise(scores: torch.Tensor, iterations: int, temperature: float) -> torch.Tensor:
        return sinkhorn_sorting_operator(torch.log(scores + 1e-6) / temperature, iterations)

    def by_affinity(given: dict[str, torch.Tensor], **options: Any) -> Any:
        """Its normalisation and sorting, from our start: the affinities as they are, neither relu nor log."""
        start = lambda scores, iterations, temperature: sinkhorn_sorting_operator(scores / temperature, iterations)
        with mock.patch.object(sinkhorn_transformer.F, "relu", lambda x: x):
            return sorted_by(start, given, **options)

    top = Difference(
        "by default a block is sorted to the side of one other alone, with its softmax for weight, and nothing is "
        "normalised by columns; ours mixes all blocks by the balanced matrix",
        "Tay et al. 2020, section 3.1.1: Sinkhorn normalisation of rows and columns",
        "ours",
    )
    start = Difference(
        "R begins as relu(affinity) to the power of 1 / temperature; ours as exp(affinity / temperature)",
        "Tay et al. 2020, section 3.1.1: S^0(R) = exp(R); its relu is inside the learned sorting network (equation 2), "
        "which neither has",
        "ours",
    )
    values = Difference(
        "the sorted blocks of values are sorted keys (b_v_r is made of b_k_r); ours sorts values",
        "Tay et al. 2020, section 3.2: the sorted keys and values of a block",
        "ours",
    )
    argmax = Difference(
        "of a mixed block those tokens are masked that are padding in the block with the most weight; ours leaves "
        "padding out of means and mixtures",
        "Tay et al. 2020 has no padding", "open", "real outputs must not move with what stands in padding",
    )  # fmt: skip
    return Comparison(
        "sinkhorn", "sinkhorn-transformer", "SinkhornAttention",
        (
            Run("as it ships", inputs, ours, theirs, None, (top, values)),
            Run(
                "non_permutative=False, its Gumbel noise left out", inputs, ours,
                lambda given: sorted_by(without_noise, given), None, (start, values),
            ),
            Run("that, started as ours", inputs, ours, by_affinity, None, (values,)),
            Run("that, keys for values in both", keys, ours, by_affinity),
            Run(
                "that, 32 and 19 of 32 tokens real", keys, lambda given: ours(given, real),
                lambda given: by_affinity(given, real=real), real, (argmax,),
            ),
        ),
        (
            Difference(
                "Gumbel noise is added to log R in training and evaluation alike; ours adds none",
                "Tay et al. 2020, section 3.1, Gumbel Sinkhorn",
                "theirs",
                "said at the op: the same inputs always give the same outputs",
            ),
            Difference(
                "its causal attention picks the best past blocks by softmax, without Sinkhorn's normalisation, and "
                "shows the first blocks a learned one; ours normalises over the past",
                "Tay et al. 2020, section 3.3: causal Sinkhorn balancing, sums over what is not masked", "ours",
            ),
        ),
    )  # fmt: skip
