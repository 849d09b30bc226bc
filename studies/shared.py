"""What scripted studies share: tables in Markdown, and groups of units that differ in some settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

__all__ = ["MISSING", "grouped", "short", "slug", "table"]

MISSING = "–"


def table(head: str | Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the head may be written with bars."""
    names = [each.strip() for each in head.split("|")] if isinstance(head, str) else head
    lines = [names, *([str(cell) for cell in row] for row in rows)]
    top, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([top, "|" + "---|" * len(names), *body]) + "\n"


def short(value: float, digits: int = 3) -> str:
    """Return a share without the nought before its point, as .384."""
    return f"{value:.{digits}f}".removeprefix("0")


def slug(text: str) -> str:
    """Return a text as part of the name of a unit."""
    return "_".join(re.findall(r"[\w.-]+", text))


def grouped(settings: SimpleNamespace) -> dict[str, SimpleNamespace]:
    """Return the settings of every row of ``[[settings.groups]]`` by the name of its unit.

    A group has a ``folder``, which its units' names begin with, ``rows``, and settings of its own; ``row`` is added to each.
    """
    found: dict[str, SimpleNamespace] = {}
    common = {name: value for name, value in vars(settings).items() if name != "groups"}
    for group in settings.groups:
        own = {name: value for name, value in group.items() if name not in ("folder", "rows")}
        for row in group["rows"]:
            name = "/".join([*([group["folder"]] if group.get("folder") else []), slug(row)])
            found[name] = SimpleNamespace(**common | own, row=row)
    return found
