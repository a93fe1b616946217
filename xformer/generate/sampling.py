"""One token after the other: the likeliest, or drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xformer.generate.prefill import next_logits
from xformer.generate.settings import Numbers, Settings

Array = jax.Array


class Texts(NamedTuple):
    """Texts that go on.

    Attributes:
      step: int32, tokens so far.
      token: int32 `[batch]`, the last of each; done: bool `[batch]`, whether it has ended.
      out: int32 `[batch, max_tokens]`, all of them, zeros after the end.
    """

    step: Array
    token: Array
    done: Array
    out: Array


def run(model: Any, logits: Array, caches: Any, context: Any, settings: Settings, numbers: Numbers) -> Array:
    """Up to `limit` tokens for each row: int32 `[batch, settings.max_tokens]`, zeros after `end_id` and the limit.

    Args:
      logits: float32 `[batch, vocab_size]`, for the first token; caches: those that go with them.
      context: what each step reads of the sources; None: there are none.
    """
    return advance(model, begin(logits, settings, numbers), caches, context, numbers.limit, settings, numbers)[0].out


def begin(logits: Array, settings: Settings, numbers: Numbers) -> Texts:
    """The first token of each row."""
    first, step = choose(logits, jnp.int32(0), settings, numbers), jnp.int32(1)
    out = jnp.zeros((len(first), settings.max_tokens), jnp.int32).at[:, 0].set(first)
    return Texts(step, first, first == numbers.end_id, out)


def advance(
    model: Any, texts: Texts, caches: Any, context: Any, until: Array, settings: Settings, numbers: Numbers
) -> tuple[Texts, Any]:
    """The texts of `until` tokens, or shorter ones where all have ended, and the caches after them."""

    def more(carry: tuple[Texts, Any]) -> Array:
        return (carry[0].step < until) & ~carry[0].done.all()

    def go_on(carry: tuple[Texts, Any]) -> tuple[Texts, Any]:
        texts, caches = carry
        logits, caches = next_logits(model, texts.token, caches, context)
        token = jnp.where(texts.done, 0, choose(logits, texts.step, settings, numbers))
        done, out = texts.done | (token == numbers.end_id), texts.out.at[:, texts.step].set(token)
        return Texts(texts.step + 1, token, done, out), caches

    found: tuple[Texts, Any] = jax.lax.while_loop(more, go_on, (texts, caches))
    return found


def choose(logits: Array, step: Array, settings: Settings, numbers: Numbers) -> Array:
    """A token of each row, int32 `[batch]`, of logits float32 `[batch, vocab_size]`."""
    if settings.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = restrict(logits / numbers.temperature, settings.top_k, numbers.top_p if settings.top_p else None)

    def draw(row: Array, logits: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(numbers.seed), row)
        return jax.random.categorical(jax.random.fold_in(key, step), logits)

    return jax.vmap(draw)(jnp.arange(len(logits)), logits).astype(jnp.int32)


def restrict(logits: Array, top_k: int | None, top_p: Array | None) -> Array:
    """Logits `[batch, vocab_size]` with -inf at tokens that are not to be drawn; of equals all stay."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares  # what likelier tokens have together
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits
