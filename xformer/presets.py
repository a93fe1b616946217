"""What the experiment files share: attention sections by short name, and the shape of experiments and comparisons."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from xformer.attention import ATTENTIONS, POSITIONS
from xformer.checks import ArgumentError, did_you_mean
from xformer.lookup import is_dotted


def attention(variant: str, *others: str, **overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The attention section of a variant: an op (`bigbird`), a position with full attention (`shaw`) or `op+position`.

    Args:
      variant: names of `xformer.attention.ATTENTIONS` and `POSITIONS`; for an op, `package.module:Class` too.
      others: what else a config's argument may be, for the message that refuses one.
      overrides: constructor arguments by name of an op or a position, such as `bigbird={"num_random_blocks": 1}`; those
        of other variants are left aside. Arguments not given here are chosen when the experiment is built, by the
        `for_length` of the class.

    Raises:
      ArgumentError: no such variant, or overrides for a name that is in neither table.
    """
    positions = [name for name, term in POSITIONS.items() if term is not None]
    for name in overrides:
        if name not in ATTENTIONS and name not in positions:
            known = [*ATTENTIONS, *positions]
            raise ArgumentError(name, f"{name} must be one of {', '.join(known)}{did_you_mean(name, known)}")
    op, plus, position = variant.partition("+")
    if not plus:
        op, position = (variant, "none") if variant in ATTENTIONS or is_dotted(variant) else ("full", variant)
    if is_dotted(op):  # looked up when the experiment is built
        return {"name": op, "position": {"name": position, **overrides.get(position, {})}}
    if op not in ATTENTIONS or (position not in positions and (plus or variant not in ATTENTIONS)):
        names = ", ".join([*others, *ATTENTIONS, *positions])
        nearest = did_you_mean(variant, others) or _nearest_variant(variant)
        raise ArgumentError("variant", f"takes {names}, or op+position such as bigbird+shaw{nearest}")
    own = {"name": op, **overrides.get(op, {})}
    return own | {"position": {"name": position, **overrides.get(position, {})}}


def choice(arg: str, table: Mapping[str, Any]) -> Any:
    """What a config's argument stands for.

    Raises:
      ArgumentError: it is none of the table's.
    """
    if arg not in table:
        raise ArgumentError("argument", f"takes {', '.join(table)}{did_you_mean(arg, list(table))}")
    return table[arg]


def causal(section: Mapping[str, Any]) -> dict[str, Any]:
    """The attention section made causal; as it is where its op can't be, or is looked up when the run is built."""
    if section["name"] not in ATTENTIONS:
        return dict(section)
    try:
        ATTENTIONS[section["name"]](causal=True)
    except NotImplementedError:
        return dict(section)
    return {**section, "causal": True}


def takes(section: Mapping[str, Any], argument: str) -> bool:
    """Whether the op of an attention section honours an argument of a call, such as `segment_ids`.

    True of one that is looked up when the run is built.
    """
    return section["name"] not in ATTENTIONS or argument not in ATTENTIONS[section["name"]].REFUSES


def of_model(section: Mapping[str, Any], *models: Any) -> dict[str, Any]:
    """What an attention section asks of the model sections that it may meet, if its op is in the table.

    Queries and keys of one projection, and no dropout of weights where it has none.
    """
    op = None if is_dotted(section["name"]) else ATTENTIONS.get(section["name"])
    found = [model for model in models if isinstance(model, Mapping | ConfigDict)]
    changes: dict[str, Any] = {}
    if op is not None and (op.SHARES_QK or any(model.get("share_qk") for model in found)):
        changes["share_qk"] = op.SHARES_QK
    if op is not None and "dropout_rate" in op.REFUSES and any(model.get("attention_dropout_rate") for model in found):
        changes["attention_dropout_rate"] = 0.0
    return changes


def _nearest_variant(variant: str) -> str:
    if "+" not in variant:
        return did_you_mean(variant, [*ATTENTIONS, *(term for term in POSITIONS if term != "none")])
    return did_you_mean(variant, [f"{name}+{term}" for name in ATTENTIONS for term in POSITIONS if term != "none"])


def sibling(file: str, name: str) -> ModuleType:
    """The config file `name`.py beside `file`: `sibling(__file__, "demo").get_config()` in a comparison of its runs.

    In a folder beside it: `sibling(__file__, "lra/image")`.

    It is found by its path, so that config files need not be importable as a package.
    """
    return load_module(Path(file).parent / f"{name}.py")


def load_module(path: Path) -> ModuleType:
    """Runs a config file; its module, which is not kept in `sys.modules`. Raises what the file raises."""
    spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def experiment(
    name: str,
    *,
    attention: Mapping[str, Any],
    task: Mapping[str, Any],
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    train: Mapping[str, Any],
) -> ConfigDict:
    """An experiment with seed 0, AdamW, a cosine schedule and all devices; keys that are given win over these.

    What the variant asks of the model (`of_model`) wins over `model`.
    """
    optimizer = {"name": "adamw", "schedule": "cosine", "weight_decay": 0.01, "clip_norm": 1.0, **optimizer}
    train = {"parallel": "jit", "mesh": {"data": -1}, "dtype": "float32", "stop_at_step": None, **train}
    model = {**model, **of_model(attention, model)}
    sections = {"attention": attention, "model": model, "task": task, "optimizer": optimizer, "train": train}
    whole = {"name": name, "seed": 0, **{key: dict(value) for key, value in sections.items()}}
    return ConfigDict(whole, sort_keys=False)


def changes_for(section: Mapping[str, Any], *models: Any) -> dict[str, Any]:
    """What a variant of a comparison changes: attention, and what it asks of the models."""
    asked = of_model(section, *models)
    return {"attention": dict(section), **({"model": asked} if asked else {})}


def comparison(
    name: str,
    base: ConfigDict,
    attentions: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    report: Mapping[str, Any] | None = None,
    tasks: Mapping[str, ConfigDict] | None = None,
) -> ConfigDict:
    """Runs that differ in nothing but attention (and seed): same depth, width, data order and steps.

    With `tasks`, experiments by name, the variants are compared on each of them: what an experiment has other than
    `base` is what its task changes.

    Raises:
      ValueError: an experiment leaves a key to its default that `base` sets: that could not be said as a change.
    """
    models = [part.get("model") for part in (base, *(tasks or {}).values())]
    variants = {variant: changes_for(section, *models) for variant, section in attentions.items()}
    whole = {"name": name, "base": base, "variants": ConfigDict(variants, sort_keys=False), "seeds": tuple(seeds)}
    if tasks:
        changed = {task: _changes(base.to_dict(), own.to_dict()) for task, own in tasks.items()}
        whole["tasks"] = ConfigDict(changed, sort_keys=False)
    return ConfigDict(whole | {"report": dict(report or {})}, sort_keys=False)


def _changes(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What an experiment has other than another, attention aside: a named section whole, of others the keys."""
    found: dict[str, Any] = {}
    for section in ("model", "task", "optimizer", "train"):
        named = "name" in own[section]
        if unset := [] if named else [key for key in base[section] if key not in own[section]]:
            raise ValueError(f"{own['name']}: {section}.{unset[0]} must be given, as {base['name']} gives it")
        keys = {key: value for key, value in own[section].items() if named or base[section].get(key) != value}
        if own[section] != base[section]:
            found[section] = keys
    return found
