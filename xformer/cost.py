"""Counts what a JAX function costs by walking its jaxpr.

XLA's own `cost_analysis` counts the body of a loop once, whatever its length, so it is no source for a paper. Here a
scanned model costs exactly what its unrolled twin does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core

from xformer.attention import kernels
from xformer.attention.cost import Cost
from xformer.attention.kernels import cudnn

# What holds no matrix product. Elementwise arithmetic is recognised by its shapes and needs no entry, so what a new JAX
# release adds is counted too. Listed is what changes shapes: reductions and sums along an axis, indexing, data
# movement, communication, random bits, state, and callbacks that only look.
_NAMES = """
    add_any addupdate after_all all_gather all_gather_invariant all_gather_reduced all_to_all approx_top_k argmax
    argmin axis_index bitcast_convert_type broadcast_in_dim broadcast_to check clamp concatenate copy copy_p
    create_token cumlogsumexp cummax cummin cumprod cumsum debug_callback debug_print device_put dim_as_value
    dimension_size dynamic_slice dynamic_update_slice empty empty2 free_ref freeze from_edtype gather get get_global
    inspect_sharding iota layout_constraint mesh_cast multiple_of new_ref num_programs optimization_barrier pad
    pbroadcast pcast philox2x32 philox4x32 platform_index pmax pmin ppermute preduced program_id psum psum2
    psum_invariant pvary ragged_all_to_all random_bits random_clone random_fold_in random_gamma random_seed
    random_split random_unwrap random_wrap reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
    reduce_scatter reduce_sum reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor
    reduced_vary_cast reduced_vary_cast_p reshape reshard rev rng_bit_generator rng_uniform scatter scatter-add
    scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max scatter_min scatter_mul scatter_sub
    select_and_gather_add select_and_scatter select_and_scatter_add select_n shape_assertion sharding_constraint
    slice sort split squeeze stack swap threefry2x32 threefry4x32 tile to_edtype top_k transpose unreduced_psum
    unreduced_reduce_scatter unstack vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint
"""
_FREE = frozenset(_NAMES.split())
# Matrix work whose arrays may all have one shape, as those of elementwise arithmetic do.
_MATRIX_NAMES = """
    cholesky cholesky_update eig eigh fft hessenberg householder_product lu lu_pivots_to_permutation qr geqrf geqp3
    ormqr schur svd triangular_solve tridiagonal tridiagonal_solve dot matmul ragged_dot ragged_dot_general
    scaled_matmul symmetric_product custom_call ffi_call pure_callback io_callback python_callback
