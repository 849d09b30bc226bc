"""``gradveil list``."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated

import typer

from gradveil.cli.output import AsJson, print_json

__all__ = ["list_methods"]


def list_methods(kind: Annotated[str, typer.Argument(metavar="KIND", hidden=True)], as_json: AsJson = False) -> None:
    """List what there is of a kind.

    KIND is one of defenses, attacks, ensembles, metrics, models, datasets, partitions, divisions, losses, networks.

    Example: gradveil list defenses
    """
    from gradveil.cli.catalogue import entries

    found = entries(kind)
    if as_json:
        print_json(found)
        return
    widest = max((len(entry["name"]) for entry in found), default=0)
    width = max(60, shutil.get_terminal_size((110, 24)).columns - widest - 2)
    for entry in found:
        first, *rest = textwrap.wrap(entry["summary"], width) or [""]
        typer.echo(f"{entry['name']:<{widest}}  {first}")
        for line in rest:
            typer.echo(f"{'':<{widest}}  {line}")
