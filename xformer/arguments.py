"""The arguments of a constructor with their types and defaults, read from its signature."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

REQUIRED = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One constructor argument: its type annotation and its default (`REQUIRED` if it has none)."""

    annotation: Any
    default: Any = REQUIRED


def parameters(constructor: Callable, exclude: Collection[str] = ()) -> dict[str, Parameter]:
    """The arguments of a dataclass, class or function, in order, without those in `exclude`.

    A class whose `__init__` takes `**keywords` hands them on: they are the arguments of the next class that has an
    `__init__` of its own, but for those that the class names in `FIXED_ARGUMENTS`, which it gives that one itself.
    """
    factories = {}
    if dataclasses.is_dataclass(constructor):
        hints = _hints(constructor)
        factories = {field.name: field.default_factory for field in dataclasses.fields(constructor)}
    else:  # a metaclass may hide the arguments of a class, so its __init__ is asked
        if inspect.isclass(constructor):
            return {name: value for name, value in _handed_on(constructor).items() if name not in exclude}
        hints = _hints(constructor)
    found = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):  # nothing says what they take
            continue
        if name not in exclude:
            factory = factories.get(name, dataclasses.MISSING)
            default = parameter.default if factory is dataclasses.MISSING else factory()
            found[name] = Parameter(hints.get(name, Any), default)
    return found


def _hints(constructor: Any) -> dict[str, Any]:
    """The annotation of each argument; for one that can't be evaluated, the type of a plain default, or anything."""
    try:
        return typing.get_type_hints(constructor)
    except Exception:  # an annotation is an expression: evaluating it may raise anything
        pass
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        one = types.SimpleNamespace(__annotations__={name: parameter.annotation})
        names = getattr(inspect.unwrap(constructor), "__globals__", None) or vars(sys.modules[constructor.__module__])
        try:
            found |= typing.get_type_hints(one, names)
        except Exception:
            plain = type(parameter.default) in (bool, int, float, str)
            found[name] = type(parameter.default) if plain else Any
    return found


def positional(cls: Any) -> list[str]:
    """The arguments of a class that can be given without their names."""
    arguments = list(inspect.signature(cls.__init__).parameters.values())[1:]  # self comes first
    return [argument.name for argument in arguments if argument.kind is argument.POSITIONAL_OR_KEYWORD]


def _handed_on(cls: type) -> dict[str, Parameter]:
    """The arguments of a class that is no dataclass, those that it hands on to its bases included."""
    found: dict[str, Parameter] = {}
    fixed: Collection[str] = getattr(cls, "FIXED_ARGUMENTS", ())
    for base in inspect.getmro(cls):
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        hints, keywords = _hints(constructor), False
        for name, parameter in list(inspect.signature(constructor).parameters.items())[1:]:  # self comes first
            if parameter.kind is parameter.VAR_KEYWORD:
                keywords = True
            elif name not in found and name not in fixed and parameter.kind is not parameter.VAR_POSITIONAL:
                found[name] = Parameter(hints.get(name, Any), parameter.default)
        if not keywords:
            break
    return found
