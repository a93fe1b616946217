"""The conformance suite's table and tools. A new variant is one row in CASES; test_attention_*.py run on every row."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references

from xformer.attention import (
    ALiBi,
    Attention,
    BigBird,
    Compressed,
    Full,
    Linear,
    Linformer,
    Local,
    Longformer,
    MusicRelative,
    Nystrom,
    Performer,
    Reformer,
    Retention,
    Rotary,
    Routing,
    Shape,
    Shaw,
    Sinkhorn,
    Sparse,
    Synthesizer,
    T5Bias,
    TopKBlocks,
    Window,
)

LENGTH, BATCH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 45, 2, 4, 2, 4, 6
NO_POSITION: Mapping[str, Any] = {"none": None}
POSITION_TERMS: Mapping[str, Any] = NO_POSITION | {
    "shaw": Shaw(max_distance=5, values=True),
    "shaw-far": Shaw(max_distance=60, values=True),
    "music": MusicRelative(max_len=64),
    "t5": T5Bias(num_buckets=8, max_distance=20),
    "alibi": ALiBi(),
    "rotary": Rotary(base=100.0),
}
FEW_POSITIONS: Mapping[str, Any] = {name: POSITION_TERMS[name] for name in ("none", "shaw", "t5")}

SOME_POSITIONS = {name: POSITION_TERMS[name] for name in ("none", "shaw", "alibi", "rotary")}


@dataclasses.dataclass(frozen=True)
class Case:
    """One variant: how it is made, its float64 reference, and what it can't do by definition.

    `reference(op, params, query, key, value, *, offset, mask, bias, segment_ids, scale, softcap, sinks)` returns the
    float64 output.
    """

    name: str
    op: Attention
    reference: Callable[..., np.ndarray]
    positions: Mapping[str, Any] = dataclasses.field(default_factory=lambda: POSITION_TERMS)
    causal: bool = True  # can be causal
    pairs: bool = True  # relates token pairs: takes bias, any segments, softcap, sinks and masks that differ by query
    segments: bool = True  # takes segments that lie in one piece each
    dropout: bool = True  # has weights that may be dropped
    normalized: bool = True  # the output is a mean of values, whatever the size of the scores
    masks: bool = True  # with pairs, takes masks and segments that differ by query
    keys: bool = True  # scores come from keys
    smooth: bool = True  # a small step of a query or key moves the output little: no choice, no kink
    deep_values: bool = True  # takes values of another depth than keys
    local: bool = True  # depends on positions even without a position term
    offsets: bool = True  # takes a query_offset, as decoding needs
    mixes_queries: bool = False  # earlier queries move what a query sees: they have a gradient
    tied: bool = False  # hashes queries where keys are meant to be them: decoding differs where they are not
    appendable: bool = True  # appended padding changes nothing; causal, it never does
    max_len: int = 10**6


def linformer(**fields):
    name = "-".join(["linformer", *(str(value) for value in fields.values())])
    return Case(name, Linformer(rank=6, max_len=48, **fields), references.linformer, NO_POSITION, causal=False,
                pairs=False, segments=False, local=False, max_len=48,
                deep_values=(fields.get("sharing"), fields["projection"]) != ("key_value", "conv"))  # fmt: skip


def running_state(name, op, reference, **flags):
    positions = {name: POSITION_TERMS[name] for name in ("none", "rotary")}
    return Case(name, op, reference, positions, pairs=False, dropout=False, **{"local": False, **flags})


def nystrom(name, **fields):
    return Case(name, Nystrom(**fields), references.nystrom, NO_POSITION, causal=False, pairs=False, segments=False)


def synthesizer(kind):
    op = Synthesizer(kind, max_len=64, rank=3)
    return Case(
        f"synthesizer-{kind}",
        op,
        references.synthesizer,
        NO_POSITION,
        keys=False,
        smooth="dense" not in kind,
        max_len=64,
    )


CASES = (
    Case("full", Full(), references.full, local=False),
    Case("window", Window(left=4, right=2), references.window),
    Case("bigbird", BigBird(block_size=8, num_random_blocks=1, num_window_blocks=3, num_global_blocks=2, seed=3),
         references.by_pattern, appendable=False),
    Case("bigbird-etc", BigBird(block_size=4, num_random_blocks=2, num_window_blocks=1, num_global_blocks=0,
                                num_global_tokens=3, seed=1), references.by_pattern, NO_POSITION, appendable=False),
    Case("local", Local(block_size=7), references.local),
    Case("longformer", Longformer(window=4, dilation=3, num_global_tokens=2), references.longformer),
    Case("sparse", Sparse(stride=7), references.sparse),
    Case("sparse-fixed", Sparse(stride=8, kind="fixed", summary=2, heads="split"), references.sparse, FEW_POSITIONS),
    *(linformer(sharing=sharing, projection="learned") for sharing in ("none", "headwise", "key_value")),
    *(linformer(sharing=sharing, projection="conv") for sharing in ("none", "headwise", "key_value")),
    linformer(projection="mean"),
    running_state("linear", Linear(), references.linear),
    running_state("performer", Performer(num_features=6, seed=4), references.performer),
    running_state("performer-relu", Performer(num_features=6, kernel="relu", seed=4), references.performer),
    running_state("retention", Retention(), references.retention, local=True, normalized=False),
    nystrom("nystrom", num_landmarks=6),
    nystrom("nystrom-conv", num_landmarks=5, num_iterations=4, conv_size=7),
    Case("compressed", Compressed(stride=3), references.compressed, NO_POSITION, pairs=False, segments=False,
         local=False),
    Case("reformer", Reformer(num_hashes=2, num_buckets=4, bucket_size=5, seed=2), references.reformer, SOME_POSITIONS,
         masks=False, smooth=False, tied=True),
    Case("routing", Routing(num_clusters=4, window=9, seed=3), references.routing, SOME_POSITIONS, causal=False,
         masks=False, smooth=False),
    Case("sinkhorn", Sinkhorn(block_size=8, num_iterations=3), references.sinkhorn, NO_POSITION, pairs=False,
         segments=False, offsets=False, mixes_queries=True),
    *(synthesizer(kind) for kind in ("dense", "random", "factorized_dense", "factorized_random")),
    Case("topk_blocks", TopKBlocks(block_size=8, num_blocks=3), references.topk_blocks, SOME_POSITIONS, masks=False,
         smooth=False),
    Case("topk_blocks-block", TopKBlocks(block_size=8, num_blocks=2, gate="block"), references.topk_blocks,
         causal=False, masks=False, smooth=False),
)  # fmt: skip


BOTH = ("reference", "xla")
WHOLE = ("full", "window", "bigbird")  # every position term, causal and not, in every implementation


def one_of_each(case):
    """Whether the case is the first of its variant: for properties that differ by variant only."""
    return next(other for other in CASES if type(other.op) is type(case.op)) is case


@dataclasses.dataclass(frozen=True)
class Row:
    """A case under one position term, causal or not, in one implementation."""

    name: str
    case: Case
    op: Attention

    def __str__(self):
        return self.name

    @property
    def local(self):
        """Whether the output depends on positions at all."""
        return self.case.local or self.op.causal or getattr(self.op, "position", None) is not None


def rows(*, positions=False, causal=(False,), implementations=(None,), where=lambda case: True):
    """The table as a pytest parametrisation named `row`; arguments multiply the cases by what is legal.

    Of the rows that share variant, position term and implementation, `make test` runs one (without a position term
    both, causal and not), `make test-full` the others. Variants that rest on the engine of `WHOLE` meet each position
    term once, causal or not and in one implementation in turn.
    """
    table, groups = [], {}
    for turn, case in enumerate(filter(where, CASES)):
        for term, position in case.positions.items() if positions else [("none", None)]:
            flags = [flag for flag in causal if case.causal or not flag]
            met = list(itertools.product(implementations, flags))
            if term != "none" and case.name not in WHOLE:
                turn += 1
                met = met[turn % len(met) :][:1] if met else []
            for implementation in implementations:
                # No implementation given is "xla" on a CPU; shaw-far is Shaw's term with another distance.
                group = groups.setdefault((_variant(case), term.partition("-")[0], implementation or "xla"), [])
                for flag in flags:
                    if (implementation, flag) not in met:
                        continue
                    fields = {"implementation": implementation, "causal": flag}
                    fields |= {"position": position} if position is not None else {}
                    labels = [case.name, term if positions else "", "causal" if flag else "", implementation or ""]
                    name = "-".join(label for label in labels if label)
                    group.append(Row(name, case, dataclasses.replace(case.op, **fields)))
    for index, ((_, term, _), group) in enumerate(groups.items()):
        if not group:
            continue
        turn = index + index // len(implementations)  # so that each implementation has causal rows and others
        chosen, first = group[turn % len(group)], group[0]
        for row in group:
            plain = term == "none" and (row.case, row.op.implementation) == (first.case, first.op.implementation)
            table.append(pytest.param(row, marks=() if row is chosen or plain else pytest.mark.full))
    return pytest.mark.parametrize("row", table, ids=str)


def sampled(name, values, *, keep, **options):
    """A parametrisation of which `make test` runs the values in `keep` and `make test-full` the others."""
    assert set(keep) <= set(values), f"{keep} not all in {values}"
    marked = [value if value in keep else pytest.param(value, marks=pytest.mark.full) for value in values]
    return pytest.mark.parametrize(name, marked, **options)


def _variant(case):
    """What one row stands for: a variant with the kind of projection where it has one, or a pattern of its own."""
    projection = getattr(case.op, "projection", None)
    return (type(case.op), projection) if projection else case.name


def with_fields(row, **fields):
    """The row with some of its op's fields replaced."""
    return dataclasses.replace(row, op=dataclasses.replace(row.op, **fields))


