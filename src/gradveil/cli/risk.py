"""``gradveil risk``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.options import with_options
from gradveil.cli.output import AsJson, console, note, out_path, print_json
from gradveil.errors import UsageError, suggest
from gradveil.study.cell import HORIZONTAL, Cell
from gradveil.study.declare import keys_of

if TYPE_CHECKING:
    from gradveil.data import Dataset
    from gradveil.study.limits import Limit
    from gradveil.study.risks import Assessment, RiskRecord, RiskResult
    from gradveil.verdict.limits import Outcome

__all__ = ["risk"]

Texts = list[str] | None
MODES = ("auto", "dense", "gram", "leading")
SHOWN = 5
SCORED = ("data", "labels", "scale", "read", "weights", "loss", "local_steps", "parts", "party", "seed")
ASKED = tuple(key for key in keys_of(Cell) if key.name in SCORED)
MODEL_HELP = "Built-in name, module:factory or file.py:factory; repeat it to rank models."
DEFENSE_HELP = "Defense or chain; repeatable. The undefended score is always there to compare with."
CUT_HELP = "Vertical learning: score the embedding at this cut, as in cut1; none is the update; repeat it to rank cuts."
ALPHA_HELP = "Centre of the score: a number, or a file written by --calibrate; by default that of the package."


@with_options(ASKED)
def risk(
    model: Annotated[Texts, typer.Option(help=MODEL_HELP)] = None,
    defense: Annotated[Texts, typer.Option(help=DEFENSE_HELP)] = None,
    cut: Annotated[Texts, typer.Option(help=CUT_HELP)] = None,
    records: Annotated[int, typer.Option(help="How many records are scored.")] = 16,
    mode: Annotated[str, typer.Option(help="auto, dense, gram or leading.")] = "auto",
    noise_form: Annotated[str, typer.Option(help="How noise counts: paper or inverse; see docs/risk.md.")] = "paper",
    compare: Annotated[bool, typer.Option("--compare", help="Rank models and cuts, least exposed first.")] = False,
    alpha: Annotated[str | None, typer.Option(help=ALPHA_HELP)] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Also write alpha.json: the mean undefended score.")] = False,
    fail_if: Annotated[Texts, typer.Option(metavar="LIMIT", help="Exit with 1 if beyond, as in 'invre>0.45'.")] = None,
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

    The score (InvRE) bounds a linearised optimal attacker's error from above: a high score warns, a low one does not acquit.

    Example: gradveil risk --data scans.npz --model net.py:make --defense 'gaussian_noise(std=0.01)' --fail-if 'invre>0.45'
    """
    if mode not in MODES:
        raise UsageError(f"there is no mode {mode!r}{suggest(mode, MODES)}")
    if private and out is None:
        raise UsageError("--private writes a page of pictures; name a folder for it with --out")
    if records < 1:
        raise UsageError(f"--records is {records}; score at least 1")
    models = model or ["lenet"]
    if asked.get("weights") and len(models) > 1:
        raise UsageError("--weights belong to one model; score models with weights one at a time")
    from gradveil.risk.calibration import read_alpha
    from gradveil.study.codec import encode
    from gradveil.study.limits import parse_limit
    from gradveil.verdict.limits import enforce

    limits = [parse_limit(text, ("invre",)) for text in fail_if or []]
    centre = read_alpha(alpha)
    if asked.get("scale") == "auto":
        asked["scale"] = ""
    base = Cell(**asked, state="given" if asked.get("weights") else "untrained", device=device)
    cuts = _cuts(cut or ["none"], base)
    if out is not None:
        _write(out, {})  # found out before the scores are computed, not after
    dataset, found = _assess(
        base, models, cuts, defense or [], records, {"mode": mode, "alpha": centre, "noise_form": noise_form}, quiet
    )
    result = _result(found, dataset, centre, compare or len(models) * len(cuts) > 1)
    calibrated = _calibration(found, dataset, base.weights, base.seed) if calibrate else None
    page = None
    if out is not None:
        _write(out, {"risk.json": encode(result), **({"alpha.json": calibrated} if calibrated else {})})
        page = _write_page(out, result, base.data, dataset, private)
    if as_json:
        print_json(encode(result) if calibrated is None else {**encode(result), "calibration": calibrated})
    else:
        _print(result, out, page)
        if calibrated is not None:
            typer.echo(f"alpha = {calibrated['alpha']:.4f} over {calibrated['records']} undefended records")
    enforce(_outcome(limits, found))


def _cuts(names: Sequence[str], base: Cell) -> list[dict[str, Any]]:
    """Return what each cut sets in a cell; ``none`` is no cut, and then nobody owns a part."""
    if base.party < 0:
        raise UsageError(f"--party is {base.party}; count parties from 0")
    if (base.parts != "whole" or base.party) and not set(names) - {HORIZONTAL}:
        raise UsageError("--parts and --party are for cut models; add --cut, as in --cut cut1, or leave them out")
    return [{"cut": each} if each != HORIZONTAL else {"parts": "whole", "party": 0} for each in names]


