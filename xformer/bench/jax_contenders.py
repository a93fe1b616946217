"""Contenders in JAX: this package's own attention, and the full attention that JAX has or that one writes by hand."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer import cost
from xformer.attention import Full
from xformer.bench.contender import Case, Contender, Ready
from xformer.bench.inputs import arrays, trees
from xformer.bench.timing import Call


def ours(name: str = "xformer", implementation: str | None = None) -> Contender:
    """The op itself, with the implementation it chooses or a named one."""

    def prepare(case: Case) -> Ready:
        op = case.op if implementation is None else dataclasses.replace(case.op, implementation=implementation)  # type: ignore[arg-type]
        params = op.init(jax.random.key(0), case.shape)
        given = trees(op, case.shape.q_len)
        run = lambda params, q, k, v: op(q, k, v, params=params, **given)
        flops = None if case.backward else op.cost(case.shape).flops
        return compiled(run, (params, *arrays(case)), case, flops=flops)

    return Contender(name, prepare)


def jax_peers(case: Case) -> Iterable[Contender]:
    """What computes full attention in JAX without this package."""
    if type(case.op) is Full and case.op.position is None:
        causal = case.op.causal
        run = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
        yield _jax_peer("jax.nn", run)
        yield _jax_peer("jax einsum", functools.partial(textbook, causal=causal), heads_first=True)
        if jax.default_backend() == "gpu":
            yield _jax_peer("jax.nn cudnn", functools.partial(run, implementation="cudnn"))


def textbook(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    """Attention as one would write it by hand, on `[batch, num_heads, length, head_dim]`."""
    scores = jnp.einsum("BHQD,BHKD->BHQK", query, key) / math.sqrt(query.shape[-1])
    if causal:
        length = query.shape[2]
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(query.dtype)
    return jnp.einsum("BHQK,BHKD->BHQD", weights, value)


def _jax_peer(name: str, run: Callable[..., jax.Array], heads_first: bool = False) -> Contender:
    def prepare(case: Case) -> Ready:
        return compiled(run, arrays(case, heads_first), case, heads_first=heads_first)

    return Contender(name, prepare)


def with_gradients(run: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The function that gives output and gradients of `run(*operands)`; it takes the gradient of the output last."""

    def both(*operands: Any) -> Any:
        out, pull = jax.vjp(run, *operands[:-1])
        return out, *pull(operands[-1])

    return both


def compiled(
    run: Callable[..., jax.Array],
    operands: tuple[Any, ...],
    case: Case,
    *,
    flops: float | None = None,
    heads_first: bool = False,
    comparable: bool = True,
) -> Ready:
    """A JAX function, compiled for a case.

    Args:
      run: the function of all operands but the last.
      operands: what it is given, and last the gradient of its output, which only the backward pass needs.
      case: says whether the backward pass is measured too.
      flops: of a call; counted where it is not given.
      heads_first: arrays are `[batch, num_heads, length, head_dim]`.
      comparable: the output can be checked against other contenders'.
    """
    fn = with_gradients(run) if case.backward else run
    operands = operands if case.backward else operands[:-1]
    flops = cost.count(fn, *operands).flops if flops is None else flops
    program = jax.jit(fn).lower(*operands).compile()
    plan = program.memory_analysis()
    needs = math.nan if plan is None else float(plan.temp_size_in_bytes + plan.output_size_in_bytes)
    # On an accelerator XLA's plan is all that the call takes; on a CPU libraries take memory of their own besides.
    memory = None if jax.default_backend() == "cpu" else lambda: needs

    def results(given: Any) -> Sequence[np.ndarray]:
        out, *gradients = given if case.backward else (given,)
        found = [np.asarray(x, np.float32) for x in (out, *gradients[-3:])]
        return [x.transpose(0, 2, 1, 3) for x in found] if heads_first else found

    call = Call(lambda: program(*operands), memory=memory, planned=0.0 if math.isnan(needs) else needs)
    return Ready(call, flops, needs, results if comparable else None)
