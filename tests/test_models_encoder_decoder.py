"""The encoder-decoder: what it may see, by value and by gradient; its steps; its options; what it refuses."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer.attention import (
    ALiBi,
    BigBird,
    Compressed,
    Full,
    Layers,
    Linformer,
    Local,
    MusicRelative,
    Performer,
    Shaw,
    Window,
)
from xformer.checks import ArgumentError
from xformer.generate import generate, stream
from xformer.models import MODELS
from xformer.tree_paths import path_name

SOURCE_LEN, TARGET_LEN, VOCAB = 12, 9, 11
random = np.random.default_rng(0)
SOURCES, LENGTHS = random.integers(1, VOCAB, (3, SOURCE_LEN)), np.array([12, 5, 8])
MASK = np.arange(SOURCE_LEN) < LENGTHS[:, None]
TARGETS = np.concatenate([np.zeros((3, 1), int), random.integers(1, VOCAB, (3, TARGET_LEN - 1))], axis=1)
TARGET_MASK = np.arange(TARGET_LEN) < np.array([9, 4, 7])[:, None]
OPTIONS = {
    "plain": {"num_layers": 2},
    "scan": {"scan_layers": True, "remat": True, "num_layers": 3, "num_decoder_layers": 2},
    "post": {"norm": "post", "tie_embeddings": False, "shared_embeddings": False, "target_vocab_size": 7},
    "linformer": {"cross_attention": Linformer(rank=4, max_len=SOURCE_LEN), "decoder_attention": Window(3, 0)},
    "grouped": {"num_kv_heads": 1, "qk_norm": True, "position_embedding": "learned"},
    "stacks": {
        "decoder_attention": Layers((Local(block_size=4), Compressed())),
        "cross_attention": Performer(),
        "attention": BigBird(block_size=4),
        "num_layers": 2,
    },
}


def make(vocab=VOCAB, **options):
    sizes = {"attention": Full(), "num_layers": 1, "width": 16, "num_heads": 2, "mlp_dim": 24, **options}
    return MODELS["encoder_decoder"](vocab, SOURCE_LEN, target_max_len=TARGET_LEN, rngs=nnx.Rngs(3), **sizes)


def run(model, sources=SOURCES, mask=MASK, targets=TARGETS, target_mask=TARGET_MASK, **options):
    return np.asarray(nnx.jit(lambda model: model(sources, mask, targets, target_mask, **options).dense())(model))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", list(OPTIONS))
def test_step_by_step_it_says_what_it_says_at_once(name):
    """The encoder runs once; each step reads the keys and values that were made of the sources then."""
    model = make(**OPTIONS[name])
    targets = TARGETS % model.target_decoder.embed.table.shape[0]
    whole, unrolled = run(model, targets=targets), model.unrolled()

    @nnx.jit
    def steps(model):
        context, caches, found = model.read(SOURCES, MASK), model.init_caches(3), []
        for place in range(TARGET_LEN):
            logits, caches = model.decode(targets[:, place : place + 1], caches, context=context)
            found.append(logits.dense())
        return jnp.concatenate(found, axis=1)

    np.testing.assert_allclose(np.asarray(steps(unrolled))[TARGET_MASK], whole[TARGET_MASK], rtol=1e-4, atol=2e-6)


def test_padding_and_the_future_change_nothing():
    model = make()
    whole = run(model)
    other = np.where(MASK, SOURCES, 7)
    np.testing.assert_array_equal(run(model, other)[TARGET_MASK], whole[TARGET_MASK])
    later = np.where(TARGET_MASK, TARGETS, 7)
    np.testing.assert_array_equal(run(model, targets=later)[TARGET_MASK], whole[TARGET_MASK])
    changed = TARGETS.copy()
    changed[:, 5:] = 1
    np.testing.assert_array_equal(run(model, targets=changed)[:, :5], whole[:, :5])
    shorter = run(model, SOURCES[1:2, :5], MASK[1:2, :5], TARGETS[1:2], TARGET_MASK[1:2])
    np.testing.assert_allclose(shorter[TARGET_MASK[1:2]], whole[1:2][TARGET_MASK[1:2]], rtol=1e-5, atol=1e-6)


def test_its_encoder_is_called_as_any_other():
    """So that `train.init_from` finds the parameters of a pretrained one."""
    shapes = lambda model: {
        path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    }
    sizes = {"attention": Full(), "num_layers": 2, "width": 16, "num_heads": 2, "mlp_dim": 24}
    alone = shapes(MODELS["classifier"](VOCAB, 3, SOURCE_LEN, **sizes, rngs=nnx.Rngs(0)))
    trunk = {name: shape for name, shape in alone.items() if name.startswith(("blocks/", "final_norm/", "embed/"))}
    assert len(trunk) > 20 and trunk.items() <= shapes(make(num_layers=2)).items()


def test_a_target_reads_its_own_source_alone():
    """Each source moves the logits of its own row, through every real token and no other."""
    model = make()
    _, state = nnx.split(model)
    vectors = jnp.asarray(model.embed(SOURCES))
    graph = nnx.graphdef(model)

    def logit(vectors):
        model = nnx.merge(graph, state)
        model.embed_tokens = lambda inputs: vectors
        return model(SOURCES, MASK, TARGETS, TARGET_MASK).dense()[1, 2, 3]

    moved = np.abs(np.asarray(jax.grad(logit)(vectors))).max(axis=-1)
    np.testing.assert_array_equal(moved > 0, np.where(np.arange(3)[:, None] == 1, MASK, False))


def test_pairs_that_share_a_row_do_not_meet():
    model = make()
    alone = run(model, SOURCES[1:3, :5], None, TARGETS[1:3, :4], None)
    sources = np.concatenate([SOURCES[1, :5], SOURCES[2, :5], [0, 0]])[None]
    targets = np.concatenate([TARGETS[1, :4], TARGETS[2, :4], [0]])[None]
    segments, target_segments = np.array([[1] * 5 + [2] * 5 + [0] * 2]), np.array([[1] * 4 + [2] * 4 + [0]])
    shared = run(model, sources, segments > 0, targets, target_segments > 0,
                 segment_ids=segments, decoder_segment_ids=target_segments)  # fmt: skip
    np.testing.assert_allclose(shared[0, :8], alone.reshape(8, VOCAB), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("scan", [False, True])
def test_recomputed_and_scanned_layers_have_the_same_gradients(scan):
    def gradients(**options):
        model = make(dropout_rate=0.1, num_layers=2, **options)
        loss = lambda model: model(SOURCES, MASK, TARGETS, TARGET_MASK, deterministic=False,
                                   rngs=nnx.Rngs(dropout=5)).scores(jnp.asarray(TARGETS))[0].mean()  # fmt: skip
        value, grads = nnx.jit(nnx.value_and_grad(loss))(model)
        return float(value), float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads))))

    np.testing.assert_allclose(gradients(remat=True, scan_layers=scan), gradients(), rtol=1e-5)


def test_one_table_serves_both_sides_and_the_output():
    count = lambda model: sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    table = VOCAB * 16
    assert count(make(shared_embeddings=False)) - count(make()) == table
    assert count(make(tie_embeddings=False)) - count(make()) == table
    assert run(make(dtype=jnp.bfloat16)).dtype == np.float32


REFUSED = {
    "positions": ({"cross_attention": Window(1, 1)}, "cross_attention takes an op to which positions mean nothing"),
    "blocks": (
        {"cross_attention": BigBird(block_size=4)},
        "cross_attention takes an op .*BigBird depends on positions",
    ),
    "a term": ({"cross_attention": Full(position=Shaw())}, "cross_attention takes an op .* depends on positions"),
    "slopes": ({"cross_attention": Layers((Full(), Full(position=ALiBi())))}, r"cross_attention.layers\[1\] takes an"),
    "causal": ({"cross_attention": Full(causal=True)}, "cross_attention.causal must be False"),
    "short": ({"cross_attention": Linformer(rank=2, max_len=4)}, "cross_attention.max_len must be at least 12"),
    "own": (
        {"decoder_attention": Full(position=MusicRelative(max_len=4))},
        "decoder_attention.position.max_len must be at least 9",
    ),
    "sizes": ({"target_vocab_size": 5}, "shared_embeddings must be False where vocabularies differ, got 11 and 5"),
    "entries": (
        {"cross_attention": Layers((Full(), Performer())), "scan_layers": True},
        "cross_attention must have 1 entry or 1, as decoder_attention",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_is_refused(name):
    options, message = REFUSED[name]
    with pytest.raises((ValueError, ArgumentError), match=message):
        make(**options)


def test_a_decoder_that_cannot_be_causal_is_refused():
    with pytest.raises(NotImplementedError, match="causal"):
        make(decoder_attention=Linformer(rank=2, max_len=TARGET_LEN))


def spread(model):
    """The model with logits far apart, so that texts differ."""
    table = model.target_decoder.output_table
    table[...] = 6.0 * jax.random.normal(jax.random.key(1), table.shape)
    return model


def test_greedy_targets_are_those_of_the_whole_forward():
    model = spread(make(tie_embeddings=False, scan_layers=True))
    found = np.asarray(generate(model, SOURCES, LENGTHS, max_tokens=8))
    read = np.concatenate([np.zeros((3, 1), int), found[:, :-1]], axis=1)
    np.testing.assert_array_equal(run(model, targets=read, target_mask=None).argmax(-1), found)
    assert len(np.unique(found)) > 2
    np.testing.assert_array_equal(np.stack(list(stream(model, SOURCES, LENGTHS, max_tokens=8)), axis=1), found)
    alone = generate(model, SOURCES[1:2, :5], LENGTHS[1:2], max_tokens=8)
    np.testing.assert_array_equal(alone[0], found[1])
    with pytest.raises(ValueError, match="max_tokens must be at most the model's target_max_len 9, got 10"):
        generate(model, SOURCES, LENGTHS, max_tokens=10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length_penalty", [0.0, 2.0])
def test_wide_beams_find_what_exhaustive_search_finds(length_penalty):
    """All beams of a source read one copy of its keys."""
    size, steps = 4, 4
    model = make(size, tie_embeddings=False)
    table = model.target_decoder.output_table
    table[...] = 2.0 * jax.random.normal(jax.random.key(3), table.shape)  # some of the best texts end early
    sources = SOURCES % size
    every = np.array(list(itertools.product(range(size), repeat=steps)))
    read = np.concatenate([np.zeros((len(every), 1), int), every[:, :-1]], axis=1)
    options = {"max_tokens": steps, "num_beams": size**steps, "length_penalty": length_penalty, "end_id": 0}
    found = np.asarray(generate(model, sources, LENGTHS, **options))
    counts = set()
    for row in range(3):
        tile = lambda x, row=row: np.tile(x[row : row + 1], (len(every), 1))
        logits = run(model, tile(sources), tile(MASK), read, None).astype(np.float64)
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        best, winner = -np.inf, None
        for text, own in zip(every, scores, strict=True):
            stop = np.flatnonzero(text == 0)
            count = int(stop[0]) + 1 if stop.size else steps
            score = own[np.arange(count), text[:count]].sum() / ((5 + count) / 6) ** length_penalty
            if score > best + 1e-6:
                best, winner = score, np.where(np.arange(steps) < count, text, 0)
        np.testing.assert_array_equal(found[row], winner)
        counts.add(np.count_nonzero(winner))
    assert len(counts) > 1 or length_penalty
