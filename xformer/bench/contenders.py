"""Who is measured in benchmarks: xformer's own attention, and its peers."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xformer import cost
from xformer.attention import Full, Shape
from xformer.bench.case import Case, Contender, Ready, host_arrays
from xformer.bench.timing import Call


def ours(name: str = "xformer", implementation: str | None = None) -> Contender:
    """The op itself, with the implementation it chooses or a named one."""

    def prepare(case: Case) -> Ready:
        op = case.op if implementation is None else dataclasses.replace(case.op, implementation=implementation)  # type: ignore[arg-type]
        params = op.init(jax.random.key(0), case.shape)
        run = lambda params, q, k, v: op(q, k, v, params=params)
        flops = None if case.backward else op.cost(case.shape).flops
        return compiled(run, (params, *arrays(case)), case, flops=flops)

    return Contender(name, prepare)


Extra = Callable[[Case], Iterable[Contender]]


def load_extra(path: Path) -> Extra:
    """The function `contenders(case)` of a Python file, for peers that can't be installed.

    Raises:
      ValueError: no such file, or no such function in it.
    """
    spec = importlib.util.spec_from_file_location("extra_contenders", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"got {str(path)!r}, takes a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, "contenders", None)):
        raise ValueError(f"got {str(path)!r}, takes a file that defines contenders(case)")
    return found


def peers(case: Case, extra: Extra | None = None) -> list[Contender]:
    """All that compute the case's op without this package: in JAX, in PyTorch where it is installed, and extra ones."""
    found = list(jax_peers(case))
    if has_torch():
        from xformer.bench.torch_peers import torch_peers

        found += torch_peers(case)
    return [*found, *(extra(case) if extra else ())]


def has_torch() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def jax_peers(case: Case) -> Iterable[Contender]:
    """What computes full attention in JAX without this package."""
    if type(case.op) is Full and case.op.position is None:
        causal = case.op.causal
        run = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
        yield _jax_peer("jax.nn", run)
        yield _jax_peer("jax einsum", functools.partial(heads_first, causal=causal), first=True)
        if jax.default_backend() == "gpu":
            yield _jax_peer("jax.nn cudnn", functools.partial(run, implementation="cudnn"))


def heads_first(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    """Textbook attention on `[batch, num_heads, length, head_dim]`, as one would write it by hand."""
    scores = jnp.einsum("BHQD,BHKD->BHQK", query, key) / math.sqrt(query.shape[-1])
    if causal:
        length = query.shape[2]
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(query.dtype)
    return jnp.einsum("BHQK,BHKD->BHQD", weights, value)


def _jax_peer(name: str, run: Callable[..., jax.Array], first: bool = False) -> Contender:
    def prepare(case: Case) -> Ready:
        return compiled(run, arrays(case, first), case, first=first)

    return Contender(name, prepare)


def with_gradients(run: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Output and gradients of `run(*operands)`, given the cotangent last."""

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
    first: bool = False,
    comparable: bool = True,
) -> Ready:
    """A JAX function of operands; the last of them is a cotangent, which only the backward pass needs.

    FLOPs that are not given are counted. `first`: heads come before the length.
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
        return [x.transpose(0, 2, 1, 3) for x in found] if first else found

    call = Call(lambda: program(*operands), memory=memory, planned=0.0 if math.isnan(needs) else needs)
    return Ready(call, flops, needs, results if comparable else None)


@functools.lru_cache(maxsize=2)
def _device_arrays(shape: Shape, dtype: str, first: bool) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(x, dtype) for x in host_arrays(Case(Full(), shape), first))


def arrays(case: Case, first: bool = False) -> tuple[jax.Array, ...]:
    """`host_arrays` on the device in the case's dtype."""
    return _device_arrays(case.shape, case.dtype, first)