"""
_MATRIX = frozenset(_MATRIX_NAMES.split())

_JAX_FOLDER = str(Path(jax.__file__).parent)


def count(fn: Callable[..., Any], *args: Any) -> Cost:
    """Counts the matrix work of `fn(*args)` without running it.

    `flops` is 2 per multiply-add of every `dot_general` and convolution in the jaxpr of `fn`, over all devices
    together: loop bodies times their length, `shard_map` and `pmap` bodies times their number of shards, the dearer
    branch of a `cond`, recomputation under `jax.checkpoint` and unused results as written; a complex multiply-add is
    four real ones. A Pallas kernel counts what its `cost_estimate` says, and cuDNN's attention the tiles of 128 x 128
    pairs that its mask touches. A convolution multiplies its padding too, as it is executed, but not the holes of a
    dilated input, so a transposed convolution costs what the plain one does. Elementwise arithmetic, whose results
    have the shape that its operands broadcast to, is not counted, by definition. What can't be counted (a `while`
    whose trip count depends on data, a kernel without an estimate, a foreign call, a matrix decomposition) is named
    in `uncounted`, never guessed.

    Args:
      fn: any function of arrays (pytrees of arrays) that JAX can trace. Other values belong in a closure.
      *args: its arguments, as arrays or `jax.ShapeDtypeStruct`; nothing is computed.

    Returns:
      Cost with `flops`, `bytes` (arrays in `args` and in the result, each once), `params=0` and `uncounted`.
    """
    with kernels.quietly():
        closed = jax.make_jaxpr(fn)(*args)
    flops, uncounted = _walk(closed.jaxpr)
    arrays = [*closed.in_avals, *closed.out_avals]
    return Cost(flops, sum(_bytes(aval) for aval in arrays), uncounted=tuple(dict.fromkeys(uncounted)))


def _bytes(aval: Any) -> int:
    if not hasattr(aval, "dtype"):  # an effect token
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def _walk(jaxpr: core.Jaxpr) -> tuple[int, list[str]]:
    """FLOPs of one execution of `jaxpr` and the names of what they leave out, in order."""
    flops, uncounted = 0, []
    for eqn in jaxpr.eqns:
        eqn_flops, eqn_uncounted = _equation(eqn)
        flops += eqn_flops
        uncounted += eqn_uncounted
    return flops, uncounted


def _equation(eqn: core.JaxprEqn) -> tuple[int, list[str]]:
    name = eqn.primitive.name
    params = eqn.params
    if name == "dot_general":
        return _dot(eqn), []
    if name == "conv_general_dilated":
        return _convolution(eqn), []
    if name in _FREE:
        return 0, []
    if name == "scan":
        return _times(params["length"], _walk(params["jaxpr"].jaxpr))
    if name == "cond":
        branches = [_walk(branch.jaxpr) for branch in params["branches"]]
        return max(flops for flops, _ in branches), [left for _, lefts in branches for left in lefts]
    if name == "while":
        return 0, [f"while with a trip count that depends on data{_source(eqn)}"]
    if name == "pallas_call":
        estimate = params.get("cost_estimate")
        if estimate is None:
            return 0, [f"pallas_call {_kernel_name(params)} without a cost_estimate{_source(eqn)}"]
        return int(estimate.flops), []
    if len(eqn.invars) > 1 and hasattr(_aval(eqn.invars[1]), "shape"):
        flops = cudnn.traced_flops(name, params, *(_aval(var).shape for var in eqn.invars[:2]))
        if flops is not None:
            return flops, []
    if name == "shard_map":
        return _times(_num_shards(params), _walk(_open(params["jaxpr"])))
    if name == "xla_pmap":
        return _times(params["global_axis_size"], _walk(_open(params["call_jaxpr"])))
    bodies = [body for body in subjaxprs(params.values()) if _same_signature(eqn, body)]
    if len(bodies) == 1:  # jit, remat, custom_jvp, custom_vjp, ...: a call, whatever its name
        return _walk(bodies[0])
    if not bodies and name not in _MATRIX and _is_elementwise(eqn):
        return 0, []
    target = f" {params['target_name']}" if "target_name" in params else ""
    return 0, [f"{name}{target}{_source(eqn)}"]


def _times(times: int, walked: tuple[int, list[str]]) -> tuple[int, list[str]]:
    flops, uncounted = walked
    return flops * times, uncounted


def _dot(eqn: core.JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs, out = (_aval(var) for var in (eqn.invars[0], eqn.outvars[0]))
    return _flops_per_multiply_add(out) * math.prod(out.shape) * math.prod(lhs.shape[axis] for axis in contracted)


def _convolution(eqn: core.JaxprEqn) -> int:
    params = eqn.params
    numbers = params["dimension_numbers"]
    lhs, rhs, out = (_aval(var) for var in (*eqn.invars[:2], eqn.outvars[0]))
    # The kernel's second dimension is the input features of one group, so groups of features or batch need no factor.
    products = out.shape[numbers.out_spec[0]] * out.shape[numbers.out_spec[1]] * rhs.shape[numbers.rhs_spec[1]]
    for axis, (stride, (low, _), lhs_dilation, rhs_dilation) in enumerate(
        zip(params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True)
    ):
        lhs_len = lhs.shape[numbers.lhs_spec[2 + axis]]
        rhs_len = rhs.shape[numbers.rhs_spec[2 + axis]]
        out_len = out.shape[numbers.out_spec[2 + axis]]
        products *= _taps(lhs_len, rhs_len, out_len, stride, low, lhs_dilation, rhs_dilation)
    return _flops_per_multiply_add(out) * products


def _taps(lhs_len: int, rhs_len: int, out_len: int, stride: int, low: int, lhs_dilation: int, rhs_dilation: int) -> int:
    """Pairs (output place, kernel tap) along one axis; of a dilated input only those that meet an element of it."""
    if lhs_dilation == 1:
        return out_len * rhs_len
    total = 0
    for tap in range(rhs_len):
        place = np.arange(out_len, dtype=np.int64) * stride + tap * rhs_dilation - low
        total += int(((place % lhs_dilation == 0) & (place >= 0) & (place <= (lhs_len - 1) * lhs_dilation)).sum())
    return total


def _aval(var: Any) -> Any:
    return var.aval


def _flops_per_multiply_add(out: Any) -> int:
    return 8 if np.issubdtype(out.dtype, np.complexfloating) else 2


def _num_shards(params: dict[str, Any]) -> int:
    sizes = dict(params["mesh"].shape)
    manual = params.get("newly_manual_axes", params.get("manual_axes", sizes))  # renamed between JAX releases
    return math.prod(sizes[axis] for axis in manual)


def _open(jaxpr: Any) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def subjaxprs(values: Any) -> Iterator[core.Jaxpr]:
    for value in values:
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            yield _open(value)
        elif isinstance(value, tuple | list):
            yield from subjaxprs(value)


def _same_signature(eqn: core.JaxprEqn, body: core.Jaxpr) -> bool:
    """Whether `body` takes and returns exactly what `eqn` does, as only a plain call of it would."""
    return _types(eqn.invars) == _types(body.invars) and _types(eqn.outvars) == _types(body.outvars)


def _is_elementwise(eqn: core.JaxprEqn) -> bool:
    """Whether every result has the shape that the operands broadcast to, and no function is applied."""
    given: list[Any]
    made: list[Any]
    given, made = ([getattr(var.aval, "shape", None) for var in side] for side in (eqn.invars, eqn.outvars))
    if None in given or None in made or "target_name" in eqn.params:
        return False
    try:
        shape = np.broadcast_shapes(*given)
    except ValueError:
        return False
    return all(out == shape for out in made) and next(subjaxprs(eqn.params.values()), None) is None


def _types(variables: Any) -> list[tuple[Any, Any]]:
    return [(getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)) for var in variables]


def _kernel_name(params: dict[str, Any]) -> str:
    return str(params.get("name") or getattr(params.get("name_and_src_info"), "name", "kernel"))


def _source(eqn: core.JaxprEqn) -> str:
    """` (file:line function)` of the innermost frame outside JAX, empty where it isn't known."""
    traceback = eqn.source_info.traceback
    frames: Any = traceback.frames if traceback else ()
    for frame in frames:
        if not frame.file_name.startswith(_JAX_FOLDER):
            return f" ({Path(frame.file_name).name}:{frame.line_num} {frame.function_name})"
    return ""
