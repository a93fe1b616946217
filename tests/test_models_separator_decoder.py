"""The decoder of source, separator and target in one sequence: T-D, and T-DMCA with its stack of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xformer.attention import Compressed, Full, Layers, Linformer, Local
from xformer.generate import generate, stream
from xformer.models import MODELS, Decoder

SOURCE_LEN, TARGET_LEN, VOCAB = 10, 6, 17
random = np.random.default_rng(0)
SOURCES, LENGTHS = random.integers(1, VOCAB, (3, SOURCE_LEN)), np.array([10, 3, 7])
MASK = np.arange(SOURCE_LEN) < LENGTHS[:, None]
TARGETS = np.concatenate([np.zeros((3, 1), int), random.integers(1, VOCAB, (3, TARGET_LEN - 1))], axis=1)
TARGET_MASK = np.arange(TARGET_LEN) < np.array([6, 4, 5])[:, None]
OPS = {"t_d": Full(), "t_dmca": Layers((Local(block_size=4), Compressed(stride=3)))}
each_op = pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))


def make(op=OPS["t_d"], **options):
    sizes = {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_dim": 24, **options}
    return MODELS["separator_decoder"](
        VOCAB, SOURCE_LEN, target_max_len=TARGET_LEN, attention=op, rngs=nnx.Rngs(3), **sizes
    )


def run(model, sources=SOURCES, mask=MASK, targets=TARGETS, target_mask=TARGET_MASK, **options):
    return np.asarray(nnx.jit(lambda model: model(sources, mask, targets, target_mask, **options).dense())(model))


def in_a_row(row):
    """The tokens of an example as one sequence, the separator (0) between."""
    return np.concatenate([SOURCES[row][MASK[row]], TARGETS[row][TARGET_MASK[row]]])[None]


@pytest.mark.full
@each_op
def test_it_is_a_decoder_of_one_sequence(op):
    """With the same parameters a `Decoder` says the same at the places of the target, whatever the padding between."""
    model = make(op)
    decoder = Decoder(VOCAB, SOURCE_LEN + TARGET_LEN, attention=op, num_layers=2, width=16, num_heads=2, mlp_dim=24,
                      rngs=nnx.Rngs(0))  # fmt: skip
    nnx.update(decoder, nnx.state(model, nnx.Param))
    found = run(model)
    for row, length in enumerate(LENGTHS):
        whole = np.asarray(decoder(in_a_row(row)).dense())[0, length:]
        np.testing.assert_allclose(found[row][TARGET_MASK[row]], whole, rtol=1e-4, atol=2e-6)


@pytest.mark.sampled(1)
@each_op
@pytest.mark.parametrize("experts", [1, 3])
def test_step_by_step_it_says_what_it_says_at_once(op, experts):
    model = make(op, num_experts=experts)

    @nnx.jit
    def steps(model):
        context, caches, found = model.read(SOURCES, MASK), model.init_caches(3), []
        for place in range(TARGET_LEN):
            logits, caches = model.decode(TARGETS[:, place : place + 1], caches, context=context)
            found.append(logits.dense())
        return jnp.concatenate(found, axis=1)

    found = np.asarray(steps(model))
    np.testing.assert_allclose(found[TARGET_MASK], run(model)[TARGET_MASK], rtol=1e-4, atol=2e-6)


@pytest.mark.sampled(1)
@each_op
def test_source_and_target_attend_causally_and_padding_changes_nothing(op):
    """By gradient: a logit of the target moves with its source and with targets up to its own place, and the vector of
    a source token with the source up to it.
    """
    model = make(op, num_layers=4)
    whole = run(model)
    np.testing.assert_array_equal(run(model, np.where(MASK, SOURCES, 7))[TARGET_MASK], whole[TARGET_MASK])
    np.testing.assert_array_equal(
        run(model, targets=np.where(TARGET_MASK, TARGETS, 7))[TARGET_MASK], whole[TARGET_MASK]
    )
    changed = TARGETS.copy()
    changed[:, 3:] = 1
    np.testing.assert_array_equal(run(model, targets=changed)[:, :3], whole[:, :3])

    graph, state = nnx.split(model)
    tokens = in_a_row(0)
    vectors = jnp.asarray(model.embed(tokens))

    def at(vectors, place):
        model = nnx.merge(graph, state)
        model.embed_tokens = lambda inputs: vectors
        return model.encode(tokens)[0, place, 1]

    for place in (5, SOURCE_LEN + 2):  # in the source, and in the target
        moved = np.abs(np.asarray(jax.grad(at)(vectors, place)))[0].max(axis=-1) > 0
        assert not moved[place + 1 :].any()
        assert moved[place] and moved[0]


def test_pairs_that_share_a_row_do_not_meet():
    model = make()
    alone = run(model, SOURCES[1:, :4], None, TARGETS[1:, :3], None)
    sources = np.concatenate([SOURCES[1, :4], SOURCES[2, :4], [0, 0]])[None]
    targets = np.concatenate([TARGETS[1, :3], TARGETS[2, :3]])[None]
    segments, own = np.array([[1] * 4 + [2] * 4 + [0] * 2]), np.array([[1] * 3 + [2] * 3])
    packed = run(model, sources, segments > 0, targets, own > 0, segment_ids=segments, decoder_segment_ids=own)
    np.testing.assert_allclose(packed.reshape(2, 3, VOCAB), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@each_op
def test_generation_is_the_best_by_whole_passes(op):
    """Greedy, and beams that keep all there are, against passes with whole targets; streaming is the same."""
    model = make(op)
    call = nnx.jit(lambda model, targets: model(SOURCES, MASK, targets).dense())
    targets = np.zeros((3, 1), int)
    while targets.shape[1] < TARGET_LEN:
        wide = np.pad(targets, ((0, 0), (0, TARGET_LEN - targets.shape[1])))
        best = np.asarray(call(model, wide))[:, targets.shape[1] - 1].argmax(axis=-1)
        targets = np.concatenate([targets, best[:, None]], axis=1)
    options = {"max_tokens": TARGET_LEN - 1, "end_id": None}
    greedy = np.asarray(generate(model, SOURCES, LENGTHS, **options))
    np.testing.assert_array_equal(greedy, targets[:, 1:])
    np.testing.assert_array_equal(np.stack(list(stream(model, SOURCES, LENGTHS, **options)), axis=1), greedy)

    beams = np.asarray(generate(model, SOURCES, LENGTHS, num_beams=VOCAB, max_tokens=2, end_id=None))
    first = jax.nn.log_softmax(call(model, np.zeros((3, TARGET_LEN), int))[:, 0])
    every = np.pad(np.arange(VOCAB)[:, None], ((0, 0), (1, TARGET_LEN - 2)))
    logits = nnx.jit(
        lambda model: jax.vmap(lambda one: model(SOURCES, MASK, jnp.tile(one, (3, 1))).dense()[:, 1])(every)
    )
    both = np.asarray(first[:, :, None] + jnp.moveaxis(jax.nn.log_softmax(logits(model)), 0, 1))
    np.testing.assert_array_equal(beams, np.stack(np.divmod(both.reshape(3, -1).argmax(axis=1), VOCAB), axis=1))


def test_it_refuses_what_it_can_not_do():
    with pytest.raises(ValueError, match="target_vocab_size must be vocab_size 17 or None, got 5"):
        make(target_vocab_size=5)
    with pytest.raises(NotImplementedError, match="Linformer"):
        make(Linformer(rank=2, max_len=SOURCE_LEN + TARGET_LEN))
    model = make()
    with pytest.raises(ValueError, match=r"decoder_inputs must be \[batch, length\] with length up to 6"):
        model(SOURCES, MASK, SOURCES)
    with pytest.raises(ValueError, match="given together"):
        model(SOURCES, MASK, TARGETS, segment_ids=SOURCES)
    with pytest.raises(ValueError, match="within the model's max_len 10"):
        generate(model, np.ones((1, 12), int), np.array([12]), max_tokens=2)
    compressed = make(OPS["t_dmca"])
    with pytest.raises(NotImplementedError, match="segment"):
        segments = np.ones_like(SOURCES)
        compressed(SOURCES, MASK, TARGETS, segment_ids=segments, decoder_segment_ids=np.ones_like(TARGETS))
