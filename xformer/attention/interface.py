"""The Attention contract: what every variant takes, returns, refuses and costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention.call import Call, normalize
from xformer.attention.cost import Cost
from xformer.attention.engine import mesh_axes

Array = jax.Array
Params = dict[str, Any]
Implementation = Literal["reference", "xla", "pallas", "splash", "cudnn"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one attention call. Lengths are in tokens; `num_kv_heads=None` means as many as `num_heads`."""

    batch: int
    q_len: int
    kv_len: int
    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size is None and field.name == "num_kv_heads":
                continue
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"Shape.{field.name} must be a positive integer, got {size!r}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.kv_heads}")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class Attention:
    """Base of all variants: a frozen dataclass of hyperparameters that is called to attend.

    Subclasses say what they do in `attend`, and describe themselves in `init`, `pattern` and `cost`.

    Positions count from 0 on the sides of queries and keys alike. In cross-attention an op that depends on positions (a
    window, BigBird, a position term, causal) therefore works when both lengths happen to be equal, position i of the
    one standing for position i of the other; with different lengths and no `query_offset` it raises ValueError.

    Attributes:
      causal: queries attend to no later position.
      implementation: None for the best one that supports the call, "xla" for the tiled engine, "reference" for plain
        dense arithmetic (it also supports forward-mode differentiation), "pallas" for the block-sparse kernels for
        GPUs, "splash" for JAX's kernel for TPUs, "cudnn" for cuDNN's flash attention. A kernel that can't do a call or
        is not on its platform raises NotImplementedError (`xformer.attention.kernels.interpreted` lets "pallas" and
        "splash" run on CPUs, right but slow).
    """

    causal: bool = dataclasses.field(default=False, kw_only=True)
    implementation: Implementation | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool | np.bool_):
            raise ValueError(f"{self._name}.causal must be True or False, got {self.causal!r}")
        if self.implementation is not None and self.implementation not in get_args(Implementation):
            choices = ", ".join(map(repr, get_args(Implementation)))
            raise ValueError(
                f"{self._name}.implementation must be None or one of {choices}, got {self.implementation!r}"
            )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        *,
        is_causal: bool = False,
        segment_ids: Array | tuple[Array, Array] | None = None,
        query_offset: int | Array | None = None,
        scale: float | Array | None = None,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        params: Params | None = None,
        plan: Any = None,
    ) -> Array:
        """Attends. The arguments are those of Flax's `attention_fn`, and a few more.

        Args:
          query: `[*batch, q_len, num_heads, head_dim]`, not scaled.
          key, value: `[*batch, kv_len, num_kv_heads, head_dim]`; `num_heads` is a multiple of `num_kv_heads`.
          bias: added to the scaled scores; broadcastable to `[*batch, num_heads, q_len, kv_len]`.
          mask: any dtype, pairs with `mask > 0` attend; broadcastable likewise. A padding mask `[batch, 1, 1, kv_len]`
            costs O(kv_len).
          is_causal: the same as `causal=True` on the op.
          segment_ids: int `[*batch, length]`, or a pair for queries and keys; different segments do not attend.
          query_offset: position of the first query, an int or an int array `[]` or `[*batch]`; positions of an array
            must stay below kv_len.
          scale: multiplies the scores, a number or an array `[]`; 1 / sqrt(head_dim) by default.
          dropout_rng, dropout_rate, broadcast_dropout, deterministic: dropout on the weights, as in Flax;
            `broadcast_dropout` shares a mask between batch entries and heads.
          dtype: inputs are cast to it and the output has it; query's dtype by default.
          precision: passed to the matrix products.
          module: Flax's request to sow the weights; not possible here, see `xformer.nn.AttentionFn`.
          params: what `init` gave.
          plan: one layer's entry of what `plans` gave: attends as `at_layer` of that layer does, in one trace.

        Returns:
          `[*batch, q_len, num_heads, head_dim]`. A query with nothing to attend to gets zeros and gives no gradient.

        Raises:
          ValueError: shapes that do not fit, missing params, or a missing `query_offset` where positions matter and
            the lengths differ.
          NotImplementedError: an argument that this variant cannot honour.
        """
        if is_causal and not self.causal:
            if plan is not None:
                raise ValueError(f"{self._name}: a plan is causal or not when made; make it with causal=True on the op")
            self = dataclasses.replace(self, causal=True)
        if module is not None:
            raise NotImplementedError(
                f"{self._name} never holds the attention weights; pass xformer.nn.AttentionFn({self._name}(...)) as "
                "attention_fn to sow them"
            )
        call = normalize(
            query, key, value, bias, mask, segment_ids, query_offset, scale, dropout_rng, dropout_rate,
            broadcast_dropout, deterministic, dtype, precision,
        )  # fmt: skip
        call = dataclasses.replace(call, plan=plan)
        return call.restore(by_example(functools.partial(mesh_axes.automatic, self.attend), call, params or {}))

    def attend(self, call: Call, params: Params) -> Array:
        """The variant itself, on a normalized call; returns `[batch, q_len, num_heads, head_dim]`."""
        raise NotImplementedError

    def weights(self, call: Call, params: Params) -> Array:
        """The weight of every pair `[batch, num_heads, q_len, kv_len]`, computed densely: to look at, not to train."""
        raise NotImplementedError(f"{self._name} mixes the length dimension: no token pair has a weight to sow")

    def check_params(self, params: Params, call: Call) -> None:
        """Raises ValueError unless `params` is what `init` gives for such a call."""
        (q_len, kv_len), (batch, _, num_heads, head_dim) = call.lengths, call.query.shape
        want = _param_shapes(self, Shape(batch, q_len, kv_len, num_heads, head_dim, call.key.shape[2]))
        have = {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(params)}
        if have != want:
            raise ValueError(f"{self._name} needs params {want or '{}'} (see init), got {have or 'none'}")

    def init(self, rng: Array, shape: Shape) -> Params:
        """Parameters for calls of this shape: a dict of float32 arrays, `{}` where there is none."""
        raise NotImplementedError

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> np.ndarray | None:
        """Which pairs the variant ever considers, bool `[num_heads or 1, q_len, kv_len]`; None where there are none."""
        raise NotImplementedError

    def cost(self, shape: Shape) -> Cost:
        """What a plain forward call of this shape costs, as the implementation executes it."""
        raise NotImplementedError

    def at_layer(self, index: int) -> Attention:
        """This op for layer number `index` of a model; the same op unless layers must differ."""
        return self

    def plans(self, shape: Shape, num_layers: int) -> Any:
        """What tells `at_layer(0)` to `at_layer(num_layers - 1)` apart in calls of this shape, for a scan over layers.

        Returns:
          A pytree of integer and bool arrays `[num_layers, ...]`; an entry of it is what `plan=` takes. None where
          layers do not differ.

        Raises:
          NotImplementedError: layers differ and the implementation cannot be told so at run time.
        """
        return None


