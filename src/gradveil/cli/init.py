"""``gradveil init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.cli.options import with_options
from gradveil.cli.output import AsJson, out_path, print_json
from gradveil.study.declare import keys_of
from gradveil.study.settings import DataSource, ModelSource

__all__ = ["init"]


@with_options([*keys_of(DataSource), *(key for key in keys_of(ModelSource) if key.name != "loss")])
def init(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", parser=out_path, help="The plan to write, plan.toml unless named.", show_default=False
        ),
    ] = Path("plan.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a plan that is there already.")] = False,
    as_json: AsJson = False,
    **choices: Any,
) -> None:
    """Look at a model and its data, and write a plan.

    The plan is commented and ready for `gradveil audit`.

    Example: gradveil init --data photos --model lenet
    """
    from gradveil.run.starter_plan import write_plan

    path, found = write_plan(out, force=force, **choices)
    if as_json:
        print_json({"plan": str(path), **found.as_dict()})
        return
    for sentence in found.sentences():
        typer.echo(sentence)
    typer.echo(f"\nThe plan is in {path}; read it, then run: gradveil audit {path}")
