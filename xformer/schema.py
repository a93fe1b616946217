"""What a config value may be, read from the signature of the constructor that takes it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import numbers
import reprlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from ml_collections import ConfigDict

from xformer import checks, lookup
from xformer.arguments import REQUIRED, Parameter, parameters

_JSON_WORDS = {"true": True, "false": False, "null": None}
INT_BITS = 32  # what an integer of a config must fit into
MAX_NAME = 100  # characters of a name, which becomes a folder and a title
SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127  # sizes of the numbers that float32 holds with full precision


class ConfigError(ValueError):
    """A config that can't be run; the message is one line: the key, what it got, what it takes."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A value given as text, parsed when the type of its key is known.

    `typed` on a command line, quotes are those of a literal; given in Python, they belong to the string.
    """

    value: str
    typed: bool = True

    def __repr__(self) -> str:
        return repr(self.literal())

    def literal(self) -> Any:
        """The Python (or JSON) literal that the text spells, else the text itself."""
        if self.value in _JSON_WORDS:
            return _JSON_WORDS[self.value]
        try:
            return ast.literal_eval(self.value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return self.value


def show(value: Any) -> str:
    """A short one-line spelling of a value for messages."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return " ".join(short.repr(value).split())


def nearest(word: Any, choices: Collection[Any]) -> str:
    """`; nearest match 'x'` for the end of a message, or nothing when no choice is close."""
    near = checks.nearest(word, choices, cutoff=0.5)
    return f"; nearest match {near!r}" if near else ""