def _assess(
    base: Cell,
    models: Sequence[str],
    cuts: Sequence[dict[str, Any]],
    defenses: Sequence[str],
    records: int,
    options: dict[str, Any],
    quiet: bool,
) -> tuple[Dataset, list[Assessment]]:
    from gradveil.audit.party import own_data
    from gradveil.audit.scene import build_learner, load_cell_data
    from gradveil.defenses import build_defense
    from gradveil.randomness import Seed
    from gradveil.risk.exposure import assess
    from gradveil.run.vertical_grid import fitting_cells
    from gradveil.tensors import find_device

    cell = base.replace(device=find_device(base.device))
    dataset = load_cell_data(cell)
    if records > len(dataset):
        raise UsageError(f"--records is {records} and {dataset.name!r} has {len(dataset)}; lower it")
    order = Seed(cell.seed).child("records").numpy("choice").permutation(len(dataset)).tolist()
    rows = sorted(order[:records])
    found = []
    spellings = dict.fromkeys(["none", *defenses])
    grid = [cell.replace(model=model, defense=name, **cut) for model in models for cut in cuts for name in spellings]
    for each in fitting_cells(grid):
        defense = build_defense(each.defense)
        learner = build_learner(each, dataset, defense)
        name = f"{each.model} · {each.cut}" if each.cut else each.model
        batch = own_data(each, dataset).batch(rows)
        show = _progress(f"{name} · {each.defense}", records, quiet)
        found.append(
            assess(learner, batch, defense, **options, model=name, rows=rows, seed=Seed(cell.seed), progress=show),
        )
    return dataset, found


def _outcome(limits: Sequence[Limit], found: Sequence[Assessment]) -> Outcome:
    """Compare model by model, so that the undefended baseline of each stands beside its own defenses."""
    from gradveil.verdict.limits import Outcome, compare_risk

    models = dict.fromkeys(each.model for each in found)
    parts = [compare_risk(limits, [(each.defense, _named(each)) for each in found if each.model == name]) for name in models]
    violations = tuple(violation for part in parts for violation in part.violations)
    doubts = tuple(dict.fromkeys(doubt for part in parts for doubt in part.doubts))
    return Outcome(violations, doubts, sum(part.judged for part in parts))


def _named(each: Assessment) -> list[RiskRecord]:
    """Return the records of an assessment as limits know them, called by their row."""
    from gradveil.study.risks import RiskRecord

    return [
        RiskRecord(pseudonym=f"row {record.row} under {each.model}", invre=record.invre, low=record.low, high=record.high)
        for record in each.records
    ]


def _progress(name: str, records: int, quiet: bool) -> Callable[[int], None] | None:
    def show(done: int) -> None:
        if done in (1, records) or done % 10 == 0:
            note(f"{name}: {done} of {records} records")

    return None if quiet else show


def _result(found: Sequence[Assessment], dataset: Dataset, alpha: float, ranked: bool) -> RiskResult:
    from gradveil.risk.invloss import MEANING
    from gradveil.study.risks import RiskData, RiskResult

    data = RiskData(name=dataset.name, digest=dataset.digest(), records=len(found[0].records))
    result = RiskResult(meaning=MEANING, alpha=alpha, data=data, assessments=tuple(found))
    return result.ranked() if ranked else result


def _calibration(found: Sequence[Assessment], dataset: Dataset, weights: str, seed: int) -> dict[str, Any]:
    from gradveil.risk.calibration import calibrate

    return calibrate(found[0], data=dataset.name, digest=dataset.digest(), weights=weights, seed=seed).as_dict()


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
    if dataset.inputs.ndim != 4 or not (builtin or private):
        return None
    rows = [record.row for record in result.assessments[0].records]
    shown = {row: dataset.inputs[row].numpy().astype("float32") for row in rows}
    return write_risk_page(out / ("risk.html" if builtin else "risk-private.html"), result, shown, private=not builtin)


def _print(result: RiskResult, out: Path | None, page: Path | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    screen = console()
    for each in result.assessments:
        screen.print(
            f"\n{each.model} · {each.defense} · mean InvRE {each.mean_invre:.3f} · mode {each.mode} · {each.seconds:.1f} s"
        )
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("", "row", "label", "InvRE", "range", "reading", "score", "rank"):
            table.add_column(name, no_wrap=True)
        most, least = each.ranked[:SHOWN], each.ranked[SHOWN:][-SHOWN:]
        for word, group in (("most exposed", most), ("least exposed", least)):
            for place, record in enumerate(group):
                span = f"{record.low:.3f}–{record.high:.3f}" if record.low < record.high else ""
                label = "–" if record.label is None else str(record.label)
                values = (str(record.row), label, f"{record.invre:.3f}", span, record.band, f"{record.score:.4f}")
                table.add_row("" if place else word, *values, str(record.rank))
        screen.print(table)
        for sentence in each.notes:
            screen.print(f"note: {sentence}")
    for place, row in enumerate(result.ranking, start=1):
        screen.print(f"{place}. {row.model} · {row.defense}: mean InvRE {row.mean_invre:.3f}")
    screen.print(result.meaning)
    if out is not None:
        screen.print(f"results: {out / 'risk.json'}")
    if page is not None:
        screen.print(f"page: {page}")
