"""One token after the other: the likeliest, or drawn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xformer.generate.prefill import next_logits
from xformer.generate.settings import Numbers, Settings

Array = jax.Array


def run(model: Any, logits: Array, caches: Any, settings: Settings, numbers: Numbers) -> Array:
    """Up to `limit` tokens for each row: int32 `[batch, settings.max_tokens]`, zeros after `end_id` and the limit.

    Args:
      logits: float32 `[batch, vocab_size]`, for the first token; caches: those that go with them.
    """
    batch, limit, end_id = len(logits), numbers.limit, numbers.end_id
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(numbers.seed), row))(jnp.arange(batch))

    def choose(logits: Array, step: Array) -> Array:
        if settings.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = restrict(logits / numbers.temperature, settings.top_k, numbers.top_p if settings.top_p else None)
        draw = lambda key, row: jax.random.categorical(jax.random.fold_in(key, step), row)
        return jax.vmap(draw)(keys, logits).astype(jnp.int32)

    def more(carry: tuple[Any, ...]) -> Array:
        step, _, done, _, _ = carry
        return (step < limit) & ~done.all()

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, token, done, out, caches = carry
        logits, caches = next_logits(model, token, caches)
        token = jnp.where(done, 0, choose(logits, step))
        return step + 1, token, done | (token == end_id), out.at[:, step].set(token), caches

    first = choose(logits, jnp.int32(0))
    out = jnp.zeros((batch, settings.max_tokens), jnp.int32).at[:, 0].set(first)
    found: Array = jax.lax.while_loop(more, advance, (jnp.int32(1), first, first == end_id, out, caches))[3]
    return found


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
