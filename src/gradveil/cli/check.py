"""``gradveil check``."""

from __future__ import annotations

from typing import Annotated

import typer

from gradveil.cli.output import AsJson, print_json
from gradveil.errors import Unreliable

__all__ = ["check"]

MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}


def check(method: Annotated[str, typer.Argument(metavar="METHOD", hidden=True)], as_json: AsJson = False) -> None:
    """Check that a method of yours keeps its contract.

    METHOD is module:Class, file.py:Class or a registered name, with settings if it needs any: a defense, an attack or a metric.

    Example: gradveil check gaussian_noise
    """
    from gradveil.cli.contracts import run_contract

    kind, results = run_contract(method)
    failed = [result for result in results if not result.passed]
    if as_json:
        rows = [{"check": result.check, "status": result.status, "message": result.message} for result in results]
        print_json({"method": method, "kind": kind, "passed": not failed, "checks": rows})
    else:
        for result in results:
            typer.echo(f"{MARKS[result.status]:<8} {result.check}{': ' + result.message if result.message else ''}")
    if failed:
        names = ", ".join(result.check for result in failed)
        raise Unreliable(f"{method} breaks {len(failed)} of {len(results)} promises of a {kind}: {names}")
