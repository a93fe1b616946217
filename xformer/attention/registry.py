"""The one table of variants, and ops from plain mappings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xformer.attention.bigbird import BigBird
from xformer.attention.compressed import Compressed
from xformer.attention.full import Full
from xformer.attention.interface import Attention
from xformer.attention.layers import Layers
from xformer.attention.linear import Linear
from xformer.attention.linformer import Linformer
from xformer.attention.local import Local
from xformer.attention.longformer import Longformer
from xformer.attention.nystrom import Nystrom
from xformer.attention.performer import Performer
from xformer.attention.position import POSITIONS, Position
from xformer.attention.reformer import Reformer
from xformer.attention.retention import Retention
from xformer.attention.routing import Routing
from xformer.attention.sinkhorn import Sinkhorn
from xformer.attention.sparse import Sparse
from xformer.attention.synthesizer import Synthesizer
from xformer.attention.topk_blocks import TopKBlocks
from xformer.attention.window import Window
from xformer.checks import did_you_mean
from xformer.lookup import Table

ATTENTIONS: Table[type[Attention]] = Table(
    {
        "full": Full,
        "window": Window,
        "bigbird": BigBird,
        "linformer": Linformer,
        "local": Local,
        "longformer": Longformer,
        "sparse": Sparse,
        "linear": Linear,
        "performer": Performer,
        "retention": Retention,
        "reformer": Reformer,
        "nystrom": Nystrom,
        "compressed": Compressed,
        "synthesizer": Synthesizer,
        "topk_blocks": TopKBlocks,
        "routing": Routing,
        "sinkhorn": Sinkhorn,
    },
    kind=Attention,
)

STACK = "layers"  # the name of a section that is a stack of others, and its key that holds them


def build(config: Mapping[str, Any], num_positions: int | None = None) -> Attention:
    """The op that `{"name": ..., **kwargs, "position": {"name": ..., **kwargs} or None}` describes.

    A name is one of `ATTENTIONS` (for a position, of `POSITIONS`) or `"package.module:Class"`.
    `{"name": "layers", "layers": (...)}`, where each entry is such a mapping, describes a stack, `Layers`.

    Args:
      config: the mapping; keys of the constructor that it leaves out take their defaults.
      num_positions: length of the longest input, in positions. Given, keys that are left out take the values of
        `for_length(num_positions)` instead.

    Raises:
      ValueError: an unknown name or argument, or a class that cannot be imported; with the choices and a near match.
      NotImplementedError: a position term for a variant without token pairs, or a causal one that cannot be.
    """
    kwargs = _mapping("attention", config)
    if kwargs.pop("name", None) != STACK:
        return _build("attention", config, num_positions)
    given = kwargs.pop(STACK, None)
    if kwargs:
        raise ValueError(f"attention.{next(iter(kwargs))}: a stack takes {STACK} only, whose entries take the rest")
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"attention.{STACK}: got {given!r}, takes a sequence of at least one attention section")
    return Layers(tuple(_build(f"attention.{STACK}[{i}]", entry, num_positions) for i, entry in enumerate(given)))


def _build(path: str, config: Any, num_positions: int | None) -> Attention:
    kwargs = _mapping(path, config)
    op = ATTENTIONS.find(f"{path}.name", kwargs.pop("name", None))
    term = _position(f"{path}.position", kwargs.pop("position", None), num_positions)
    if term is not None:
        if "position" not in _fields(op):
            raise NotImplementedError(
                f"{path}.position: {op.__name__} mixes the length, so it has no token positions left to relate; got "
                f"{term}, allowed is none"
            )
        kwargs["position"] = term
    return _construct(path, op, kwargs, [*_fields(op), "name", "position"], num_positions)


def build_position(config: Mapping[str, Any] | str | None, num_positions: int | None = None) -> Position | None:
    """The position term that `{"name": ..., **kwargs}` describes; None for None and for the name "none".

    `num_positions` is that of `build`.
    """
    return _position("attention.position", config, num_positions)


def _position(path: str, config: Any, num_positions: int | None) -> Position | None:
    if config is None:
        return None
    kwargs = {"name": config} if isinstance(config, str) else _mapping(path, config)
    term = POSITIONS.find(f"{path}.name", kwargs.pop("name", None))
    if term is None:
        if kwargs:
            raise ValueError(f"{path}: none takes no arguments, got {', '.join(map(str, kwargs))}")
        return None
    return _construct(path, term, kwargs, [*_fields(term), "name"], num_positions)


def _mapping(key: str, config: Any) -> dict[str, Any]:
    try:
        return {**config}
    except TypeError:
        raise ValueError(f"{key}: got {config!r}, takes a mapping with a name") from None


def _fields(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _construct(key: str, cls: Any, kwargs: Mapping[str, Any], allowed: list[str], num_positions: int | None) -> Any:
    for name in kwargs:
        if name not in allowed:
            names = ", ".join(allowed)
            raise ValueError(f"{key}.{name}: {cls.__name__} takes {names}{did_you_mean(name, allowed)}")
    return cls(**kwargs) if num_positions is None else cls.for_length(num_positions, **kwargs)
