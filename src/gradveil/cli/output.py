"""What every command prints: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["AsJson", "console", "note", "out_path", "print_json"]

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
WIDE = 140


def out_path(text: str) -> Path:
    """Read the value of an ``--out``: an empty one, as an unset variable leaves behind, would mean the current folder."""
    if not str(text).strip():
        raise UsageError("--out is empty; name where to write, or leave it out")
    return Path(text)


def print_json(value: Any) -> None:
    """Print a result as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """Tell the user something that is not the result."""
    typer.echo(text, err=True)


def console(*, err: bool = False) -> Console:
    """Return a console that keeps tables whole when nobody is looking at a terminal."""
    from rich.console import Console

    made = Console(stderr=err, highlight=False, markup=False, emoji=False)
    return made if made.is_terminal else Console(stderr=err, highlight=False, markup=False, emoji=False, width=WIDE)
