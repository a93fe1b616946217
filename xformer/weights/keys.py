"""The keys of a `config.json`, each checked when it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xformer.checks import check_integer, is_integer
from xformer.weights.errors import WeightsError


class Keys:
    """Reads keys of a config. Every method raises WeightsError with one line that names the file and the key."""

    def __init__(self, config: Mapping[str, Any], path: str | Path = "config.json"):
        self.config, self.path = config, path

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1, at_most: int = 2**31 - 1) -> int:
        """An integer; `default` where the key is missing or null."""
        value = self._get(key, default)
        try:
            check_integer(key, value, at_least=at_least, at_most=at_most)
        except ValueError as error:
            raise WeightsError(f"{self.path}: {error}") from None
        return int(value)

    def number(self, key: str, default: float, *, below: float = math.inf) -> float:
        """A number of at least 0 and below `below`."""
        value = self._get(key, default)
        if not (is_integer(value) or isinstance(value, float)) or not 0 <= value < below:
            limit = "" if below == math.inf else f" and below {below:g}"
            raise self._wrong(key, value, f"a number of at least 0{limit}")
        return float(value)

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """What `choices` has for the value."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self._wrong(key, value, " or ".join(choices))
        return choices[value]

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def only(self, **values: Any) -> None:
        """Refuses a key that has another value than the one that is computed here; missing is as given."""
        for key, value in values.items():
            if self._get(key, value) != value:
                raise self._wrong(key, self.config[key], f"{value!r} only: nothing else is computed here")

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def _wrong(self, key: str, value: Any, allowed: str) -> WeightsError:
        return WeightsError(f"{self.path}: {key} must be {allowed}, got {value!r:.80}")
