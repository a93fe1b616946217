"""The attention sections of a config: of the slot `attention` of every model, and of a model's own slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xformer import attention, lookup, schema
from xformer.attention.registry import STACK
from xformer.models import MODELS
from xformer.schema import ConfigError, Parameter, Text

NO_ATTENTION = "none"  # the name of the attention of a model that has none
ATTENTION_ELSEWHERE = ("layer",)  # the model counts its layers


def slots(model: str) -> Mapping[str, str]:
    """The keys of a model's section that are attention sections, and the size that says for how many positions each is.

    The slot `attention` of every model has a section of its own.
    """
    found: Mapping[str, str] = getattr(MODELS[model], "ATTENTION_SLOTS", {})
    return found


def attention_sections(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The section of every slot, by its dotted path: `attention`, and those in the `model` section."""
    inside = {f"model.{slot}": config["model"].get(slot) for slot in slots(config["model"]["name"])}
    return {"attention": config["attention"], **{path: own for path, own in inside.items() if own is not None}}


def check_attention(section: Any, model: str, path: str = "attention") -> dict[str, Any]:
    """An op's section, or that of a stack: `{"name": "layers", "layers": (sections of ops)}`; `{"name": "none"}` for a
    model without attention."""
    given = schema.as_mapping(path, section)
    name = given.get("name")
    name = name.literal() if isinstance(name, Text) else name
    without = (takes := schema.parameters(MODELS[model])) and "attention" not in takes
    if without and (name == NO_ATTENTION or not lookup.is_dotted(model)):  # one from outside may leave it unread
        if given.keys() != {"name"} or name != NO_ATTENTION:
            raise ConfigError(
                f"attention: got {schema.show(name)}, takes {{'name': 'none'}}, as {model} has no attention"
            )
        return {"name": NO_ATTENTION}
    if name == NO_ATTENTION:
        raise ConfigError(f"{path}.name: got 'none', which is for models without attention; model {model} has some")
    if name != STACK:
        table = attention.ATTENTIONS
        return _check_op(path, given, lookup.Table({**table, STACK: None}, table.kind))
    takes = {"name": Parameter(str), STACK: Parameter(tuple[Any, ...])}
    stack = schema.check_keys(path, given, takes, f"{path} {STACK!r}")
    if not stack[STACK]:
        raise ConfigError(f"{path}.{STACK}: got (), takes at least one attention section")
    ops = (_check_op(f"{path}.{STACK}[{i}]", op, attention.ATTENTIONS) for i, op in enumerate(stack[STACK]))
    return {"name": STACK, STACK: tuple(ops)}


def _check_op(path: str, section: Any, table: Mapping[str, Callable | None]) -> dict[str, Any]:
    positions = {"position": attention.POSITIONS}
    return schema.check_named(path, section, table, exclude=ATTENTION_ELSEWHERE, nested=positions, fill=False)


def ops(section: Mapping[str, Any], path: str = "attention") -> dict[str, Mapping[str, Any]]:
    """The section of each op that an attention section holds, by its dotted path: one, those of a stack, or none."""
    if section["name"] == NO_ATTENTION:
        return {}
    if section["name"] != STACK:
        return {path: section}
    return {f"{path}.{STACK}[{i}]": op for i, op in enumerate(section[STACK])}


def all_ops(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The section of each op of a config, in whatever slot, by its dotted path."""
    return {own: op for path, section in attention_sections(config).items() for own, op in ops(section, path).items()}
