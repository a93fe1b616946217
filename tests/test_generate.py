"""Generation: greedy as the whole forward says, beams as exhaustive search says, draws by their probabilities."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer.attention import Full, Local, Retention, Rotary, Shaw, Window
from xformer.generate import generate, generation, sampling, stream, streaming
from xformer.generate.settings import Numbers, Settings
from xformer.models import MODELS

MAX_LEN = 64


def make(op=None, vocab=11, **options):
    sizes = {"num_layers": 1, "width": 16, "num_heads": 2, "mlp_dim": 24, "tie_embeddings": False, **options}
    return MODELS["decoder"](vocab, MAX_LEN, attention=op or Full(), rngs=nnx.Rngs(3), **sizes)


def log_probs(model, rows):
    """float64 `[rows, length, vocab]`; what stands after a text changes nothing, so one shape serves."""
    rows = np.asarray(rows)
    padded = np.pad(rows, ((0, 0), (0, 16 - rows.shape[1])))
    logits = np.asarray(nnx.jit(lambda model, rows: model(rows).dense())(model, padded), np.float64)
    logits = logits[:, : rows.shape[1]] - logits[:, : rows.shape[1]].max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


SETTINGS = Settings(16, 64, uniform=False, greedy=True, top_k=None, top_p=False, num_beams=1)
NUMBERS = Numbers(jnp.int32(9), jnp.float32(1), jnp.float32(1), jnp.float32(0), jnp.int32(-1), jnp.uint32(0))
PROMPTS, LENGTHS = np.random.default_rng(0).integers(0, 11, (3, 9)), np.array([9, 1, 6])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", [Full(), Window(left=4, right=0), Retention()], ids=lambda op: type(op).__name__)
def test_greedy_text_is_that_of_the_whole_forward(op):
    model = make(op, num_layers=2, scan_layers=True)
    found = np.asarray(generate(model, PROMPTS, LENGTHS, max_tokens=6))
    assert found.shape == (3, 6) and found.dtype == np.int32
    for row, length in enumerate(LENGTHS):
        whole = np.concatenate([PROMPTS[row, :length], found[row]])
        np.testing.assert_array_equal(log_probs(model, whole[None])[0, length - 1 : -1].argmax(-1), found[row])
        alone = generate(model, PROMPTS[row : row + 1, :length], LENGTHS[row : row + 1], max_tokens=6)
        np.testing.assert_array_equal(alone[0], found[row])


def test_zeros_follow_the_end():
    model = make()
    free = np.asarray(generate(model, PROMPTS, LENGTHS, max_tokens=8))
    end = int(free[0, 2])
    found = np.asarray(generate(model, PROMPTS, LENGTHS, max_tokens=8, end_id=end))
    for row in range(3):
        stop = np.flatnonzero(free[row] == end)
        kept = stop[0] + 1 if stop.size else 8
        np.testing.assert_array_equal(found[row], np.where(np.arange(8) < kept, free[row], 0))
    assert not found[0, 3:].any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end_id", [None, 2])
@pytest.mark.parametrize("length_penalty", [0.0, 2.0])
def test_wide_beams_find_what_exhaustive_search_finds(end_id, length_penalty):
    size, steps = 4, 4
    model = make(vocab=size)
    prompts, lengths = np.array([[1, 2, 3], [3, 0, 0]]), np.array([3, 1])
    # An end that is likely now and then, so that texts of several lengths compete.
    model.output_table[...] = 2.0 * model.output_table[...]
    every = np.array(list(itertools.product(range(size), repeat=steps)))
    found = np.asarray(generate(model, prompts, lengths, max_tokens=steps, num_beams=size**steps,
                                length_penalty=length_penalty, end_id=end_id))  # fmt: skip
    for row, length in enumerate(lengths):
        given = np.tile(prompts[row, :length], (len(every), 1))
        scores = log_probs(model, np.concatenate([given, every], axis=1))[:, length - 1 : -1]
        best, winner = -np.inf, None
        for text, own in zip(every, scores, strict=True):
            stop = np.flatnonzero(text == end_id) if end_id is not None else np.zeros(0)
            count = int(stop[0]) + 1 if stop.size else steps
            score = own[np.arange(count), text[:count]].sum() / ((5 + count) / 6) ** length_penalty
            if score > best + 1e-6:
                best, winner = score, np.where(np.arange(steps) < count, text, 0)
        np.testing.assert_array_equal(found[row], winner)


@pytest.mark.full
def test_one_beam_more_is_never_worse():
    model = make()
    score = lambda texts: sum(
        log_probs(model, np.concatenate([PROMPTS[row, :length], texts[row]])[None])[0, length - 1 + i, token]
        for row, length in enumerate(LENGTHS) for i, token in enumerate(texts[row])
    )  # fmt: skip
    greedy = np.asarray(generate(model, PROMPTS, LENGTHS, max_tokens=5))
    beams = np.asarray(generate(model, PROMPTS, LENGTHS, max_tokens=5, num_beams=8, length_penalty=0.0))
    assert score(beams) >= score(greedy) - 1e-5


def test_beams_of_a_model_whose_caches_hold_nothing():
    """A token that sees itself alone has a cache of no keys: its beams are reordered all the same."""
    model = make(Window(0, 0, causal=True))
    ours = np.asarray(generate(model, PROMPTS[:1], LENGTHS[:1], max_tokens=2, num_beams=11**2, length_penalty=0.0))
    first = log_probs(model, PROMPTS[:1, : LENGTHS[0]])[0, -1]
    pairs = [
        (first[one] + log_probs(model, np.concatenate([PROMPTS[:1, : LENGTHS[0]], [[one]]], axis=1))[0, -1], one)
        for one in range(11)
    ]
    best = max(((scores[two], one, two) for scores, one in pairs for two in range(11)))
    assert ours[0].tolist() == [*best[1:]]


def test_tokens_are_drawn_with_their_probabilities():
    model = make(vocab=5)
    rows = 4000
    prompt = np.tile([[1, 4, 2]], (rows, 1))
    probabilities = np.exp(log_probs(model, prompt[:1])[0, -1] / 0.7)
    probabilities /= probabilities.sum()
    draw = lambda **options: np.bincount(
        np.asarray(generate(model, prompt, np.full(rows, 3), max_tokens=1, temperature=0.7, **options))[:, 0],
        minlength=5,
    ) / rows  # fmt: skip
    near = lambda found, expected: np.abs(found - expected).max() < 5 * np.sqrt(0.25 / rows)
    assert near(draw(), probabilities)
    order = np.argsort(-probabilities)
    kept = np.where(np.isin(np.arange(5), order[:2]), probabilities, 0)
    found = draw(top_k=2)
    assert near(found, kept / kept.sum()) and not found[order[2:]].any()
    mass = probabilities[order[:3]].sum() - 0.01
    kept = np.where(np.isin(np.arange(5), order[:3]), probabilities, 0)
    found = draw(top_p=mass)
    assert near(found, kept / kept.sum()) and not found[order[3:]].any()


def test_draws_depend_on_the_seed_and_not_on_other_rows():
    model, options = make(), {"max_tokens": 6, "temperature": 1.5}
    first, again, other = (np.asarray(generate(model, PROMPTS, LENGTHS, seed=seed, **options)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    changed = PROMPTS.copy()
    changed[1:] = 0
    np.testing.assert_array_equal(np.asarray(generate(model, changed, LENGTHS, **options))[0], first[0])


def test_of_equal_tokens_all_may_be_drawn():
    logits = jnp.array([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = lambda *args: np.isfinite(sampling.restrict(logits, *args))[0].tolist()
    assert kept(2, None) == [False, True, True, True, False]
    assert kept(5, None) == [True] * 5 == kept(None, jnp.float32(1.0))
    assert kept(None, jnp.float32(1e-6)) == [False, True, False, False, False]


def test_one_program_for_a_shape_bucket():
    model = make()
    generation._run.clear_cache()
    for longest, max_tokens in ((3, 2), (16, 16), (9, 5)):
        generate(model, PROMPTS[:, :1].repeat(longest, 1), np.array([1, 2, 3]), max_tokens=max_tokens)
    assert generation._run._cache_size() == 1
    generate(model, PROMPTS[:, :1].repeat(17, 1), np.array([1, 2, 3]), max_tokens=2)
    assert generation._run._cache_size() == 2


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_k": 5, "seed": 3}], ids=["greedy", "drawn"])
def test_a_stream_is_what_is_generated(options):
    model = make(num_layers=2)
    whole = np.asarray(generate(model, PROMPTS, LENGTHS, max_tokens=7, **options))
    end = int(whole[0, 3])
    for programs in (streaming.begin, streaming.go_on):
        programs.clear_cache()
    found = np.stack(list(stream(model, PROMPTS, LENGTHS, max_tokens=7, **options)), axis=1)
    np.testing.assert_array_equal(found, whole)
    other = list(stream(model, PROMPTS[:, :5], np.array([5, 2, 1]), max_tokens=3, **options))
    assert len(other) == 3 and streaming.begin._cache_size() == streaming.go_on._cache_size() == 1
    ended = np.stack(list(stream(model, PROMPTS[:1], LENGTHS[:1], max_tokens=7, end_id=end, **options)), axis=1)
    stop = int(np.flatnonzero(whole[0] == end)[0]) + 1
    np.testing.assert_array_equal(ended, whole[:1, :stop])
    with pytest.raises(ValueError, match="max_tokens must be an integer of at least 1, got 0"):
        stream(model, PROMPTS, LENGTHS, max_tokens=0)


STEPS = {
    "full": (Full(), 1, False),
    "rows": (Full(), 3, True),
    "window": (Window(left=128, right=0), 1, False),
    "local": (Local(block_size=128), 2, True),
    "shaw": (Full(position=Shaw(max_distance=8)), 2, False),
    "rotary": (Window(left=128, right=0, position=Rotary()), 1, False),
}


@pytest.mark.full
@pytest.mark.optimized
@pytest.mark.parametrize("name", list(STEPS))
def test_a_step_copies_no_cache(name):
    """What a step needs besides the caches is less than one of their arrays."""
    op, batch, by_row = STEPS[name]
    sizes = {"num_layers": 2, "width": 16, "num_heads": 4, "head_dim": 32, "mlp_dim": 16}
    model = MODELS["decoder"](11, 512, attention=op, rngs=nnx.Rngs(3), **sizes)
    length = jnp.full((batch,) if by_row else (), 300, jnp.int32)
    caches = [dataclasses.replace(cache, length=length) for cache in model.init_caches(batch)]
    texts = sampling.begin(jnp.zeros((batch, 11)), SETTINGS, NUMBERS)
    program = streaming.go_on.lower(*nnx.split(model), texts, caches, None, np.int32(3), NUMBERS, SETTINGS).compile()
    assert program.memory_analysis().temp_size_in_bytes < caches[0].key_rows.nbytes / 2


def test_room_ends_with_the_model():
    model = make(position_embedding="learned")
    prompt = np.ones((1, 60), int)
    assert np.asarray(generate(model, prompt, np.array([60]), max_tokens=5)).shape == (1, 5)
    with pytest.raises(ValueError, match=r"within the model's max_len 64, got 60 \+ 6 = 66"):
        generate(model, prompt, np.array([60]), max_tokens=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a number from 0, got -1.0"),
        ({"top_k": 0, "temperature": 1.0}, "top_k must be an integer of at least 1, got 0"),
        ({"top_p": 1.5, "temperature": 1.0}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_k": 3}, "top_k is for drawing: give a temperature above 0, got 0"),
        ({"num_beams": 2, "temperature": 1.0}, "num_beams above 1 takes temperature 0"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"length_penalty": -1}, "length_penalty must be a number from 0, got -1"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_what_is_wrong_is_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        generate(make(), PROMPTS, LENGTHS, **{"max_tokens": 2, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lengths", [[9, 0, 6], [9, 10, 6], [9, 1], [9.0, 1.0, 6.0]])
def test_lengths_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths must be"):
        generate(make(), PROMPTS, np.array(lengths), max_tokens=2)


def test_bfloat16_generates():
    found = np.asarray(generate(make(dtype=jnp.bfloat16), PROMPTS, LENGTHS, max_tokens=4))
    assert found.shape == (3, 4) and (found >= 0).all() and (found < 11).all()
    assert jax.dtypes.issubdtype(found.dtype, np.int32)
