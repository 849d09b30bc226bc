"""Typed reading of one JSON object: a missing or odd value becomes the default, never an exception downstream."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Fields", "Malformed", "read_json"]


class Malformed(ValueError):
    """A file of the results folder that cannot be used; the message is the start of a sentence."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        Malformed: It cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError) as error:
        raise Malformed(f"{path.name} cannot be read") from error
    if not isinstance(found, dict):
        raise Malformed(f"{path.name} holds no JSON object")
    return found


class Fields:
    """One JSON object, read field by field."""

    def __init__(self, values: object, where: str) -> None:
        """Wrap ``values`` found in the file called ``where``; anything but an object reads as empty."""
        self._values: Mapping[str, Any] = values if isinstance(values, dict) else {}
        self.where = where

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a finite number, or the default."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return default
        try:
            return float(value) if math.isfinite(value) else default
        except OverflowError:
            return default

    def whole(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number, or the default."""
        value = self.number(name)
        return default if value is None else int(value)

    def text(self, name: str, default: str = "") -> str:
        """Return a string; numbers are spelled, anything else is the default."""
        value = self._values.get(name)
        if isinstance(value, str):
            return value
        number = self.number(name)
        return default if number is None else f"{number:g}"

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; a single string is a list of one."""
        value = self._values.get(name)
        if isinstance(value, str):
            return (value,)
        return tuple(str(item) for item in value) if isinstance(value, list) else ()

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of finite numbers; others are left out."""
        value = self._values.get(name)
        found = [Fields({name: item}, self.where).number(name) for item in value] if isinstance(value, list) else []
        return tuple(number for number in found if number is not None)

    def flag(self, name: str) -> bool | None:
        """Return true, false, or ``None`` where neither is written."""
        value = self._values.get(name)
        return value if isinstance(value, bool) else None

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object as a plain dictionary; anything else reads as empty."""
        value = self._values.get(name)
        return dict(value) if isinstance(value, dict) else {}

    def part(self, name: str) -> Fields:
        """Return a nested object."""
        return Fields(self._values.get(name), self.where)

    def parts(self, name: str) -> list[Fields]:
        """Return a list of nested objects."""
        value = self._values.get(name)
        return [Fields(item, self.where) for item in value if isinstance(item, dict)] if isinstance(value, list) else []