def describe(annotation: Any) -> str:
    """The annotation in the words of a message: "an integer", "one of 'mean', 'cls'", "a number or None"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return f"a sequence, each {describe(args[0])}"
    if origin is tuple:
        return f"a sequence of {len(args)}: " + ", ".join(describe(arg) for arg in args)
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping from names to {describe(args[1])}"
    if origin is not None and issubclass(origin, Sequence):
        return f"a sequence, each {describe(args[0])}"
    words = {
        Any: "a section of keys",
        bool: "True or False",
        int: "an integer",
        float: "a number",
        str: "a string",
        type(None): "None",
    }
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def check(path: str, value: Any, annotation: Any) -> Any:
    """Returns `value` as `annotation` wants it (5 as 5.0 for a float, a list as a tuple); raises ConfigError."""
    candidates: tuple[Any, ...] = (value,)
    if isinstance(value, Text):
        candidates = (value.literal(), value.value)
        if not value.typed and annotation is not Any:  # Any is a section, which text can only spell
            candidates = candidates[::-1]
    for candidate in candidates:
        fits, converted = _fit(path, candidate, annotation)
        if fits:
            return converted
    literal = _choices(annotation)
    hint = nearest(candidates[-1], literal) if literal else ""
    if int in (annotation, *get_args(annotation)) and any(_is_integer(candidate) for candidate in candidates):
        hint = f" below 2**{INT_BITS}"
    elif float in (annotation, *get_args(annotation)) and any(map(_is_number, candidates)):
        hint = f" that float32 can hold: 0, or of a size from {SMALLEST:.3g} to {LARGEST:.3g}"
    raise ConfigError(f"{path}: got {show(value)}, takes {describe(annotation)}{hint}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _choices(annotation: Any) -> tuple:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for arg in get_args(annotation) if get_origin(arg) is Literal for choice in get_args(arg))


def _fit(path: str, value: Any, annotation: Any) -> tuple[bool, Any]:
    """(does it fit, the converted value); a wrong element of a container raises with its own path."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True, value
    if origin in (Union, types.UnionType):
        fitting = (result for fits, result in (_fit_quietly(path, value, arg) for arg in args) if fits)
        result = next(fitting, REQUIRED)
        return result is not REQUIRED, result
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args), value
    if annotation is bool:
        return isinstance(value, bool), value
    if annotation is int:  # True is an int to Python, not to a config.
        fits = _is_integer(value) and abs(int(value)) < 2**INT_BITS
        return fits, int(value) if fits else value
    if annotation is float:
        fits = _is_number(value) and (value == 0 or SMALLEST <= abs(value) <= LARGEST)
        return fits, float(value) if fits else value
    if origin is None:
        return isinstance(value, annotation) if inspect.isclass(annotation) else True, value
    if issubclass(origin, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            return False, value
        return True, {key: check(f"{path}.{key}", item, args[1]) for key, item in value.items()}
    if issubclass(origin, Sequence):
        if not isinstance(value, list | tuple):
            return False, value
        kinds = list(args) if origin is tuple and Ellipsis not in args else [args[0]] * len(value)
        if len(kinds) != len(value):
            return False, value
        items = [check(f"{path}[{i}]", item, kind) for i, (item, kind) in enumerate(zip(value, kinds, strict=True))]
        return True, tuple(items) if origin is tuple else items
    return isinstance(value, origin), value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def _fit_quietly(path: str, value: Any, annotation: Any) -> tuple[bool, Any]:
    try:
        return _fit(path, value, annotation)
    except ConfigError:
        return False, value


def storable(value: Any) -> bool:
    """Whether JSON, and so a run's `config.json`, can hold the value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def as_mapping(path: str, value: Any) -> dict[str, Any]:
    """A section as a dict, a ConfigDict too; a section typed whole on the command line is a literal."""
    value = value.literal() if isinstance(value, Text) else value
    value = value.to_dict() if isinstance(value, ConfigDict) else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: got {show(value)}, takes a section of keys")
    return dict(value)


def check_name(path: str, name: str) -> str:
    """Returns a name that is one printable line and can be a folder; raises ConfigError for another."""
    wrong = not name.isprintable() or "/" in name or name.strip() in ("", ".", "..") or name != name.strip()
    if wrong or len(name) > MAX_NAME or len(name.encode()) > 2 * MAX_NAME:  # file systems count bytes
        raise ConfigError(
            f"{path}: got {show(name)}, takes at most {MAX_NAME} printable characters, the name of a folder"
        )
    return name


def check_keys(
    path: str, given: Mapping[str, Any], takes: Mapping[str, Parameter], reader: str, *, fill: bool = True
) -> dict[str, Any]:
    """Checks every key of a section against `takes` and, with `fill`, fills in the defaults.

    `reader` says who reads the keys, for messages.
    """
    prefix = f"{path}." if path else ""
    for key, value in given.items():
        if key not in takes:
            raise ConfigError(
                f"{prefix}{key}: got {show(value)}, but {reader} reads no such key; "
                f"it takes {', '.join(takes) or 'none'}{nearest(key, takes)}"
            )
    checked = {}
    for key, parameter in takes.items():
        if key in given:
            checked[key] = check(prefix + key, given[key], parameter.annotation)
        elif not fill:
            continue
        elif parameter.default is REQUIRED:
            raise ConfigError(f"{prefix}{key}: missing; takes {describe(parameter.annotation)}")
        elif storable(parameter.default):  # a class or function stays the constructor's own default
            checked[key] = parameter.default
    return checked


def check_choice(path: str, value: Any, table: Mapping[str, Any]) -> str:
    """A name of the table or, where that is a `lookup.Table`, `"package.module:Class"`, which is imported.

    Raises:
      ConfigError: it is neither, or it can't be imported, or it is of another kind than the table takes.
    """
    if not isinstance(table, lookup.Table):
        return check(path, value, Literal[tuple(table)])
    name = value.value if isinstance(value, Text) else value
    try:
        if lookup.is_dotted(name) or not table:
            table.find(path, name)
            return name
        return check(path, value, Literal[tuple(table)])
    except checks.ArgumentError as error:
        raise ConfigError(str(error)) from error
    except ConfigError as error:
        raise ConfigError(f"{error}, or {lookup.FORM!r}") from None


def named_parameters(
    path: str, name: str, table: Mapping[str, Callable | None], exclude: Collection[str] = ()
) -> dict[str, Parameter]:
    """The arguments of what `name` stands for in the table; none for None. ConfigError where they can't be read."""
    constructor = table[name]
    if constructor is None:
        return {}
    try:
        return parameters(constructor, exclude)
    except (TypeError, ValueError) as error:  # a class written in C may hide them
        raise ConfigError(
            f"{path}: got {name!r}, whose arguments can't be read: {' '.join(str(error).split())}"
        ) from error


def check_named(
    path: str,
    value: Any,
    table: Mapping[str, Callable | None],
    exclude: Collection[str] = (),
    nested: Mapping[str, Mapping[str, Callable | None]] | None = None,
    fill: bool = True,
) -> dict[str, Any]:
    """Checks a section `{"name": <key of table>, **kwargs}` against the constructor that the name stands for.

    In a `lookup.Table` the name may also be `"package.module:Class"`, which is imported.

    `nested` gives the tables of arguments that are such sections themselves; None stands for their "none" there, and
    a constructor without that argument takes "none" only. `fill` is that of `check_keys`.
    """
    given = as_mapping(path, value)
    if "name" not in given:
        choices = f"one of {', '.join(map(repr, table))}" if table else repr(lookup.FORM)
        raise ConfigError(f"{path}.name: missing; takes {choices}")
    name = check_choice(f"{path}.name", given.pop("name"), table)
    takes = named_parameters(f"{path}.name", name, table, (*exclude, "name"))  # an argument of that name has no key
    checked: dict[str, Any] = {"name": name}
    for key, inner in (nested or {}).items():
        part = given.pop(key, None)
        part = part.literal() if isinstance(part, Text) else part
        checked[key] = check_named(f"{path}.{key}", {"name": "none"} if part is None else part, inner, fill=fill)
        if takes.pop(key, None) is None and checked[key]["name"] != "none":
            raise ConfigError(f"{path}.{key}.name: got {checked[key]['name']!r}, but {name} takes 'none' only")
    return checked | check_keys(path, given, takes, f"{path} {name!r}", fill=fill)
