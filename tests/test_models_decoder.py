"""The decoder: against plain arithmetic in float64, nothing from the future or another document, chunks, decoding."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import CASES
from flax import nnx

from xformer import cost
from xformer.attention import BigBird, Compressed, Full, Layers, Linear, Linformer, Local, Retention, Rotary, Window
from xformer.models import MODELS
from xformer.nn import Logits

VOCAB, MAX_LEN, LENGTH = 11, 32, 20


def make(op=None, **options):
    sizes = {"num_layers": 2, "width": 16, "num_heads": 4, "mlp_dim": 24, **options}
    return MODELS["decoder"](VOCAB, MAX_LEN, attention=op or Full(), rngs=nnx.Rngs(0), **sizes)


def tokens(batch=2, length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length))


def dense(model, *args, **options):
    return np.asarray(nnx.jit(lambda model, args, options: model(*args, **options).dense())(model, args, options))


# Against plain arithmetic.


def normalize(norm, x, kind, eps):
    scale = np.asarray(norm.scale[...], np.float64)
    if kind == "rms":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + np.asarray(norm.bias[...], np.float64)


def forward(model, ids, *, norm="pre", kind="layer", eps=1e-6, activation="gelu", window=None, segments=None):
    """Logits `[length, vocab]` of one row, in float64."""
    value = lambda x: np.asarray(x[...], np.float64)
    length, width = len(ids), model.embed.table.shape[1]
    segments = np.zeros(length, int) if segments is None else np.asarray(segments)
    place = np.array([t - np.flatnonzero(segments == segments[t])[0] for t in range(length)])
    x = value(model.embed.table)[ids] * math.sqrt(width)
    if model.positions is not None and hasattr(model.positions, "table"):
        x = x + value(model.positions.table)[place] * math.sqrt(width)
    elif model.positions is not None:
        column = np.arange(width)
        angle = place[:, None] / 10000.0 ** (2 * (column // 2) / width)
        x = x + np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
    linear = lambda layer, x: x @ value(layer.kernel).reshape(x.shape[-1], -1) + value(layer.bias).reshape(-1)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance <= (length if window is None else window))
    seen &= segments[:, None] == segments

    def attend(layer, x):
        heads, kv_heads, depth = layer.num_heads, layer.kv_heads, layer.head_dim
        q, k, v = (
            linear(projection, x).reshape(length, count, depth)
            for projection, count in ((layer.query, heads), (layer.key, kv_heads), (layer.value, kv_heads))
        )
        if layer.query_norm is not None:
            q, k = normalize(layer.query_norm, q, "rms", 1e-6), normalize(layer.key_norm, k, "rms", 1e-6)
        out = np.zeros((length, heads, depth))
        for head in range(heads):
            own = head // (heads // kv_heads)
            scores = np.where(seen, q[:, head] @ k[:, own].T / math.sqrt(depth), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, own]
        return linear(layer.out, out.reshape(length, -1))

    def feed(layer, x):
        hidden = linear(layer.expand, x)
        gelu = lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        silu = lambda x: x / (1 + np.exp(-x))
        act = {"gelu": gelu, "relu": lambda x: np.maximum(x, 0), "swiglu": silu, "geglu": gelu}[activation]
        hidden = act(hidden) * (linear(layer.gate, x) if activation in ("swiglu", "geglu") else 1)
        return linear(layer.contract, hidden)

    for block in model.blocks:
        if norm == "pre":
            x = x + attend(block.attention, normalize(block.attention_norm, x, kind, eps))
            x = x + feed(block.feed_forward, normalize(block.feed_forward_norm, x, kind, eps))
        else:
            x = normalize(block.attention_norm, x + attend(block.attention, x), kind, eps)
            x = normalize(block.feed_forward_norm, x + feed(block.feed_forward, x), kind, eps)
    x = normalize(model.final_norm, x, kind, eps) if norm == "pre" else x
    return x @ value(model.embed.table if model.output_table is None else model.output_table).T


SHAPES = (
    {},
    {"tie_embeddings": False, "position_embedding": "learned", "activation": "relu", "norm": "post"},
    {"activation": "swiglu", "norm_type": "rms", "qk_norm": True, "num_kv_heads": 2, "head_dim": 6},
    {"norm": "post", "norm_type": "rms", "position_embedding": "none", "norm_epsilon": 1e-2, "activation": "geglu"},
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", SHAPES, ids=lambda options: "-".join(map(str, options.values())) or "plain")
def test_logits_are_those_of_plain_arithmetic(options, packed):
    window = 5 if options.get("norm") == "post" else None
    model = make(None if window is None else Window(left=window, right=3), **options)
    ids = tokens()
    segments = np.array([[1] * 7 + [2] * 9 + [3] * 4, [1] * 20]) if packed else None
    names = {"norm": "norm", "norm_type": "kind", "norm_epsilon": "eps", "activation": "activation"}
    chosen = {names[key]: value for key, value in options.items() if key in names}
    found = dense(model, ids, segment_ids=segments)
    for row in range(2):
        own = None if segments is None else segments[row]
        np.testing.assert_allclose(
            found[row], forward(model, ids[row], window=window, segments=own, **chosen), atol=2e-5
        )


def test_gradients_of_the_chunked_loss_are_those_of_the_whole():
    random = np.random.default_rng(1)
    hidden, table = random.normal(size=(3, 10, 8)), random.normal(size=(VOCAB, 8))
    targets, weights = random.integers(0, VOCAB, (3, 10)), random.random((3, 10))

    def whole(hidden, table):
        logits = hidden @ table.T
        loss = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, jnp.asarray(targets)[..., None], -1)[..., 0]
        return (loss * weights).sum()

    with jax.enable_x64(True):
        expected, gradients = jax.value_and_grad(whole, (0, 1))(jnp.asarray(hidden), jnp.asarray(table))
    hidden, table = jnp.asarray(hidden, jnp.float32), jnp.asarray(table, jnp.float32)
    for chunk_tokens in (None, 9, 1):  # all at once; 3 tokens of a row, the last chunk not full; 1
        loss = lambda h, t, n=chunk_tokens: (Logits(h, t).scores(targets, chunk_tokens=n)[0] * weights).sum()
        found, own = jax.value_and_grad(loss, (0, 1))(hidden, table)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        for one, other in zip(own, gradients, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        best = np.asarray(hidden @ table.T).argmax(-1)
        np.testing.assert_array_equal(Logits(hidden, table).argmax(chunk_tokens=chunk_tokens), best)
        np.testing.assert_array_equal(Logits(hidden, table).scores(targets, chunk_tokens=chunk_tokens)[1], best)


def test_the_logits_of_a_whole_batch_never_exist():
    """Not in the loss nor in its gradient, where they are larger than what may exist at a time."""
    logits = Logits(jnp.zeros((4, 600, 8)), jnp.zeros((8192, 8)))
    loss = lambda logits: logits.scores(jnp.zeros((4, 600), int))[0].sum()
    sizes = [v.aval.size for eqn in _equations(jax.make_jaxpr(jax.grad(loss))(logits).jaxpr) for v in eqn.outvars]
    assert max(sizes) <= 2**23 < 4 * 600 * 8192


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "jaxpr"):
                    yield from _equations(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from _equations(inner)


def test_scores_refuse_what_does_not_fit_and_mark_what_is_no_token():
    logits = Logits(jnp.ones((2, 3, 4)), jnp.ones((5, 4)))
    with pytest.raises(ValueError, match=r"targets must be \[batch, length\] as in \(2, 3, 4\), got \(2, 4\)"):
        logits.scores(jnp.zeros((2, 4), int))
    loss = logits.scores(jnp.array([[0, 4, 5], [-1, 2, 0]]))[0]
    np.testing.assert_array_equal(np.isnan(loss), [[False, False, True], [True, False, False]])
    np.testing.assert_allclose(loss[0, :2], math.log(5), rtol=1e-6)


# Leaks.


LEAKY = {
    "full": Full(),
    "bigbird": BigBird(block_size=4, num_random_blocks=1),
    "local": Local(block_size=4),
    "linear": Linear(),
    "retention": Retention(),
    "stack": Layers((Window(left=3, right=3), Full(position=Rotary()))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(LEAKY))
def test_nothing_comes_from_the_future_or_from_another_document(name):
    model, ids = make(LEAKY[name]), tokens()
    segments = np.array([[1] * 7 + [2] * 13] * 2)
    whole, packed = dense(model, ids), dense(model, ids, segment_ids=segments)
    later = ids.copy()
    later[:, 12:] = (later[:, 12:] + 1) % VOCAB
    np.testing.assert_allclose(dense(model, later)[:, :12], whole[:, :12], atol=1e-6)
    assert np.abs(dense(model, later)[:, 12:] - whole[:, 12:]).max() > 1e-3
    earlier = ids.copy()
    earlier[:, :7] = (earlier[:, :7] + 1) % VOCAB
    np.testing.assert_allclose(dense(model, earlier, segment_ids=segments)[:, 7:], packed[:, 7:], atol=1e-6)
    assert np.abs(dense(model, earlier)[:, 7:] - whole[:, 7:]).max() > 1e-4
    np.testing.assert_allclose(dense(model, ids[:, :7]), packed[:, :7], atol=2e-6)
    if name not in ("bigbird", "local"):  # those count blocks from the beginning of the row
        np.testing.assert_allclose(dense(model, ids[:, 7:]), packed[:, 7:], atol=2e-6)


def test_attention_is_made_causal_or_refused():
    assert make(Full()).attention.causal and make(LEAKY["stack"]).attention.causal
    with pytest.raises(NotImplementedError, match="Linformer"):
        make(Linformer(rank=4, max_len=MAX_LEN))
    with pytest.raises(NotImplementedError, match="segment_ids"):
        make(Compressed(stride=4))(tokens(), segment_ids=jnp.ones((2, LENGTH), int))


# Decoding.


def stepwise(model, ids, prompt=7):
    graph, state = nnx.split(model.unrolled())

    @jax.jit
    def read(state, ids, caches):
        logits, caches = nnx.merge(graph, state).decode(ids, caches)
        return logits.dense(), caches

    caches, found = nnx.merge(graph, state).init_caches(len(ids), MAX_LEN), []
    for start, stop in [(0, prompt), *((index, index + 1) for index in range(prompt, ids.shape[1]))]:
        logits, caches = read(state, ids[:, start:stop], caches)
        found.append(logits)
    return np.concatenate(found, axis=1), caches


def causal_ops():
    for case in CASES:
        if case.causal and case.offsets:
            for name, term in case.positions.items():
                fields = {"causal": True} | ({} if term is None else {"position": term})
                yield f"{case.name}-{name}", dataclasses.replace(case.op, **fields)


OPS = dict(causal_ops())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(OPS))
def test_step_logits_are_those_of_the_full_forward(name):
    kinds = ("learned", "sinusoidal", "none")
    kind = kinds[sorted(OPS).index(name) % 3]
    heads = {"share_qk": True} if OPS[name].SHARES_QK else {"num_kv_heads": 2}
    model, ids = make(OPS[name], position_embedding=kind, num_layers=2, **heads), tokens()
    found, _ = stepwise(model, ids)
    np.testing.assert_allclose(found, dense(model, ids), atol=1e-5)


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_scanned_stack_decodes_as_it_reads(remat):
    ops = Layers((BigBird(block_size=4, num_random_blocks=1), Window(left=3, right=0), Retention()))
    model = make(ops, num_layers=3, scan_layers=True, remat=remat)
    ids = tokens()
    np.testing.assert_allclose(stepwise(model, ids)[0], dense(model, ids), atol=1e-5)
    with pytest.raises(ValueError, match=r"got scan_layers=True: use model\.unrolled\(\)"):
        model.init_caches(2)


def test_caches_are_as_small_as_the_variant_allows():
    sizes = {}
    for name, op in {"full": Full(), "window": Window(left=3, right=0), "local": Local(block_size=4),
                     "linear": Linear()}.items():  # fmt: skip
        for max_len in (16, MAX_LEN):
            caches = make(op, num_layers=1, num_kv_heads=2).init_caches(2, max_len)
            sizes[name, max_len] = sum(x.nbytes for x in jax.tree.leaves(caches))
    row = 2 * 2 * 2 * 4 * 4  # key and value of two examples, two heads of 4, float32
    counter = 4
    assert sizes["full", MAX_LEN] == MAX_LEN * row + counter and sizes["full", 16] == 16 * row + counter
    assert sizes["window", MAX_LEN] == sizes["window", 16] == 3 * row + counter
    assert sizes["local", MAX_LEN] == sizes["local", 16] == 4 * row + counter
    assert sizes["linear", MAX_LEN] == sizes["linear", 16]
    assert sizes["linear", 16] <= 2 * 2 * (4 + 1) * (4 + 1) * 4 + 64


def test_a_token_costs_no_prefix():
    """FLOPs of a step: the layers of one token and the keys in the cache, whatever the length for a window."""
    flops = {}
    for name, op in {"full": Full(), "window": Window(left=3, right=0), "linear": Linear()}.items():
        model = make(op, position_embedding="none")
        for max_len in (16, MAX_LEN):
            caches = model.init_caches(1, max_len)
            step = lambda ids, caches, model=model: model.decode(ids, caches)[0].dense()
            counted = cost.count(step, jnp.zeros((1, 1), jnp.int32), caches)
            assert not counted.uncounted
            flops[name, max_len] = counted.flops
    layer = 2 * (4 * 16 * 16 + 2 * 16 * 24)  # projections and feed-forward
    head, scores = 2 * 16 * VOCAB, 2 * 2 * 16  # of one key: its score and its value
    assert flops["full", 16] == 2 * (layer + 16 * scores) + head
    assert flops["full", MAX_LEN] == 2 * (layer + MAX_LEN * scores) + head
    assert flops["window", MAX_LEN] == flops["window", 16] <= 2 * (layer + 8 * scores) + head
    assert flops["linear", MAX_LEN] == flops["linear", 16]


def test_bfloat16_and_dropout():
    model = make(dtype=jnp.bfloat16, dropout_rate=0.5)
    plain = make(dropout_rate=0.5)
    ids = tokens()
    np.testing.assert_allclose(dense(model, ids), dense(plain, ids), atol=0.2)
    assert model(ids).hidden.dtype == jnp.float32
    draw = lambda seed: model(ids, deterministic=False, rngs=nnx.Rngs(dropout=seed)).dense()
    assert np.abs(np.asarray(draw(0) - draw(1))).max() > 0.1
