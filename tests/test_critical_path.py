"""The longest chain of products: of plain code, of loops, and of the models that are compared."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from xformer import presets
from xformer.attention import ATTENTIONS, build
from xformer.critical_path import sequential_products
from xformer.models import BiLSTM, EncoderClassifier

W = jnp.ones((4, 4))


def recurrence(x):
    return lax.scan(lambda h, x: (jnp.tanh(h @ W + x @ W),) * 2, jnp.zeros((1, 4)), x)[1]


def sums(x):
    return lax.scan(lambda total, x: (total + x @ W @ W, None), jnp.zeros((1, 4)), x)[0]


CASES = {
    "two in turn": (lambda x: x @ W @ W, W, 2),
    "two side by side": (lambda x: x @ W + x.T @ W, W, 1),
    "none": (lambda x: x + 1, W, 0),
    "a result thrown away": (lambda x: (x @ W @ W, x)[1], W, 0),
    "of constants": (lambda x: x + W @ W @ W, W, 2),
    "a recurrence": (recurrence, jnp.ones((10, 1, 4)), 10),
    "its gradient": (jax.grad(lambda x: recurrence(x).sum()), jnp.ones((10, 1, 4)), 20),
    "and what comes after": (lambda x: recurrence(x) @ W @ W, jnp.ones((10, 1, 4)), 12),
    "a loop that adds up": (sums, jnp.ones((10, 1, 4)), 2),
    "one round": (recurrence, jnp.ones((1, 1, 4)), 1),
    "no round": (recurrence, jnp.ones((0, 1, 4)), 0),
    "a map": (lambda x: lax.map(lambda y: y @ W @ W @ W, x), jnp.ones((10, 1, 4)), 3),
    "the longer branch": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ W @ W, lambda x: x @ W, x), W, 2),
    "one round of a while": (lambda x: lax.while_loop(lambda y: y[0, 0] > 0, lambda y: y @ W, x), W, 1),
    "jit and checkpoint": (jax.jit(jax.checkpoint(lambda x: x @ W @ W)), W, 2),
    # The state of the second round needs both states of the first.
    "two states that cross": (
        lambda x: lax.scan(lambda s, _: ((s[1] @ W, s[0] @ W @ W), None), (x, x), None, length=4)[0],
        W,
        6,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_longest_chain_of(name):
    fn, x, expected = CASES[name]
    assert sequential_products(fn, x) == expected


def chain(model, length):
    return sequential_products(lambda x: model(x), jax.ShapeDtypeStruct((1, length), jnp.int32))


def of_attention(name, length):
    op = build(presets.attention(name), length)
    options = {
        "num_layers": 2,
        "width": 16,
        "num_heads": 2,
        "mlp_dim": 16,
        "share_qk": op.SHARES_QK,
        "rngs": nnx.Rngs(0),
    }
    return chain(EncoderClassifier(11, 3, length, attention=op, **options), length)


def test_full_attention_has_six_products_a_layer_and_the_classifier():
    # Projections, scores, sums of values, output, and two of the MLP.
    assert of_attention("full", 64) == 2 * 6 + 1


@pytest.mark.parametrize("name", [*ATTENTIONS])
def test_the_chain_of_attention_does_not_grow_with_length(name):
    assert of_attention(name, 256) == of_attention(name, 64)


def test_the_chain_of_an_lstm_does():
    model = BiLSTM(11, 3, 64, num_layers=2, width=8, hidden_dim=8, rngs=nnx.Rngs(0))
    # A layer waits for all tokens of the one before; then its input product, the pooling's three and the classifier.
    lengths = {length: chain(model, length) for length in (16, 32, 64)}
    assert lengths[64] - lengths[32] == 2 * (lengths[32] - lengths[16]) == 2 * 2 * 16
