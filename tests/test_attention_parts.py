"""Parts merge by their log-sum-exp: a union of disjoint patterns equals the op with the pattern of all."""

import dataclasses

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import BOTH, as_jax, close, forward_and_gradients, inputs, refuses

from xformer.attention import Attention, Full, Options, Window, merge_parts
from xformer.attention.pattern import Pattern
from xformer.attention.pattern import Window as Near
from xformer.attention.pattern_attention import PatternAttention


@dataclasses.dataclass(frozen=True)
class OfPattern(PatternAttention):
    """Attention over a pattern that is given."""

    near: Pattern | None = None

    def token_pattern(self, kv_len, num_heads):
        return self.near


@dataclasses.dataclass(frozen=True)
class Union(Attention):
    """The union of disjoint patterns, each attended for itself."""

    parts: tuple[Pattern, ...] = ()

    def init(self, rng, shape):
        return {}

    def attend(self, call, params):
        ops = [OfPattern(near=part, causal=self.causal, implementation=self.implementation) for part in self.parts]
        calls = [call, *[dataclasses.replace(call, sinks=None)] * (len(ops) - 1)]  # a sink is counted once
        return merge_parts([op.attend_lse(call, {}) for op, call in zip(ops, calls, strict=True)])[0]


# The first query has nothing in the past, and in a causal call no query has anything in the future.
PARTS = Near(20, -1), Near(0, 0), Near(-1, 9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_union_of_disjoint_patterns_is_their_union(implementation, causal, sinks):
    call = inputs(value_dim=6) | {"mask": conformance.padding([45, 20], 45), "softcap": 2.0}
    call["mask"] = call["mask"] & (np.arange(45) != 30)[:, None]  # query 30 sees nothing at all
    if sinks:
        call["sinks"] = np.asarray([0.3, -0.5, 0.0, 1.0], np.float32)
    fields, cotangent = {"implementation": implementation, "causal": causal}, conformance.random_cotangent(call)
    got = forward_and_gradients(Union(parts=PARTS, **fields), {}, as_jax(call), cotangent)
    want = forward_and_gradients(Window(left=20, right=9, **fields), {}, as_jax(call), cotangent)
    jax.tree.map(lambda a, b: close(a, np.asarray(b, np.float64), 3e-5), got, want)
    assert not np.any(got[0][:, 30]) and not np.any(got[2]["query"][:, 30])


def test_merging_gives_the_log_sum_exp_of_the_union():
    call = as_jax(inputs())
    part = lambda some: Full().attend_with_lse(**call, options=Options(mask=some))
    first = jnp.arange(45) < 17
    out, lse = merge_parts([part(first), part(~first), part(jnp.zeros(45, bool))])
    want, want_lse = part(None)
    close(out, np.asarray(want, np.float64))
    close(lse, np.asarray(want_lse, np.float64))
    out, lse = merge_parts([part(jnp.zeros(45, bool))] * 2)
    assert not np.any(out) and np.all(lse == -np.inf)


def test_no_parts_are_refused():
    with refuses(ValueError, "at least one"):
        merge_parts([])
