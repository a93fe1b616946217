"""How many matrix products of a JAX function must wait for one another: its longest chain, whatever the hardware.

Vaswani et al. 2017, table 1, compare layers by their sequential operations: O(1) for attention, O(length) for a
recurrent layer. Here they are counted in what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from xformer.cost import subjaxprs

NEVER = -np.inf  # of an output that does not depend on an input
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# Scores and their sum over values, in one call.
FUSED = ("pallas_call", "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")


def sequential_products(fn: Callable[..., Any], *args: Any) -> int:
    """The longest chain of matrix products in `fn(*args)` of which each needs the result of the one before.

    A loop counts its chain through what it carries, times its length: a recurrence over tokens grows with their
    number, and a loop over tiles whose sums merely add up does not. Of a `while` one round is counted, of a `cond` the
    longest branch, and an attention kernel as the two products that it fuses. Nothing is computed.

    Args:
      fn: any function of arrays (pytrees of arrays) that JAX can trace.
      *args: its arguments, as arrays or `jax.ShapeDtypeStruct`.
    """
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    chains = _chains(jaxpr)
    # Chains begin at inputs or at constants, which the last row stands for.
    return int(max(0.0, chains.max(initial=0.0)))


def _chains(jaxpr: core.Jaxpr) -> np.ndarray:
    """Products on the longest way from each input, or from a constant (the last row), to each output.

    `[inputs + 1, outputs]`, `NEVER` where there is no way.
    """
    given = [*jaxpr.constvars, *jaxpr.invars]
    num_rows = len(jaxpr.invars) + 1
    constant = np.full(num_rows, NEVER)
    constant[-1] = 0.0
    found: dict[Any, np.ndarray] = {}
    for index, var in enumerate(given):
        row = index - len(jaxpr.constvars)
        found[var] = constant if row < 0 else np.where(np.arange(num_rows) == row, 0.0, NEVER)
    of = lambda var: constant if isinstance(var, core.Literal) else found[var]
    for eqn in jaxpr.eqns:
        operands = np.stack([of(var) for var in eqn.invars] + [constant], axis=1)  # [rows, operands + 1]
        through = _equation(eqn)  # [operands + 1, results]
        for index, var in enumerate(eqn.outvars):
            found[var] = (operands + through[:, index]).max(axis=1)
    return np.stack([of(var) for var in jaxpr.outvars], axis=1) if jaxpr.outvars else np.zeros((num_rows, 0))


def _equation(eqn: core.JaxprEqn) -> np.ndarray:
    """As `_chains`, of one equation."""
    name, params = eqn.primitive.name, eqn.params
    shape = (len(eqn.invars) + 1, len(eqn.outvars))
    if name in PRODUCTS:
        return np.full(shape, 1.0)
    if name in FUSED:
        return np.full(shape, 2.0)
    if name == "scan":
        return _scan(_chains(next(subjaxprs([params["jaxpr"]]))), *_loop_counts(eqn), params["length"])
    if name == "while":
        body = _chains(params["body_jaxpr"].jaxpr)
        return _placed(body, shape, range(params["cond_nconsts"], len(eqn.invars)))
    bodies = [_chains(body) for body in subjaxprs(params.values())]
    if name == "cond":
        bodies = [_placed(body, shape, range(1, len(eqn.invars))) for body in bodies]
    fitting = [body for body in bodies if body.shape == shape]
    return np.max(fitting, axis=0) if fitting else np.zeros(shape)


def _loop_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """How many operands of a `scan` are the same in all rounds, and how many are carried."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update(list(eqn.invars)).unpack()  # since JAX 0.11
    return len(list(consts)), len(list(carry))


def _placed(chains: np.ndarray, shape: tuple[int, int], places: Sequence[int]) -> np.ndarray:
    """The chains of a body whose inputs are those operands of an equation that stand at `places`."""
    whole = np.zeros(shape)
    whole[:-1] = np.where(np.isin(np.arange(shape[0] - 1), places)[:, None], NEVER, 0.0)
    whole[list(places)] = chains[:-1]
    whole[-1] = chains[-1]
    return whole


def _scan(body: np.ndarray, num_consts: int, num_carry: int, length: int) -> np.ndarray:
    """The chains through `length` rounds of a loop."""
    if length == 0:
        return np.zeros_like(body)
    carried = slice(num_consts, num_consts + num_carry)
    others = np.ones(len(body), bool)
    others[carried] = False
    step = body[carried, :num_carry]  # from what a round carries in to what it carries out
    last = body[carried]
    before = _rounds(step, length - 1)  # from what the first round carries in to what the last one does
    whole = np.full_like(body, NEVER)
    whole[carried] = _then(before, last)
    # What enters in any round: at best in the first, and then through all others.
    enters = body[others, :num_carry]
    later = _then(enters, _then(_sums(step, length - 2), last)) if length > 1 else np.full_like(body[others], NEVER)
    whole[others] = np.maximum(body[others], later)
    return whole


def _then(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The longest ways along one set of chains and then along another: a product in the max-plus algebra."""
    if first.shape[1] == 0:
        return np.full((first.shape[0], second.shape[1]), NEVER)
    return (first[:, :, None] + second[None]).max(axis=1)


def _identity(size: int) -> np.ndarray:
    return np.where(np.eye(size, dtype=bool), 0.0, NEVER)


def _rounds(step: np.ndarray, times: int) -> np.ndarray:
    """`times` rounds one after another, by repeated squaring."""
    result, power = _identity(len(step)), step
    while times > 0:
        if times & 1:
            result = _then(result, power)
        power, times = _then(power, power), times >> 1
    return result


def _sums(step: np.ndarray, times: int) -> np.ndarray:
    """Any number of rounds up to `times`."""
    return _rounds(np.maximum(step, _identity(len(step))), times)
