"""``gradveil recommend``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.output import AsJson, print_json

__all__ = ["recommend"]

NONE_QUALIFIES = 1


def recommend(
    folder: Annotated[Path, typer.Argument(metavar="DIR", hidden=True)],
    max_accuracy_drop: Annotated[
        float | None, typer.Option(metavar="POINTS", help="Accuracy that may be lost, in points.")
    ] = None,
    max_time: Annotated[float | None, typer.Option(metavar="RATIO", help="Client time, relative to no defense.")] = None,
    max_bytes_ratio: Annotated[float | None, typer.Option(metavar="RATIO", help="Bytes sent, relative to no defense.")] = None,
    max_identified: Annotated[float | None, typer.Option(metavar="SHARE", help="Upper bound of the share attackers get.")] = None,
    level: Annotated[str, typer.Option(metavar="LEVEL", help="What counts as a leak: label, list or picture.")] = "picture",
    strict: Annotated[
        bool, typer.Option("--strict", help="The whole interval of the accuracy must be within the limit.")
    ] = False,
    cut: Annotated[
        str, typer.Option(metavar="CUT", help="Rows of models cut here; none for horizontal rows, the default if there are any.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Say which defense to use, in one line and with its reason.

    DIR is a folder of `gradveil audit` whose plan asked for utility. Among the defenses within the limits, the one that leaks
    least is recommended; ends with 1 if none qualifies.

    Example: gradveil recommend audit-results --max-accuracy-drop 1 --max-time 1.2
    """
    from gradveil.storage.study_file import as_folder
    from gradveil.study.load import load_run
    from gradveil.verdict.recommend import Requirements
    from gradveil.verdict.recommend import recommend as choose

    asked = Requirements(
        max_accuracy_drop=max_accuracy_drop,
        max_time=max_time,
        max_bytes_ratio=max_bytes_ratio,
        max_identified=max_identified,
        strict=strict,
        level=level,
        cut=cut,
    )
    with as_folder(folder) as read:
        found = choose(load_run(read), asked)
    if as_json:
        print_json(found.as_dict())
    else:
        typer.echo("\n".join([found.sentence, *(f"note: {note}" for note in found.notes)]).replace("\u00a0", " "))
    if found.chosen is None:
        raise typer.Exit(NONE_QUALIFIES)
