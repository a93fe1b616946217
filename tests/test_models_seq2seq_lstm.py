"""The translating LSTM: the paper's formulas, what it may see, and its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer.critical_path import sequential_products
from xformer.generate import generate
from xformer.models import Seq2SeqLSTM

SOURCE_LEN, TARGET_LEN, VOCAB, WIDTH, HIDDEN = 7, 6, 11, 4, 5
random = np.random.default_rng(0)
SOURCES, LENGTHS = random.integers(1, VOCAB, (3, SOURCE_LEN)), np.array([7, 3, 5])
MASK = np.arange(SOURCE_LEN) < LENGTHS[:, None]
TARGETS = np.concatenate([np.zeros((3, 1), int), random.integers(1, VOCAB, (3, TARGET_LEN - 1))], axis=1)
TARGET_MASK = np.arange(TARGET_LEN) < np.array([6, 4, 5])[:, None]


def make(**options):
    sizes = {"width": WIDTH, "hidden_dim": HIDDEN, "target_max_len": TARGET_LEN, **options}
    return Seq2SeqLSTM(VOCAB, SOURCE_LEN, rngs=nnx.Rngs(3), **sizes)


@nnx.jit
def logits_of(model, *args, **options):
    return model(*args, **options).dense()


def run(model, sources=SOURCES, mask=MASK, targets=TARGETS, target_mask=TARGET_MASK, **options):
    return np.asarray(logits_of(model, sources, mask, targets, target_mask, **options))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(cell, state, x):
    memory, output = state
    sums = x @ cell.dense_i.kernel[...] + output @ cell.dense_h.kernel[...] + cell.dense_h.bias[...]
    take, forget, new, give = np.split(np.asarray(sums), 4)
    memory = sigmoid(forget) * memory + sigmoid(take) * np.tanh(new)
    return memory, sigmoid(give) * np.tanh(memory)


def by_the_paper(model, source, target):
    """Logits `[target, vocab]` of one pair without padding: Bahdanau et al. 2015, appendix A, with LSTM cells."""
    linear = lambda layer, x: x @ np.asarray(layer.kernel[...]) + (0 if layer.bias is None else layer.bias[...])
    embedded, layer = np.asarray(model.embed(jnp.asarray(source))), model.layers[0]
    read = {}
    for name, part, order in (("forward", layer.forward, 1), ("backward", layer.backward, -1)):
        state, found = (np.zeros(HIDDEN), np.zeros(HIDDEN)), []
        for x in embedded[::order]:
            state = lstm(part.cell, state, x)
            found.append(state[1])
        read[name] = np.array(found)[::order]
    annotations = np.concatenate([read["forward"], read["backward"]], axis=-1)
    state = tuple(np.split(np.tanh(linear(model.start, read["backward"][0])), 2))
    logits = []
    for y in np.asarray(model.target_embed(jnp.asarray(target))):
        query = linear(model.attention.query, state[1])
        scores = linear(model.attention.score, np.tanh(query + linear(model.attention.key, annotations)))[:, 0]
        weights = np.exp(scores) / np.exp(scores).sum()
        given = np.concatenate([y, weights @ annotations])
        state = lstm(model.cell, state, given)
        pairs = linear(model.maxout, np.concatenate([given, state[1]]))
        logits.append(np.asarray(model.embed.table[...]) @ pairs.reshape(WIDTH, 2).max(axis=-1))
    return np.array(logits)


def test_logits_are_those_of_the_papers_formulas():
    model = make()
    whole = run(model)
    for row, (real, target_real) in enumerate(zip(MASK, TARGET_MASK, strict=True)):
        expected = by_the_paper(model, SOURCES[row, real], TARGETS[row, target_real])
        np.testing.assert_allclose(whole[row, target_real], expected, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "tie_embeddings": False, "remat": True}])
def test_step_by_step_it_says_what_it_says_at_once(options):
    model = make(**options)

    @nnx.jit
    def steps(model):
        context, state, found = model.read(SOURCES, MASK), model.init_caches(3), []
        for place in (0, 1, 3):
            logits, state = model.decode(TARGETS[:, place : (1, 3, 0, 6)[place]], state, context=context)
            found.append(logits.dense())
        return jnp.concatenate(found, axis=1)

    np.testing.assert_allclose(np.asarray(steps(model))[TARGET_MASK], run(model)[TARGET_MASK], atol=1e-6)


def test_padding_and_the_future_change_nothing():
    model = make(num_layers=2)
    whole = run(model)
    np.testing.assert_array_equal(run(model, np.where(MASK, SOURCES, 7))[TARGET_MASK], whole[TARGET_MASK])
    changed = TARGETS.copy()
    changed[:, 4:] = 1
    np.testing.assert_array_equal(run(model, targets=changed)[:, :4], whole[:, :4])
    assert np.abs(run(model, np.roll(SOURCES, 1, axis=0), np.roll(MASK, 1, axis=0)) - whole).max() > 1e-4


def test_pairs_that_share_a_row_do_not_meet():
    model = make(num_layers=2)
    alone = run(model, SOURCES[:2, :3], None, TARGETS[:2, :3], None)
    sources = np.concatenate([SOURCES[0, :3], SOURCES[1, :3], [0]])[None]
    targets = np.concatenate([TARGETS[0, :3], TARGETS[1, :3]])[None]
    segments, own = np.array([[1, 1, 1, 2, 2, 2, 0]]), np.array([[1, 1, 1, 2, 2, 2]])
    shared = run(model, sources, segments > 0, targets, None, segment_ids=segments, decoder_segment_ids=own)
    np.testing.assert_allclose(shared[0], alone.reshape(6, VOCAB), atol=1e-6)


def test_a_source_of_nothing_has_finite_logits_and_gradients():
    model = make()
    loss = lambda model: model(SOURCES, np.zeros_like(MASK), TARGETS, TARGET_MASK).dense().sum()
    value, grads = nnx.jit(nnx.value_and_grad(loss))(model)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_recomputed_steps_have_the_same_gradients():
    gradient = nnx.jit(nnx.grad(lambda model: model(SOURCES, MASK, TARGETS, TARGET_MASK).dense()[1, 3, 2]))
    for kept, recomputed in zip(
        *(jax.tree.leaves(gradient(make(remat=remat))) for remat in (False, True)), strict=True
    ):
        np.testing.assert_allclose(recomputed, kept, atol=1e-6)


def test_beam_search_with_one_beam_is_greedy_and_more_score_at_least_as_well():
    model = make()
    texts = {
        beams: generate(model, SOURCES, LENGTHS, max_tokens=5, num_beams=beams, length_penalty=0.0) for beams in (1, 3)
    }

    def score(tokens):
        targets = np.concatenate([np.zeros((3, 1), int), tokens], axis=1)
        log_probs = jax.nn.log_softmax(run(model, targets=targets, target_mask=None))
        return np.take_along_axis(np.asarray(log_probs)[:, :-1], np.asarray(tokens)[..., None], axis=-1).sum(
            axis=(1, 2)
        )

    tokens = np.zeros((3, 1), int)
    for _ in range(5):
        whole = np.pad(tokens, ((0, 0), (0, TARGET_LEN - tokens.shape[1])))
        said = run(model, targets=whole, target_mask=None)[:, tokens.shape[1] - 1].argmax(axis=-1)
        tokens = np.concatenate([tokens, said[:, None]], axis=1)
    np.testing.assert_array_equal(texts[1], tokens[:, 1:])
    assert (score(texts[3]) >= score(texts[1]) - 1e-5).all()


def test_each_token_of_a_target_waits_for_the_one_before():
    def chain(length):
        targets = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return sequential_products(lambda *x: make()(x[0], None, x[1]).dense(), SOURCES[:1], targets)

    # Query, score, mean, the cell's two products one after the other.
    assert (chain(6) - chain(4)) / 2 == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be an integer of at least 1, got 0"),
        ({"target_vocab_size": 5}, "shared_embeddings must be False where vocabularies differ, got 11 and 5 ids"),
    ],
)
def test_wrong_arguments_are_one_line(options, message):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert str(error.value) == message
