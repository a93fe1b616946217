"""Optional dependencies: which extra of xformer brings a package, said in one line where the package is missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

PACKAGES = {
    "data": ("grain", "tensorflow_datasets", "array_record", "importlib_resources", "tokenizers"),
    "images": ("dm_pix", "PIL"),
    "report": ("matplotlib", "jinja2", "scipy", "sklearn", "PIL"),
    "tensorboard": ("tensorboardX",),
    "music": ("mido",),
    "translation": ("sacrebleu",),
    "summarization": ("rouge_score",),
    "ray": ("ray",),
    "submitit": ("submitit",),
    "wandb": ("wandb",),
    "weights": ("safetensors",),
}
"""What each extra of the distribution brings, by import name."""


class MissingExtra(ModuleNotFoundError):
    """A package of an extra is not installed; the message is one line with the command that installs it."""


def load(name: str) -> Any:
    """The module `name` of an optional package.

    Raises:
      MissingExtra: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (message := explain(error)) is None:
            raise
        raise MissingExtra(message, name=error.name) from error


def check(extra: str) -> None:
    """Raises MissingExtra unless all packages of an extra are installed, before work is done that will need them."""
    for package in PACKAGES[extra]:
        if importlib.util.find_spec(package) is None:
            missing = ModuleNotFoundError(name=package)
            raise MissingExtra(explain(missing), name=package)


def explain(error: ModuleNotFoundError) -> str | None:
    """The line for a missing package of an extra; None for any other failed import."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in PACKAGES.items():
        if package in packages:
            return f"{package} is not installed; get it with pip install 'xformer-jax[{extra}]'"
    return None


class Lazy:
    """A module of an optional package, imported when one of its names is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(load(self._name), attribute)
