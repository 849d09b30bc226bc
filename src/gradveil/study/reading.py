"""How a file or folder is read, as one short text that plans, commands and results all carry.

    size=64x64, colour=false, owner_column=patient

One text, because every place that loads data must carry all of it: a result whose record forgets how its data was read cannot be
run again.
"""

from __future__ import annotations

from typing import Any

from gradveil.errors import UsageError, suggest

__all__ = ["LAYOUTS", "SPLITS", "read_options", "read_text"]

LAYOUTS = ("auto", "nhwc", "nchw", "nhw", "nct", "nf")
SPLITS = ("train", "val", "test")
NAMES = ("size", "colour", "layout", "split", "classes", "label_column", "owner_column")


def read_options(text: str) -> dict[str, Any]:
    """Return the settings of `load_data` that a text names.

    >>> read_options("size=64x48, colour=false, owner_column=patient")
    {'size': (64, 48), 'colour': False, 'owner_column': 'patient'}

    Raises:
        UsageError: Unknown, repeated or unreadable settings.
    """
    found: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise UsageError(f"cannot read {part!r}: write name=value, as in size=64x64, with commas between settings")
        if name not in NAMES:
            raise UsageError(f"reading data has no setting {name!r}{suggest(name, NAMES)}")
        if name in found:
            raise UsageError(f"{name} is given twice for reading data; give it once")
        found[name] = _value(name, value.strip("'\""))
    return found


def read_text(text: str) -> str:
    """Return the one way of writing these settings, so that equal ones have equal keys.

    >>> read_text("colour = FALSE ,size=64")
    'size=64x64, colour=false'
    """
    found = read_options(text)
    return ", ".join(f"{name}={_spelled(found[name])}" for name in NAMES if name in found)


def _value(name: str, value: str) -> Any:
    if name == "size":
        return _size(value)
    if name == "colour":
        if value.lower() not in ("true", "false"):
            raise UsageError(f"colour is {value!r}; write true or false")
        return value.lower() == "true"
    if name == "classes":
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"classes is {value!r}; give a whole number of at least 1")
        return int(value)
    for choices, owner in ((LAYOUTS, "layout"), (SPLITS, "split")):
        if name == owner and value not in choices:
            raise UsageError(f"{name} is {value!r}{suggest(value, choices)}")
    return value


def _size(value: str) -> tuple[int, int]:
    sides = value.lower().split("x")
    if len(sides) > 2 or not all(side.strip().isdecimal() and int(side) > 0 for side in sides):
        raise UsageError(f"size is {value!r}; give height and width, as in 64x48, or one number for both")
    return int(sides[0]), int(sides[-1])


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(str(side) for side in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
