"""``gradveil version``."""

from __future__ import annotations

import typer

import gradveil
from gradveil.cli.output import AsJson, print_json

__all__ = ["print_version", "version"]


def version(as_json: AsJson = False) -> None:
    """Print the versions that matter."""
    print_version(as_json)


def print_version(as_json: bool) -> None:
    """Print the versions without importing torch."""
    # Slow to import, and every command, `--help` too, imports this file.
    import importlib.metadata
    import platform

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    found = {"gradveil": gradveil.__version__, "python": platform.python_version(), "torch": torch}
    if as_json:
        print_json(found)
    else:
        typer.echo(" · ".join(f"{name} {value}" for name, value in found.items()))
