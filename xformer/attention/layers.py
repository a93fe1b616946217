"""A stack of ops: layers of one model that attend differently."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax

from xformer.attention.interface import Attention
from xformer.attention.shape import Shape
from xformer.attention.signature import Options

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Layers(Attention):
    """A hybrid stack: layer i of a model attends with entry `i mod len(ops)`, such as a window in three layers of four.

    Not a variant, but what a model is given for one: `at_layer(i)` is the op of layer i, and everything else is asked
    of that. Called itself, it raises NotImplementedError.

    Attributes:
      ops: the ops of the first layers; they repeat after that.
      causal: True makes every entry causal. Where every entry is causal anyway, it is True.
      implementation: of every entry; None leaves each its own.
    """

    ops: tuple[Attention, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ops, list | tuple) or not self.ops:
            raise ValueError(f"Layers.ops must be a sequence of at least one attention op, got {self.ops!r}")
        for op in self.ops:
            if not isinstance(op, Attention) or isinstance(op, Layers):
                raise ValueError(f"Layers.ops must be attention ops that are no Layers themselves, got {op!r}")
        changes: dict[str, Any] = {"causal": True} if self.causal else {}
        if self.implementation is not None:
            changes["implementation"] = self.implementation
        ops = tuple(dataclasses.replace(op, **changes) if changes else op for op in self.ops)
        object.__setattr__(self, "ops", ops)
        object.__setattr__(self, "causal", all(op.causal for op in ops))

    @property
    def reads_trees(self) -> bool:
        return any(op.reads_trees for op in self.ops)

    def at_layer(self, index: int) -> Attention:
        return self.ops[index % len(self.ops)].at_layer(index)

    def plans(self, shape: Shape, num_layers: int) -> Any:
        """For each entry the plans of its own layers, with arrays `[num_layers / len(ops), ...]`; a tuple.

        An entry whose layers do not differ has None.
        """
        period = len(self.ops)
        if num_layers % period:
            raise ValueError(f"num_layers must be a multiple of the {period} entries of Layers, got {num_layers}")
        plans = [op.plans(shape, num_layers) for op in self.ops]
        return tuple(jax.tree.map(lambda x, first=first: x[first::period], plan) for first, plan in enumerate(plans))

    def remarks(self, num_positions: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(remark for op in self.ops for remark in op.remarks(num_positions)))

    def attend_with(self, query: Array, key: Array, value: Array, options: Options) -> NoReturn:
        self._refuse()

    def attention_weights(self, query: Array, key: Array, value: Array, options: Options) -> NoReturn:
        self._refuse()

    def init(self, rng: Array, shape: Shape) -> NoReturn:
        self._refuse()

    def pattern(self, q_len: int, kv_len: int, num_heads: int) -> NoReturn:
        self._refuse()

    def cost(self, shape: Shape) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"Layers is a stack of {len(self.ops)} ops: use at_layer(i), the op of layer i")


def entries(op: Attention) -> tuple[Attention, ...]:
    """The ops of a stack; of any other op, itself alone."""
    return op.ops if isinstance(op, Layers) else (op,)
