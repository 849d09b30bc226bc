"""``gradveil study``: published measurements, from a plan to a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.output import AsJson, note, out_path, print_json

__all__ = ["study"]

study = typer.Typer(help="Run a published study into one file of results, and print its table.", no_args_is_help=True)

Files = list[Path] | None


@study.command(name="run")
def run_command(
    file: Annotated[Path, typer.Argument(metavar="STUDY.toml", hidden=True)],
    out: Annotated[Path | None, typer.Option(metavar="FILE", parser=out_path, help="Results [results/NAME.json.xz].")] = None,
    work: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to work in and to go on from [out/NAME].")] = None,
    data: Annotated[Files, typer.Option(metavar="FILE", help="Where a data file of the study is; repeatable.")] = None,
    weights: Annotated[Files, typer.Option(metavar="FILE", help="Where a weights file of the study is; repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: auto, cpu or cuda.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one per core.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a study into one file of results; a stopped one continues with the same command.

    Example: gradveil study run studies/first_light_photos.toml
    """
    from gradveil.cli.progress import show_progress
    from gradveil.run.scripted import place_settings, run_scripted
    from gradveil.run.studies import place_files, run_study
    from gradveil.study.published import ScriptedStudy, load_study

    found, where = load_study(file), {"data": data or (), "weights": weights or ()}
    place, folder = out or Path("results", f"{found.name}.json.xz"), work or Path("out", found.name)
    seed = found.settings.get("seed", 0) if isinstance(found, ScriptedStudy) else found.plan.seed
    note(f"seed {seed} · results go to {place}")
    with show_progress(quiet=quiet) as on_progress:
        if isinstance(found, ScriptedStudy):
            asked = place_settings(found, **where, device=device)
            path = run_scripted(asked, work=folder, out=place, workers=workers, on_progress=on_progress)
        else:
            planned = place_files(found, **where, device=device)
            path = run_study(planned, work=folder, out=place, workers=workers, on_progress=on_progress)
    print_json({"results": str(path), "seed": seed}) if as_json else typer.echo(str(path))


@study.command(name="table")
def table_command(
    files: Annotated[list[Path], typer.Argument(metavar="RESULTS...", hidden=True)],
    as_json: AsJson = False,
) -> None:
    """Print the table of a study as Markdown; several files of one kind make one table.

    Example: gradveil study table results/first_light_audit.json.xz
    """
    from gradveil.report.study_tables import table_of_studies
    from gradveil.storage.study_file import read_study

    studies = [read_study(file) for file in files]
    text, notes = table_of_studies(studies), [note for each in studies for note in each["study"].get("notes", [])]
    if as_json:
        print_json({"table": text, "notes": notes})
    else:
        typer.echo("\n".join([text.rstrip("\n"), *([""] if notes else []), *notes]))
