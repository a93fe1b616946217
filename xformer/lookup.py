"""Tables of names that a config may use, in which `"package.module:Class"` stands for a class of one's own.

Standard library only, so that every room may import it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from xformer.checks import ArgumentError, did_you_mean

T = TypeVar("T")

FORM = "package.module:Class"
_DOTTED = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<name>\w+(\.\w+)*)")


class Table(dict[str, T], Generic[T]):
    """What a config can choose by name, and the kind that a class from outside has to be of.

    `table[name]` gives an entry, and for `"package.module:Class"` the class of that module; `in`, iteration and the
    other methods of a dict know the entries alone.

    Args:
      entries: the choices by name; None for a name such as "none".
      kind: the class that others have to derive from; None where any function or class will do.
    """

    def __init__(self, entries: Mapping[str, T], kind: type | None = None) -> None:
        super().__init__(entries)
        self.kind = kind

    def __missing__(self, name: Any) -> T:
        return self.find("name", name)

    def find(self, key: str, name: Any) -> T:
        """The entry or the class that `name` stands for.

        Args:
          key: the dotted key that holds the name, for messages.

        Raises:
          ArgumentError: there is none, it can't be imported, or it is of another kind; one line that starts with `key`.
        """
        if isinstance(name, str) and name in self:
            return self[name]
        if is_dotted(name):
            return import_class(key, name, self.kind)
        allowed = f"{', '.join(self)}, or {FORM!r}" if self else repr(FORM)
        raise ArgumentError(key, f"{key}: got {name!r}, allowed are {allowed}{did_you_mean(name, self)}")


def is_dotted(name: Any) -> bool:
    """Whether a name is meant as `"package.module:Class"`: it has a colon."""
    return isinstance(name, str) and ":" in name


def import_class(key: str, name: str, kind: type | None = None) -> Any:
    """The class or function that `"package.module:Class"` names.

    Modules are searched as in every Python program: in the working directory, if the program or command that runs put
    it on `sys.path` (the commands of xformer do), and among what is installed.

    Args:
      key: the dotted key that holds the name, for messages.
      kind: the class that it has to derive from; None for any class or function.

    Raises:
      ArgumentError: the form is another, the import fails, or it is of another kind; one line that starts with `key`.
    """
    match = _DOTTED.fullmatch(name)
    if match is None:
        raise ArgumentError(key, f"{key}: got {name!r}, takes {FORM!r}, such as 'my_package.attention:MyAttention'")
    importlib.invalidate_caches()  # the file may have been written a moment ago
    try:
        module = importlib.import_module(match["module"])
    except (Exception, SystemExit) as error:  # importing runs the module: whatever it raises, the name can't be used
        raise ArgumentError(key, f"{key}: got {name!r}, but {_import_failed(error, match['module'])}") from error
    found: Any = module
    for part in match["name"].split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            names = [own for own in vars(found) if not own.startswith("_")] if hasattr(found, "__dict__") else []
            where = getattr(module, "__file__", None) or match["module"]
            raise ArgumentError(
                key, f"{key}: got {name!r}, but there is no {part} in {where}{did_you_mean(part, names)}"
            ) from error
    if (wrong := _wrong_kind(found, kind)) is not None:
        raise ArgumentError(key, f"{key}: got {name!r}, {wrong}")
    return found


def _import_failed(error: BaseException, module: str) -> str:
    line = f"importing {module} fails with {blame(error)}"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        here = os.getcwd()
        searched = any(os.path.abspath(folder) == here for folder in sys.path)
        line += f"; searched: {f'{here} (the working directory) and ' if searched else ''}what is installed"
    return line


def _wrong_kind(found: Any, kind: type | None) -> str | None:
    """What is wrong with what a name stands for; None if nothing is."""
    what = "a class" if inspect.isclass(found) else f"{type(found).__name__!r} object"
    what = "a function" if inspect.isroutine(found) else what
    if kind is None:
        return None if callable(found) else f"which is a {what}, takes a function or a class"
    wanted = f"takes a class that derives from {kind.__module__}.{kind.__qualname__}"
    if not inspect.isclass(found):
        return f"which is {what}, {wanted}" if what != "a class" else wanted
    if not issubclass(found, kind):
        return f"which does not derive from it: {wanted}"
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        return f"which is abstract: it has to define {', '.join(missing)}"
    return None


def blame(error: BaseException) -> str:
    """An exception in one line: its type, what it says, and the file and line that raised it."""
    message = " ".join(str(error).split())[:300]
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {message}"  # says where by itself
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    own = isinstance(error, ImportError) and bool(frames) and frames[-1].filename == __file__
    return f"{type(error).__name__}{': ' if message else ''}{message}{'' if own else where}"


def guarded(what: str, call: Callable[[], T], failed: type[Exception]) -> T:
    """`call()` of code from outside; what it raises becomes one line of `failed` that names it.

    Errors of type `failed` itself and interruptions pass as they are.
    """
    try:
        return call()
    except failed:
        raise
    except (Exception, SystemExit) as error:
        raise failed(f"{what} raised {blame(error)}") from error
