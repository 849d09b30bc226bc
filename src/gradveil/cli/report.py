"""``gradveil report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.output import AsJson, out_path, print_json

__all__ = ["report"]


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", hidden=True)],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", parser=out_path, help="HTML file to write.")] = None,
    private: Annotated[bool, typer.Option("--private", help="With pictures and record ids of your data.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the report of a results folder.

    DIR is a folder that `gradveil audit` wrote, or the results file of a study; the report is one HTML file.

    Example: gradveil report audit-results -o report.html
    """
    from gradveil.report import write_report
    from gradveil.storage.study_file import as_folder, is_study_file

    packed = Path(f"{folder.name.removesuffix('.json.xz')}.html") if is_study_file(folder) else None
    with as_folder(folder) as read:
        path = write_report(read, out or packed, private)
    if as_json:
        print_json({"report": str(path), "private": private})
    else:
        typer.echo(str(path))
