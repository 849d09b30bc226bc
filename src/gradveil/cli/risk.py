"""``gradveil risk``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.options import with_options
from gradveil.cli.output import AsJson, note, out_path, print_json
from gradveil.errors import UsageError
from gradveil.study.cell import HORIZONTAL, Cell
from gradveil.study.declare import keys_of

if TYPE_CHECKING:
    from gradveil.data import Dataset
    from gradveil.study.risks import RiskResult

__all__ = ["risk"]

Texts = list[str] | None
SCORED = ("data", "labels", "scale", "read", "weights", "loss", "local_steps", "parts", "party", "seed")
ASKED = tuple(key for key in keys_of(Cell) if key.name in SCORED)
MODEL_HELP = "Built-in name, module:factory or file.py:factory; repeat it to rank models."
DEFENSE_HELP = "Defense or chain; repeatable. The undefended score is always there to compare with."
CUT_HELP = "Vertical learning: score the embedding at this cut, as in cut1; none is the update; repeat it to rank cuts."
ALPHA_HELP = "Centre of the score: a number, or a file written by --calibrate; by default that of the package."

ATTAINED_HELP = "Also send public records through the client and show what a regression learns: seconds a defense."


@with_options(ASKED)
def risk(
    model: Annotated[Texts, typer.Option(help=MODEL_HELP)] = None,
    defense: Annotated[Texts, typer.Option(help=DEFENSE_HELP)] = None,
    cut: Annotated[Texts, typer.Option(help=CUT_HELP)] = None,
    records: Annotated[int, typer.Option(help="How many records are scored.")] = 16,
    mode: Annotated[str, typer.Option(help="Of InvRE: auto, dense, gram, leading, or off.")] = "auto",
    prior: Annotated[str, typer.Option(help="Public records: auto, same, other, none (1/f²), or off for no exposure.")] = "auto",
    attained: Annotated[bool, typer.Option("--attained/--no-attained", help=ATTAINED_HELP)] = True,
    rank: Annotated[int | None, typer.Option(help="Directions kept of public records; 256 where there are enough.")] = None,
    noise_form: Annotated[str, typer.Option(help="How noise counts in InvRE: inverse or paper; see docs/risk.md.")] = "inverse",
    compare: Annotated[bool, typer.Option("--compare", help="Rank models and cuts by exposure, least first.")] = False,
    alpha: Annotated[str | None, typer.Option(help=ALPHA_HELP)] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Also write alpha.json: the mean undefended score.")] = False,
    fail_if: Annotated[Texts, typer.Option(metavar="LIMIT", help="Exit with 1 if beyond, as in 'exposure>3' (dB).")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", parser=out_path, help="Folder for risk.json; risk.html for built-in data.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --out: a page with pictures of your own data.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: AsJson = False,
    **asked: Any,
) -> None:
    """Score how exposed each record is, without running an attack.

    Exposure is in dB above knowing nothing: what a regression on public records attains, and what a linear
    attacker gets who is told the derivative at the record. InvRE, the paper's score, stands beside it.

    Example: gradveil risk --data scans.npz --model net.py:make --defense 'gaussian_noise(std=0.01)' --fail-if 'exposure>3'
    """
    if private and out is None:
        raise UsageError("--private writes a page of pictures; name a folder for it with --out")
    if records < 1:
        raise UsageError(f"--records is {records}; score at least 1")
    from gradveil.cli.risk_table import print_risk
    from gradveil.risk.calibration import read_alpha
    from gradveil.run.exposure import assess_risk
    from gradveil.study.codec import encode
    from gradveil.study.limits import parse_limit
    from gradveil.verdict.limits import compare_assessments, enforce

    limits = [parse_limit(text, ("exposure", "invre")) for text in fail_if or []]
    if asked.get("scale") == "auto":
        asked["scale"] = ""
    cell = Cell(**asked, records=records, state="given" if asked.get("weights") else "untrained", device=device)
    if out is not None:
        _write(out, {})  # found out before the scores are computed, not after
    found = assess_risk(
        cell,
        models=model or (),
        cuts=cut or (HORIZONTAL,),
        defenses=defense or (),
        mode=mode,
        noise_form=noise_form,
        alpha=read_alpha(alpha),
        prior=prior,
        rank=rank,
        learn=attained,
        ranked=compare,
        on_record=None if quiet else lambda name, done: _tell(name, done, records),
    )
    result, page = found.result, None
    calibrated = found.calibration().as_dict() if calibrate else None
    if out is not None:
        _write(out, {"risk.json": encode(result), **({"alpha.json": calibrated} if calibrated else {})})
        page = _write_page(out, result, cell.data, found.dataset, private)
    if as_json:
        print_json(encode(result) if calibrated is None else {**encode(result), "calibration": calibrated})
    else:
        print_risk(result, out, page)
        if calibrated is not None:
            typer.echo(f"alpha = {calibrated['alpha']:.4f} over {calibrated['records']} undefended records")
    outcome = compare_assessments(limits, result.assessments, result.exposures)
    for remark in outcome.remarks:
        note(remark)
    enforce(outcome)


def _tell(name: str, done: int, records: int) -> None:
    if done in (1, records) or done % 10 == 0:
        note(f"{name}: {done} of {records} records")


def _write(out: Path, files: dict[str, dict[str, Any]]) -> None:
    from gradveil.storage.files import write_whole

    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(out / name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise UsageError(f"cannot write to {str(out)!r} ({error.strerror}); choose another --out") from error


def _write_page(out: Path, result: RiskResult, source: str, dataset: Dataset, private: bool) -> Path | None:
    """Write the most and least exposed as pictures, where they may be shown: of built-in data, or on demand."""
    from gradveil.data import DATASETS
    from gradveil.report.risk_page import write_risk_page

    builtin = source in DATASETS.names()  # a file of the user's may be called as built-in data is
    if dataset.inputs.ndim != 4 or not (builtin or private) or not result.assessments:
        return None
    rows = [record.row for record in result.assessments[0].records]
    shown = {row: dataset.inputs[row].numpy().astype("float32") for row in rows}
    return write_risk_page(out / ("risk.html" if builtin else "risk-private.html"), result, shown, private=not builtin)
