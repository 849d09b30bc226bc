"""All commands in one application."""

from __future__ import annotations

from typing import Annotated

import typer
import typer.core

from gradveil.cli.audit import audit
from gradveil.cli.check import check
from gradveil.cli.init import init
from gradveil.cli.list import list_methods
from gradveil.cli.recommend import recommend
from gradveil.cli.report import report
from gradveil.cli.risk import risk
from gradveil.cli.show import show
from gradveil.cli.study import study
from gradveil.cli.train import train
from gradveil.cli.version import print_version, version

__all__ = ["app"]

# With rich installed, typer escapes brackets even in plain help, "\[default: 0]", and loads all of rich to do so.
typer.core.HAS_RICH = False

# Plain help, because formatting it costs more time than everything else about --help together.
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Know what federated-learning updates reveal about the training data, and stop it.

    Start with `gradveil audit`; it needs no data and no settings.
    """
    if show_version:
        print_version(as_json=False)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(audit)
app.command()(risk)
app.command()(train)
app.command()(init)
app.command(name="list")(list_methods)
app.command()(show)
app.command()(report)
app.command()(recommend)
app.add_typer(study, name="study")
app.command()(check)
app.command()(version)
