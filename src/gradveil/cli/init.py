"""``gradveil init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.output import READ_HELP, AsJson, out_path, print_json

__all__ = ["init"]


def init(
    data: Annotated[str | None, typer.Option(help="Built-in name, .npz, .npy, IDX or folder of pictures.")] = None,
    labels: Annotated[str | None, typer.Option(help="Label file (.csv, .npy or IDX).")] = None,
    scale: Annotated[str | None, typer.Option(help="auto, minmax or none.")] = None,
    read: Annotated[str | None, typer.Option(metavar="SETTINGS", help=READ_HELP)] = None,
    model: Annotated[str | None, typer.Option(help="Built-in name, module:factory or file.py:factory.")] = None,
    weights: Annotated[str | None, typer.Option(help=".safetensors, or a state dict as .pt or .pth.")] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", parser=out_path, help="The plan to write, plan.toml unless named.", show_default=False
        ),
    ] = Path("plan.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a plan that is there already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at a model and its data, and write a plan.

    The plan is commented and ready for `gradveil audit`.

    Example: gradveil init --data photos --model lenet
    """
    from gradveil.run.starter_plan import write_plan

    path, found = write_plan(out, force=force, data=data, labels=labels, scale=scale, read=read, model=model, weights=weights)
    if as_json:
        print_json({"plan": str(path), **found.as_dict()})
        return
    for sentence in found.sentences():
        typer.echo(sentence)
    typer.echo(f"\nThe plan is in {path}; read it, then run: gradveil audit {path}")
