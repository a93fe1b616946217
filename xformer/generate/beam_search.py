"""Beam search: the best text of each prompt, by log probability and length."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.generate.prefill import next_logits
from xformer.generate.settings import Numbers, Settings

Array = jax.Array


class Beams(NamedTuple):
    """Texts that go on, and the best that have ended.

    Attributes:
      step: int32, tokens so far.
      texts, log_probs: those that go on, int32 `[batch, beams, max_tokens]` and float32 `[batch, beams]`, best first.
      ended, scores: those that have ended likewise, by their penalised log probability; -inf where there is none yet.
      parents: int32 `[batch, beams]`, the beam before that each one goes on from.
    """

    step: Array
    texts: Array
    log_probs: Array
    ended: Array
    scores: Array
    parents: Array


def run(model: Any, logits: Array, caches: Any, context: Any, settings: Settings, numbers: Numbers) -> Array:
    """The best texts of up to `limit` tokens: int32 `[batch, settings.max_tokens]`, zeros after `end_id` and the limit.

    A text that reaches the limit counts as it is. The search ends when no beam can beat the best text that has ended.

    Args:
      logits: float32 `[batch, vocab_size]`, for the first token; caches: those that go with them.
      context: what each step reads of the sources, one of each for all its beams; None: there are none.
    """
    (batch, _), count = logits.shape, settings.num_beams
    limit, end_id = numbers.limit, numbers.end_id
    penalty = lambda length: ((5.0 + length) / 6.0) ** numbers.length_penalty
    caches = take_examples(caches, batch, jnp.repeat(jnp.arange(batch), count))
    empty = jnp.zeros((batch, count, settings.max_tokens), jnp.int32)
    none = jnp.full((batch, count), -jnp.inf)
    first = Beams(jnp.int32(0), empty, none.at[:, 0].set(0.0), empty, none, jnp.zeros((batch, count), jnp.int32))
    first = extend(first, jnp.repeat(logits[:, None], count, axis=1), penalty, end_id)

    def more(carry: tuple[Beams, Any]) -> Array:
        beams, _ = carry
        reachable = beams.log_probs[:, 0] / penalty(limit)
        return (beams.step < limit) & (reachable > beams.scores[:, 0]).any()

    def advance(carry: tuple[Beams, Any]) -> tuple[Beams, Any]:
        beams, caches = carry
        rows = (beams.parents + count * jnp.arange(batch)[:, None]).reshape(-1)
        caches = take_examples(caches, batch * count, rows)
        tokens = jnp.take(beams.texts, beams.step - 1, axis=2).reshape(-1)
        logits, caches = next_logits(model, tokens, caches, context)
        return extend(beams, logits.reshape(batch, count, -1), penalty, end_id), caches

    beams, _ = jax.lax.while_loop(more, advance, (first, caches))
    # Where the search ended early, texts that go on can't win.
    scores = jnp.concatenate([beams.scores, beams.log_probs / penalty(limit)], axis=1)
    texts = jnp.concatenate([beams.ended, beams.texts], axis=1)
    return jnp.take_along_axis(texts, jnp.argmax(scores, axis=1)[:, None, None], axis=1)[:, 0]


def take_examples(caches: Any, batch: int, examples: Array) -> Any:
    """The caches of some of the examples, int `[n]`.

    The first axis of every array but scalars holds the examples in order, each with equally many entries.
    """

    def take(x: Array) -> Array:
        if not x.ndim:
            return x
        each = len(x) // batch
        return x.reshape(batch, each, *x.shape[1:])[examples].reshape(len(examples) * each, *x.shape[1:])

    return jax.tree.map(take, caches)


def extend(beams: Beams, logits: Array, penalty: Any, end_id: Array) -> Beams:
    """The beams after one more token; logits: float32 `[batch, beams, vocab_size]` for it."""
    batch, count, size = logits.shape
    log_probs = (beams.log_probs[..., None] + jax.nn.log_softmax(logits, axis=-1)).reshape(batch, -1)
    # At most one candidate a beam ends: of twice as many enough go on.
    log_probs, chosen = jax.lax.top_k(log_probs, min(2 * count, count * size))
    parents, tokens = chosen // size, (chosen % size).astype(jnp.int32)
    texts = jnp.take_along_axis(beams.texts, parents[..., None], axis=1).at[:, :, beams.step].set(tokens)
    ends = tokens == end_id
    going, best = jax.lax.top_k(jnp.where(ends, -jnp.inf, log_probs), count)
    pick = lambda x, which: jnp.take_along_axis(x, which.reshape(*which.shape, *(1,) * (x.ndim - 2)), axis=1)
    scores = jnp.where(ends, log_probs / penalty(beams.step + 1), -jnp.inf)
    scores, kept = jax.lax.top_k(jnp.concatenate([beams.scores, scores], axis=1), count)
    ended = pick(jnp.concatenate([beams.ended, texts], axis=1), kept)
    return Beams(beams.step + 1, pick(texts, best), going, ended, scores, pick(parents, best).astype(jnp.int32))
