"""The feed-forward layer of several experts, of which each token is sent to a few."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from xformer import layer_terms
from xformer.nn.check import check_sizes
from xformer.nn.feed_forward import Activation, FeedForward

Array = jax.Array
BLOCK = 128  # tokens of one expert that are computed at a time in evaluation, at most


class MixtureOfExperts(nnx.Module):
    """`num_experts` feed-forward layers and a router that sends each token to `experts_per_token` of them.

    The router is a softmax over a product with the token (Shazeer et al. 2017, section 2.1, without its noise). With
    one expert a token, what that gives is scaled by its probability (Fedus et al. 2021, equation 2); with more, by
    their probabilities divided by their sum (Shazeer, equations 3 and 5). The router computes in float32 (Fedus,
    section 2.4). `make_feed_forward` makes a plain `FeedForward` where there is one expert.

    In training an expert has room for `capacity * experts_per_token * length / num_experts` tokens of each row of the
    batch, rounded up (Fedus, equation 3): what is sent to it beyond that, in the order of the tokens, is dropped, and
    only the residual connection carries it on. So rows do not compete, and no token's fate depends on a later one. In
    evaluation and decoding nothing is dropped: results depend on neither the batch nor its padding, and step by step
    they are those of one call. Padding is sent to no expert and gets zeros.

    In training it sows (`xformer.layer_terms`) the loss term `balance_loss`, `balance_weight` times that of Fedus,
    equations 4 to 6, of each row (num_experts x sum of share of tokens x mean probability; 1 if all are used alike),
    and the metric `dropped_tokens`, the share of what was sent that was dropped.

    Args:
      width, mlp_dim, dropout_rate, activation, dtype, param_dtype: those of each expert, see FeedForward.
      num_experts: how many there are. On a mesh each is cut as a dense layer is.
      experts_per_token: at most `num_experts`.
      capacity: the factor above; `num_experts / experts_per_token` or more drops nothing.
      balance_weight: of the loss term; 0 is none.
      rngs: stream `params`.
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        *,
        num_experts: int,
        experts_per_token: int = 1,
        capacity: float = 1.25,
        balance_weight: float = 0.01,
        dropout_rate: float = 0.0,
        activation: Activation = "gelu",
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_experts(num_experts, experts_per_token, capacity, balance_weight)
        options: dict[str, Any] = {"dropout_rate": dropout_rate, "activation": activation, "dtype": dtype}
        make = lambda key: FeedForward(width, mlp_dim, **options, param_dtype=param_dtype, rngs=nnx.Rngs(params=key))
        keys = jax.random.split(rngs.params(), num_experts)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))
        self.experts = nnx.merge(graphdef, jax.vmap(lambda key: nnx.state(make(key)))(keys))
        init = nnx.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")  # Fedus, section 2.4
        self.router = nnx.Linear(
            width,
            num_experts,
            use_bias=False,
            kernel_init=init,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.capacity, self.balance_weight, self.has_dropout = capacity, balance_weight, dropout_rate > 0

    def __call__(
        self, x: Array, mask: Array | None = None, *, deterministic: bool = True, rngs: nnx.Rngs | None = None
    ) -> Array:
        """Maps `[batch, length, width]` to the same; `mask` bool `[batch, length]` is True at real tokens.

        `deterministic=False` is training: experts have limited room, and dropout draws from `rngs.dropout`.
        """
        x = jnp.asarray(x)
        real_BxT = jnp.ones(x.shape[:2], bool) if mask is None else mask > 0
        probs_BxTxE = jax.nn.softmax(self.router(x), axis=-1)
        gates_BxTxK, chosen_BxTxK = jax.lax.top_k(probs_BxTxE, self.experts_per_token)
        if self.experts_per_token > 1:
            gates_BxTxK /= gates_BxTxK.sum(axis=-1, keepdims=True)
        chosen_BxTxK = jnp.where(real_BxT[..., None], chosen_BxTxK, self.num_experts)
        if deterministic:
            flat = lambda y: y.reshape(-1, y.shape[-1])
            return self._all(flat(x), flat(gates_BxTxK), flat(chosen_BxTxK)).reshape(x.shape)
        out_BxTxW, kept_BxTxK = self._within_room(x, gates_BxTxK, chosen_BxTxK, rngs)
        self._sow(probs_BxTxE, chosen_BxTxK, kept_BxTxK, real_BxT)
        return out_BxTxW

    def _within_room(self, x_BxTxW: Array, gates: Array, chosen: Array, rngs: nnx.Rngs | None) -> tuple[Array, Array]:
        """The output, and which of `chosen` had room, bool `[batch, length, experts_per_token]`."""
        batch, length, width = x_BxTxW.shape
        count = self.num_experts
        room = min(math.ceil(round(self.capacity * self.experts_per_token * length / count, 6)), length)
        place_BxTxK = jax.vmap(lambda row: places(row.reshape(-1), count).reshape(row.shape))(chosen)
        kept_BxTxK = (place_BxTxK < room) & (chosen < count)
        slot_BxTxK = jnp.where(kept_BxTxK, chosen * room + place_BxTxK, count * room)
        x_BxExCxW = jax.vmap(lambda x, slot: sent(x, slot, count * room))(x_BxTxW, slot_BxTxK)
        x_ExBxCxW = jnp.moveaxis(x_BxExCxW.reshape(batch, count, room, width), 1, 0)
        graphdef, state = nnx.split(self.experts)
        if self.has_dropout and rngs is None:
            raise ValueError("deterministic=False needs rngs with a stream 'dropout', got None")
        keys = jax.random.split(rngs.dropout(), count) if self.has_dropout and rngs is not None else None

        def run(state: Any, x: Array, key: Array | None) -> Array:
            dropout = None if key is None else nnx.Rngs(dropout=key)
            return nnx.merge(graphdef, state)(x, deterministic=key is None, rngs=dropout)

        y_ExBxCxW = jax.vmap(run)(state, x_ExBxCxW, keys)
        y_BxSxW = jnp.moveaxis(y_ExBxCxW, 0, 1).reshape(batch, count * room, width)
        return jax.vmap(gathered)(y_BxSxW, slot_BxTxK, gates), kept_BxTxK

    def _all(self, x_NxW: Array, gates_NxK: Array, chosen_NxK: Array) -> Array:
        """The output of every token at its experts: blocks of tokens of one expert each, as MegaBlocks has them.

        (Gale et al. 2022, section 4.) Each expert fills its last block in part at most.
        """
        count, total = self.num_experts, chosen_NxK.size
        block = min(BLOCK, 2 ** math.ceil(math.log2(max(total / count, 1))))
        used = min(total, count)
        num_blocks = (total - used) // block + used
        tokens_E = jnp.bincount(chosen_NxK.reshape(-1), length=count)
        ends_E = jnp.cumsum(-(-tokens_E // block))
        first = jnp.pad(ends_E, (1, 0))[chosen_NxK]  # of each token's expert, in blocks
        place_NxK = places(chosen_NxK.reshape(-1), count).reshape(chosen_NxK.shape)
        slot_NxK = jnp.where(chosen_NxK < count, first * block + place_NxK, num_blocks * block)
        x_SxCxW = sent(x_NxW, slot_NxK, num_blocks * block).reshape(num_blocks, block, -1)
        expert_S = jnp.minimum(jnp.searchsorted(ends_E, jnp.arange(num_blocks), side="right"), count - 1)
        graphdef, state = nnx.split(self.experts)

        def run(one: tuple[Array, Array]) -> Array:
            x_CxW, expert = one
            return nnx.merge(graphdef, jax.tree.map(lambda arrays: arrays[expert], state))(x_CxW)

        y_SxCxW = jax.lax.map(run, (x_SxCxW, expert_S))
        return gathered(y_SxCxW.reshape(num_blocks * block, -1), slot_NxK, gates_NxK)

    def _sow(self, probs: Array, chosen: Array, kept: Array, real: Array) -> None:
        """Tells the training step of the balance and of what was dropped, row by row."""
        tokens_B = real.sum(axis=1).astype(jnp.float32)
        each_B = jnp.maximum(tokens_B, 1)
        sent_BxE = jax.nn.one_hot(chosen, self.num_experts).sum(axis=(1, 2))
        share_BxE = sent_BxE / (each_B * self.experts_per_token)[:, None]
        mean_BxE = jnp.where(real[..., None], probs, 0).sum(axis=1) / each_B[:, None]
        balance_B = self.num_experts * (jax.lax.stop_gradient(share_BxE) * mean_BxE).sum(axis=1)
        if self.balance_weight:
            layer_terms.sow_loss(self, "balance_loss", self.balance_weight * balance_B, tokens_B)
        sent_B = sent_BxE.sum(axis=1)
        dropped_B = 1 - kept.sum(axis=(1, 2)) / jnp.maximum(sent_B, 1)
        layer_terms.sow_metric(self, "dropped_tokens", dropped_B, sent_B)


def make_feed_forward(
    width: int,
    mlp_dim: int,
    *,
    num_experts: int = 1,
    experts_per_token: int = 1,
    capacity: float = 1.25,
    balance_weight: float = 0.01,
    **options: Any,
) -> FeedForward | MixtureOfExperts | None:
    """The feed-forward layer of a block: dense with one expert, none where `mlp_dim` is 0. `options`: see FeedForward.

    Raises:
      ValueError: a number of experts or of features out of range, or several experts of no features.
    """
    check_experts(num_experts, experts_per_token, capacity, balance_weight)
    if mlp_dim == 0:
        if num_experts > 1:
            raise ValueError(f"num_experts must be 1 where mlp_dim is 0, got {num_experts}")
        return None
    if num_experts == 1:
        return FeedForward(width, mlp_dim, **options)
    return MixtureOfExperts(
        width,
        mlp_dim,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        capacity=capacity,
        balance_weight=balance_weight,
        **options,
    )


def places(expert: Array, num_experts: int) -> Array:
    """The place of each entry among those of its expert, in their order, from 0: int32 from int `[entries]`."""
    order = jnp.argsort(expert, stable=True)
    in_order = expert[order]
    counts = jnp.bincount(expert, length=num_experts + 1)
    place = jnp.arange(expert.size, dtype=jnp.int32) - (jnp.cumsum(counts) - counts)[in_order].astype(jnp.int32)
    return jnp.zeros(expert.size, jnp.int32).at[order].set(place)


def sent(x: Array, slot: Array, num_slots: int) -> Array:
    """`x` `[tokens, width]` at the slots that its tokens were given, `[num_slots, width]`, zeros at the others.

    `slot` int `[tokens, experts_per_token]`; `num_slots` is none.
    """
    tokens = jnp.broadcast_to(jnp.arange(len(x), dtype=jnp.int32)[:, None], slot.shape)
    token_S = jnp.full(num_slots, len(x), jnp.int32).at[slot].set(tokens, mode="drop")
    return x.at[token_S].get(mode="fill", fill_value=0)


def gathered(y: Array, slot: Array, gates: Array) -> Array:
    """The sum over each token's experts of what stands at its slot of `y` times its gate, `[tokens, width]`."""
    y_NxKxW = y.at[slot].get(mode="fill", fill_value=0)
    return (y_NxKxW * gates[..., None]).sum(axis=1).astype(y.dtype)


def check_experts(num_experts: int, experts_per_token: int, capacity: float, balance_weight: float) -> None:
    """Raises ValueError for counts below 1, more experts a token than there are, or a number out of range."""
    check_sizes(num_experts=num_experts, experts_per_token=experts_per_token)
    if experts_per_token > num_experts:
        raise ValueError(f"experts_per_token must be at most num_experts {num_experts}, got {experts_per_token}")
    if not 0 < capacity < math.inf:
        raise ValueError(f"expert_capacity must be a number above 0, got {capacity!r}")
    if not 0 <= balance_weight < math.inf:
        raise ValueError(f"balance_weight must be a number from 0, got {balance_weight!r}")


def active_params(module: nnx.Module) -> int:
    """The parameters that one token meets: all but those of the experts that it is not sent to."""
    size = lambda part: sum(leaf.size for leaf in jax.tree.leaves(nnx.state(part, nnx.Param)))
    idle = 0
    for _, part in nnx.iter_modules(module):
        if isinstance(part, MixtureOfExperts):
            idle += size(part.experts) * (part.num_experts - part.experts_per_token) // part.num_experts
    return size(module) - idle
