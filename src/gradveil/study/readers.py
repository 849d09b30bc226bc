"""Checks of single values, each with its one sentence: what a plan, a command line or a caller in Python gave.

A reader takes the place a value stands in, as the user knows it, and the value; it returns the value as it is kept, or raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gradveil.errors import UsageError
from gradveil.study.checks import check_choice, check_number, check_whole, is_number
from gradveil.study.reading import read_text

__all__ = [
    "Reader",
    "below_one",
    "choice",
    "device",
    "flag",
    "list_size",
    "named",
    "positive",
    "reading",
    "risk_mode",
    "share",
    "text",
    "whole",
]

Reader = Callable[[str, Any], Any]
LARGEST = 2**53
DEVICES = ("auto", "cpu", "cuda")
RISK_MODES = ("auto", "off", "dense", "gram", "leading")


def text(place: str, value: Any) -> str:
    """Any text, without blanks around it."""
    if not isinstance(value, str):
        raise UsageError(f'{place} is {value!r}; give it as text in quotes, as in "name"')
    return value.strip()


def named(place: str, value: Any) -> str:
    """A text that is not empty."""
    found = text(place, value)
    if not found:
        raise UsageError(f"{place} is empty; name one, or leave the key out")
    return found


def flag(place: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise UsageError(f"{place} is {value!r}; write true or false")
    return value


def whole(least: int) -> Reader:
    """A whole number of at least ``least``."""

    def read(place: str, value: Any) -> int:
        check_whole("", place, value, least, ask="give")
        if value >= LARGEST:
            raise UsageError(f"{place} is {value!r}; give a whole number below {LARGEST}")
        return int(value)

    return read


def positive(place: str, value: Any) -> float:
    """A finite number above 0."""
    check_number("", place, value, open_below=True, ask="give")
    return float(value)


def share(place: str, value: Any) -> float:
    """A number between 0 and 1, both left out."""
    if not is_number(value) or not 0 < value < 1:
        raise UsageError(f"{place} is {value!r}; give a share between 0 and 1, as in 0.2")
    return float(value)


def below_one(place: str, value: Any) -> float:
    """A number from 0 to below 1, such as a momentum."""
    check_number("", place, value, below=1, ask="give")
    return float(value)


def choice(*choices: str) -> Reader:
    """One of a few texts; another one is answered with the nearest."""

    def read(place: str, value: Any) -> str:
        found = text(place, value)
        check_choice("", place, found, choices)
        return found

    return read


def device(place: str, value: Any) -> str:
    """Where to compute; ``cuda:1`` names one of several GPUs."""
    found = text(place, value)
    if not re.fullmatch(r"cuda:\d+", found):
        check_choice("", place, found, DEVICES)
    return found


def risk_mode(place: str, value: Any) -> str:
    """A mode, or true and false for the usual one and none."""
    return ("off", "auto")[value] if isinstance(value, bool) else str(choice(*RISK_MODES)(place, value))


def list_size(place: str, value: Any) -> str:
    """``auto``, ``off`` (also false and 0), or how many candidates, at least two."""
    if isinstance(value, bool):
        return ("off", "auto")[value]
    if isinstance(value, int) or str(value).strip().isdecimal():
        count: int = whole(0)(place, int(value))
        if count == 1:
            raise UsageError(f"{place} is 1; a list needs at least 2 candidates, or give off")
        return str(count) if count else "off"
    if str(value).strip() not in ("auto", "off"):
        raise UsageError(f"{place} is {value!r}; give auto, off, or a whole number of candidates")
    return str(value).strip()


def reading(place: str, value: Any) -> str:
    """How files are read; see `gradveil.study.reading`."""
    return read_text(text(place, value))
