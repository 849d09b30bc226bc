"""``gradveil audit``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.options import with_options
from gradveil.cli.output import AsJson, note, out_path, print_json
from gradveil.errors import Unreliable, UsageError
from gradveil.study.document import NO_OPTION, OF_PLAN

if TYPE_CHECKING:
    from gradveil.study.plan import Plan
    from gradveil.study.run_result import Run

__all__ = ["audit"]

ASKED = tuple(key for key in OF_PLAN if key.name not in NO_OPTION)
UTILITY_HELP = "Also train this many federated rounds with every defense, to measure accuracy, bytes and time."
SAID = "and --batch-size, --local-epochs or --local-steps, --minibatch, --momentum, --optimizer and --learning-rate"
UNSAID = (
    "and say how it trained: without --local-epochs or --local-steps the update is taken for the gradient of one batch; "
    "--minibatch, --momentum, --optimizer and --learning-rate count too"
)
OUT_HELP = "Folder for results; the same folder continues a run."


@with_options(ASKED, repeatable=[key.name for key in ASKED if key.axis])
def audit(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN.toml]", hidden=True)] = None,
    utility: Annotated[int | None, typer.Option(metavar="ROUNDS", help=UTILITY_HELP)] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", parser=out_path, help=OUT_HELP)] = None,
    update: Annotated[Path | None, typer.Option(metavar="FILE", help="Attack this captured update instead of made ones.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one per core.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Write a second report with pictures of your data.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print cells, time and memory, and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: AsJson = False,
    **changes: Any,
) -> None:
    """Measure what updates give away and write a report.

    PLAN.toml says what to measure; without it, a built-in example runs. Options win over the plan. A stopped run continues with
    the same command.

    Example: gradveil audit --data scans.npz --model net.py:make --records 64
    """
    if update and plan is None:
        changes = {"defense": ["none"], **changes}
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is {workers}; start at least 1")
    asked = _ask_for_utility(_read_plan(plan, changes), utility)
    if dry_run:
        _estimate(asked, workers, as_json)
        return
    folder = out or Path(asked.out or (f"audit-{plan.stem}" if plan else "audit-results"))
    if update is not None:
        _run_captured(asked, update, folder, as_json)
        return
    _finish(asked, _run(asked, folder, workers, quiet), private, as_json)


def _read_plan(file: Path | None, changes: dict[str, Any]) -> Plan:
    from gradveil.study.plan import Plan

    base = Plan.from_toml(file) if file else Plan.default()
    return base.override(**changes)


def _ask_for_utility(plan: Plan, rounds: int | None) -> Plan:
    from gradveil.study.federation import UtilitySettings

    if rounds is None:
        return plan
    if rounds < 1:
        raise UsageError(f"--utility is {rounds}; ask for at least 1 round of training")
    return plan.override(utility=(plan.utility or UtilitySettings()).replace(rounds=rounds))


def _estimate(plan: Plan, workers: int | None, as_json: bool) -> None:
    from gradveil.cli.results import print_estimate
    from gradveil.run.estimate import estimate_plan

    found = estimate_plan(plan, workers)
    if as_json:
        print_json({"seed": plan.seed, **found.as_dict()})
    else:
        print_estimate(found)
        typer.echo(f"seed {plan.seed}")


def _command() -> str:
    return shlex.join(["gradveil", *sys.argv[1:]])


def _run(plan: Plan, folder: Path, workers: int | None, quiet: bool) -> Run:
    from gradveil.audit.materials import Materials
    from gradveil.cli.progress import show_progress
    from gradveil.run.grid import check_inputs
    from gradveil.run.pool import run_audit

    materials = Materials()
    check_inputs(plan, materials)
    if not quiet:
        _warn_of_few_records(plan)
        note(f"seed {plan.seed} · results go to {folder}")
    with show_progress(quiet=quiet) as on_progress:
        return run_audit(plan, folder, command=_command(), workers=workers, on_progress=on_progress, materials=materials)


def _run_captured(plan: Plan, update: Path, folder: Path, as_json: bool) -> None:
    from gradveil.run.grid import cells_of

    cells = cells_of(plan)
    if not update.is_file():
        raise UsageError(f"there is no file {str(update)!r} to attack")
    if plan.fail_if:
        raise UsageError("--fail-if needs the truth, which a captured update does not bring; leave it out with --update")
    if plan.utility is not None:
        raise UsageError("a captured update cannot be trained with; leave utility out with --update")
    if len(cells) != 1:
        raise UsageError(f"--update attacks one update, and the plan has {len(cells)} cells; name one model and one --defense")
    from gradveil.audit.captured import audit_captured

    found = audit_captured(update, cells[0], folder, command=_command())
    if as_json:
        print_json({"out": str(found.out), "seed": plan.seed, **found.record})
    else:
        typer.echo("\n".join([*found.sentences(), f"seed {plan.seed}", f"results: {found.out}"]))
    if not found.explains:
        raise Unreliable(
            "no reconstruction explains the captured update better than guesses that never saw it, so no record is named; "
            f"check --weights and --defense against what the client used, {SAID if found.says_training else UNSAID}"
        )


def _warn_of_few_records(plan: Plan) -> None:
    """Say before the work, not after it, that a limit cannot be shown to hold with so few records."""
    from gradveil.study.limits import parse_limit

    together = max(plan.batch_size) * max(plan.clients)
    updates = plan.records // together
    for limit in map(parse_limit, plan.fail_if):
        fewest = limit.fewest_records()
        if fewest is None or updates < fewest:
            have = f"{plan.records} records" if together == 1 else f"{plan.records} records in {updates} updates"
            needed = "no number of them is enough" if fewest is None else f"it takes {fewest * together}"
            note(f"note: {have} cannot show that {limit.text} holds, even if attackers only guess; {needed}")


def _finish(plan: Plan, run: Run, private: bool, as_json: bool) -> None:
    from gradveil.cli.results import print_results, results_as_dict
    from gradveil.report import write_report
    from gradveil.study.limits import parse_limit
    from gradveil.verdict.limits import compare, enforce

    reports = {"report": str(write_report(run.out))}
    if private:
        reports["report_private"] = str(write_report(run.out, private=True))
    outcome = compare([parse_limit(text) for text in plan.fail_if], run.cells, run.missing if plan.fail_if else ())
    if as_json:
        print_json({"out": str(run.out), **reports, "seed": plan.seed, **results_as_dict(run), "limits": outcome.as_dict()})
    else:
        print_results(run)
        typer.echo(f"seed {plan.seed}")
        typer.echo("\n".join(f"{name.replace('_', ' ')}: {path}" for name, path in reports.items()))
    for remark in outcome.remarks:
        note(remark)
    enforce(outcome)