def reaching(row, length):
    """The row with its op and its position term made for `length` tokens, where they have a maximum."""
    if getattr(row.op, "max_len", length) < length:
        row = with_fields(row, max_len=length)
    position = getattr(row.op, "position", None)
    if getattr(position, "max_len", length) >= length:
        return row
    return with_fields(row, position=dataclasses.replace(position, max_len=length))


def inputs(
    *, q_len=LENGTH, kv_len=None, batch=BATCH, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, value_dim=None, seed=0
):
    """Float32 query, key and value with entries of size 1."""
    rng = np.random.default_rng(seed)
    kv_len = q_len if kv_len is None else kv_len
    shapes = {"query": (q_len, heads), "key": (kv_len, kv_heads), "value": (kv_len, kv_heads)}
    depths = {"query": head_dim, "key": head_dim, "value": value_dim or head_dim}
    return {name: rng.normal(size=(batch, *s, depths[name])).astype(np.float32) for name, s in shapes.items()}


def padding(lengths, kv_len):
    """Key-padding mask bool `[batch, 1, 1, kv_len]` that keeps the first `lengths` tokens."""
    return (np.arange(kv_len) < np.asarray(lengths)[:, None])[:, None, None]


def everything(row, *, seed=0, q_len=LENGTH, batch=BATCH):
    """A call with every argument that the row takes; one row sees nothing.

    Grouped heads, values deeper than keys, a mask, a bias, segments, a scale for each head, a softcap, sinks.
    """
    rng = np.random.default_rng(seed + 100)
    value_dim = VALUE_DIM if row.case.deep_values else HEAD_DIM
    call = inputs(seed=seed, q_len=q_len, batch=batch, value_dim=value_dim)
    call["scale"] = rng.uniform(0.4, 1.0, HEADS).astype(np.float32)
    if not row.case.pairs:
        whole = np.sort(rng.integers(0, 3, (batch, q_len))).astype(np.int32)
        segments = {"segment_ids": whole} if row.case.segments else {}
        return call | {"mask": rng.random((batch, 1, 1, q_len)) < 0.7} | segments
    if row.case.masks:
        mask = rng.random((batch, HEADS, q_len, q_len)) < 0.8
        mask[0, :, q_len // 2] = False
        segments = np.sort(rng.integers(0, 2, (batch, q_len))).astype(np.int32)
        call |= {"mask": mask, "segment_ids": segments}
    else:
        call["mask"] = rng.random((batch, HEADS, 1, q_len)) < 0.8
    bias = rng.normal(size=(batch, HEADS, q_len, q_len)).astype(np.float32)
    sinks = rng.normal(size=HEADS).astype(np.float32)
    return call | {"bias": bias, "softcap": 1.5, "sinks": sinks}


def parameters(op, call, seed=0):
    """Random parameters in the shapes of `op.init` (whose own values may be zero)."""
    shaped = op.init(jax.random.key(0), shape_of(call))
    rng = np.random.default_rng(seed + 7)
    return jax.tree.map(lambda x: (rng.normal(size=x.shape) * 0.5).astype(np.float32), shaped)


def shape_of(call):
    """The `Shape` of a call."""
    (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = call["query"].shape, call["key"].shape
    return Shape(batch, q_len, kv_len, heads, dim, kv_heads, call["value"].shape[-1])


def attend(op, params, call, **options):
    """The op itself, without a params argument where it has none."""
    return op(**call, **({"params": params} if params else {}), **options)


FLOATS = ("query", "key", "value", "bias", "scale", "sinks")


def forward(op, params, call, options=()):
    """Compiled output; `options` are static (name, value) pairs, as Python scalars in the call are."""
    return _forward(op, params, *_static(call, options))


def forward_and_gradients(op, params, call, cotangent, options=()):
    """Compiled output and the gradients of <cotangent, output> to params and every float array of the call."""
    return _forward_and_gradients(op, params, *_static(call, options), cotangent)


def _static(call, options):
    scalars = {name: x for name, x in call.items() if isinstance(x, int | float)}
    return {name: x for name, x in call.items() if name not in scalars}, (*options, *scalars.items())


_compiled = functools.partial(jax.jit, static_argnames=("op", "options"))


@_compiled
def _forward(op, params, call, options):
    return attend(op, params, call, **dict(options))


@_compiled
def _forward_and_gradients(op, params, call, options, cotangent):
    floats = {name: call[name] for name in FLOATS if name in call}
    rest = {name: call[name] for name in call if name not in FLOATS}
    out, pull = jax.vjp(lambda params, floats: attend(op, params, floats | rest, **dict(options)), params, floats)
    return out, *pull(cotangent.astype(out.dtype))


def expected(row, params, call, offset=0):
    """The reference's float64 output. An array offset is one an example."""
    options = {name: call.get(name) for name in ("mask", "bias", "segment_ids", "scale", "softcap", "sinks")}
    arrays = call["query"], call["key"], call["value"]
    if np.ndim(offset) == 0:
        return row.case.reference(row.op, params, *arrays, offset=int(offset), **options)
    assert all(options[name] is None for name in ("mask", "bias", "segment_ids"))
    each = [row.case.reference(row.op, params, *(x[i : i + 1] for x in arrays), offset=int(start), **options)
            for i, start in enumerate(offset)]  # fmt: skip
    return np.concatenate(each)


def close(got, want, tolerance=2e-5, message=""):
    """Elementwise, absolute for small entries and relative for large ones."""
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=message)


def check_gradients(row, params, call, cotangent, gradients, tolerance=3e-5, offset=0):
    """Every gradient against complex-step derivatives of the reference in random directions."""
    params_gradient, floats_gradient = gradients
    rng = np.random.default_rng(5)
    leaves, tree = jax.tree.flatten(params)

    def of_leaf(index, leaf):
        return jax.tree.unflatten(tree, [*leaves[:index], leaf, *leaves[index + 1 :]])

    points = [(name, call[name], gradient, lambda x, name=name: expected(row, params, call | {name: x}, offset))
              for name, gradient in floats_gradient.items()]  # fmt: skip
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for index, gradient in enumerate(jax.tree.leaves(params_gradient)):
        function = lambda x, index=index: expected(row, of_leaf(index, x), call, offset)
        points.append((paths[index], leaves[index], gradient, function))
    for name, point, gradient, function in points:
        gradient = np.asarray(gradient, np.float64)
        assert gradient.shape == np.shape(point), name
        assert np.isfinite(gradient).all(), name
        for _ in range(2):
            direction = rng.normal(size=np.shape(point))
            want = np.vdot(cotangent, references.derivative(function, point, direction))
            got = np.vdot(gradient, direction)
            size = np.linalg.norm(gradient) + 0.1
            assert abs(got - want) <= tolerance * size, f"gradient to {name}: expected {want}, got {got}"


def random_cotangent(call, seed=3):
    """Float32, shaped like the output."""
    shape = (*call["query"].shape[:-1], call["value"].shape[-1])
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn(examples):
    """Hypothesis settings: the same few examples every time, whatever the machine's load."""
    slow = hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large
    return hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=slow)


@contextlib.contextmanager
def refuses(error, *words):
    """Raises `error` with a message of one line that has every word."""
    with pytest.raises(error) as raised:
        yield
    text = str(raised.value)
    assert text and "\n" not in text, f"not one line: {text!r}"
    assert all(word in text for word in words), f"{words} not all in {text!r}"


def as_jax(call):
    """The arrays of a call as JAX arrays, scalars left alone."""
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
