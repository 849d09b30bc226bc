"""What the tables of scripted studies share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["MISSING", "short", "table"]

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
