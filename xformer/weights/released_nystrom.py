"""Nystrom attention as the released PyTorch code of Nystromformer computes it, which its weights are used with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from xformer.attention import Cost, Full, Nystrom, Shape, slots
from xformer.attention import nystrom as paper
from xformer.attention.call import Call
from xformer.attention.cost import call_cost
from xformer.attention.signature import Params
from xformer.checks import check_integer

Array = jax.Array
MESSAGE = "the released code takes inputs of `segment_means_len` tokens only, unless that is num_landmarks"


@dataclasses.dataclass(frozen=True)
class ReleasedNystrom(Nystrom):
    """`Nystrom` with what transformers 5 does otherwise than the paper (Xiong et al. 2021).

    - With as many landmarks as `segment_means_len` attention is full, whatever the length; with fewer, inputs have
      exactly that length.
    - Padding counts: in the means, as keys that landmarks stand for, and in the convolution.
    - The iteration for the pseudo-inverse starts from one number for the whole batch, the largest column sum of all
      examples and heads: what an example gives depends on the others.

    Attributes:
      segment_means_len: tokens that the landmarks divide, a multiple of `num_landmarks`.
    """

    segment_means_len: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("ReleasedNystrom.segment_means_len", self.segment_means_len)
        if self.segment_means_len % self.num_landmarks:
            raise ValueError(
                f"ReleasedNystrom.segment_means_len must be a multiple of num_landmarks {self.num_landmarks}, got "
                f"{self.segment_means_len}"
            )

    def attend(self, call: Call, params: Params) -> Array:
        q_len, kv_len = call.lengths
        full = self.num_landmarks == self.segment_means_len
        if q_len != kv_len or not (full or q_len == self.segment_means_len):
            raise ValueError(f"ReleasedNystrom: got {q_len} queries and {kv_len} keys, {MESSAGE}")
        slots.without_padding("ReleasedNystrom", call)  # refuses masks that differ by query
        self.check_params(params, call)
        num_heads, dtype = call.query.shape[2], jnp.promote_types(call.query.dtype, jnp.float32)
        every_head = lambda x: jnp.repeat(x.astype(dtype), num_heads // x.shape[2], axis=2)
        query, value = call.query.astype(dtype) * call.scale, every_head(call.value)
        if call.head_scale is not None:
            query = query * call.head_scale[None, None, :, None]
        scaled = dataclasses.replace(
            call, query=query, key=every_head(call.key), value=value, scale=1.0, head_scale=None
        )
        attend = Full(implementation=self.implementation).attend
        out = attend(scaled, {}) if full else self._by_landmarks(scaled, attend)
        if self.conv_size:
            kernel = slots.for_heads(params, num_heads)["conv"]
            out = out + paper.depthwise_convolution(value, kernel, call.precision)
        return out

    def _by_landmarks(self, call: Call, attend: Callable[[Call, Params], Array]) -> Array:
        batch, _, heads, depth = call.query.shape
        mean = lambda x: x.reshape(batch, self.num_landmarks, -1, heads, depth).mean(2)
        product = lambda a, b: jnp.einsum("bmhd,bnhd->bhmn", a, b, precision=call.precision)
        q_marks, k_marks = mean(call.query), mean(call.key)
        middle = jax.nn.softmax(product(q_marks, k_marks))
        inverse = paper.pseudo_inverse(middle, self.num_iterations, norm=middle.sum(-2).max())
        seen = attend(dataclasses.replace(call, query=q_marks), {})
        seen = jnp.einsum("bhmn,bnhd->bmhd", inverse, seen, precision=call.precision)
        of_landmarks = dataclasses.replace(call, key=k_marks, value=seen, mask=None, dropout_rate=0.0)
        return attend(of_landmarks, {})

    def cost(self, shape: Shape) -> Cost:
        heads = shape.batch * shape.num_heads
        m, full = self.num_landmarks, Full(implementation=self.implementation)
        given, shape = shape, dataclasses.replace(shape, num_kv_heads=shape.num_heads)
        if m == self.segment_means_len:
            flops = full.cost(shape).flops
        else:
            flops = 2 * heads * m * m * (shape.head_dim + 4 * self.num_iterations * m + shape.value_depth)
            flops += full.cost(dataclasses.replace(shape, q_len=m)).flops
            flops += full.cost(dataclasses.replace(shape, kv_len=m)).flops
        if self.conv_size:
            flops += paper.convolution_flops(self.conv_size, shape.kv_len, heads, shape.value_depth)
        return call_cost(given, flops, jax.eval_shape(lambda: self.init(jax.random.key(0), given)))