@functools.lru_cache(maxsize=512)
def _param_shapes(op: Attention, shape: Shape) -> dict[str, tuple[int, ...]]:
    params = jax.eval_shape(lambda: op.init(jax.random.key(0), shape))
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}


def by_example(attend: Callable[[Call, Params], Array], call: Call, params: Params) -> Array:
    """`attend(call, params)`, mapped over the batch where every example has its own query offset."""
    if not isinstance(call.query_offset, jax.Array) or not call.query_offset.ndim:
        return attend(call, params)
    arrays: dict[str, Any] = {
        field.name: getattr(call, field.name)
        for field in dataclasses.fields(call)
        if field.name in Call.BATCHED and getattr(call, field.name) is not None
    }
    axes = {name: 0 if x.shape[0] == call.batch else None for name, x in arrays.items()}

    def one(index: Any, arrays: dict[str, Any]) -> Array:
        rng = call.dropout_rng
        if rng is not None and not call.broadcast_dropout:
            rng = jax.random.fold_in(rng, index)
        arrays = {name: x if axes[name] is None or name == "query_offset" else x[None] for name, x in arrays.items()}
        return attend(dataclasses.replace(call, dropout_rng=rng, **arrays), params)[0]

    return jax.vmap(one, in_axes=(0, axes))(np.arange(call.batch), arrays)
