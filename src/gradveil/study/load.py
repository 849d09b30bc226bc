"""Read a results folder: strict about its format, patient with files that are half-written or unknown.

A cell that cannot be read counts as not done, and a note says so; a folder of another format version is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError
from gradveil.study.fields import Fields, Malformed, read_json
from gradveil.study.load_utility import load_utility, read_guarantee
from gradveil.study.results import (
    Attacker,
    Bar,
    Cell,
    Certificate,
    Check,
    Defense,
    Record,
    Region,
    Results,
    Run,
    Share,
    Spread,
    Summary,
    Threat,
    Timing,
)
from gradveil.study.risks import load_mean_error, load_risk

__all__ = ["check_format", "load_results", "without_folders"]

RUN_FORMAT = "gradveil-run-1"
CELL_FORMAT = "gradveil-cell-1"
KEY = re.compile(r"[0-9A-Za-z_-]{1,64}")


def load_results(folder: Path, *, share: bool = False) -> Results:
    """Return what ``folder`` holds.

    Args:
        folder: The folder that ``gradveil audit --out`` wrote.
        share: Whether the result may leave the building; for user data, labels are then dropped and
            folders cut from every path.

    Raises:
        UsageError: If the folder is missing, holds no finished cell, or was written in a format this version does not know.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no results folder {str(folder)!r}; `gradveil audit --out DIR` makes one")
    raw = _read_run(folder / "run.json")
    redact = share and raw.get("builtin_data") is not True
    run = _run(Fields(without_folders(raw) if redact else raw, "run.json"))
    notes: list[str] = []
    cells = []
    for key in run.keys:
        cell = _load_cell(folder / "cells", key, redact, notes)
        if cell is not None:
            cells.append(cell)
    notes += _strangers(folder / "cells", run.keys)
    if not cells:
        why = f" ({notes[0].rstrip('.')})" if notes else ""
        raise UsageError(
            f"no cell in {str(folder)!r} is finished{why}; start or continue it with `gradveil audit --out {folder}`"
        )
    return Results(run=run, cells=tuple(cells), notes=tuple(notes))


def _read_run(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{str(path.parent)!r} is no results folder: it has no run.json; `gradveil audit --out DIR` makes one")
    try:
        raw = read_json(path)
    except Malformed as error:
        raise UsageError(f"{str(path)!r} is damaged: no JSON object; run the same `gradveil audit` command again") from error
    check_format(path, raw.get("format"), RUN_FORMAT)
    return raw


def check_format(path: Path, found: object, known: str) -> None:
    """Refuse a file of another format than the one this version reads."""
    if found != known:
        raise UsageError(f"{str(path)!r} has format {found!r} and this gradveil reads {known!r}; use the version that wrote it")


def _load_cell(folder: Path, key: str, redact: bool, notes: list[str]) -> Cell | None:
    path = folder / f"{key}.json"
    if not KEY.fullmatch(key):
        notes.append("run.json lists a cell under a name that is no key; it was left out.")
        return None
    if not path.is_file():
        return None
    try:
        raw = read_json(path)
        check_format(path, raw.get("format"), CELL_FORMAT)
        return _cell(Fields(without_folders(raw) if redact else raw, path.name), folder, key, hide_labels=redact)
    except Malformed as error:
        notes.append(f"{error}, so this cell counts as not done; delete the file and the same command measures it again.")
        return None


def _strangers(folder: Path, keys: tuple[str, ...]) -> list[str]:
    known = {f"{key}{suffix}" for key in keys for suffix in (".json", ".timing.json", ".npz")}
    found = (
        sorted(path.name for path in folder.glob("*") if path.name not in known and not path.name.startswith("."))
        if folder.is_dir()
        else []
    )
    if not found:
        return []
    # Names are not repeated: on user data a stray file may be named after a record.
    files = "1 file that does" if len(found) == 1 else f"{len(found)} files that do"
    return [f"The folder holds {files} not belong to this run (left from another plan, or half-written); not used here."]


def _run(run: Fields) -> Run:
    cards = {
        kind: {name: card for name, card in methods.items() if isinstance(card, dict)}
        for kind, methods in run.mapping("cards").items()
        if isinstance(methods, dict)
    }
    return Run(
        version=run.text("version", "unknown"),
        title=run.text("title"),
        command=run.text("command"),
        plan=run.mapping("plan"),
        keys=run.texts("cells"),
        builtin_data=run.flag("builtin_data") is True,
        not_tested=run.texts("not_tested"),
        provenance=run.mapping("provenance"),
        cards=cards,
    )


def _cell(cell: Fields, folder: Path, key: str, *, hide_labels: bool) -> Cell:
    regret, sent, bar = cell.part("regret_db"), cell.part("bytes"), cell.part("bar")
    pictures = folder / f"{key}.npz"
    settings = cell.mapping("cell")
    nulls = {
        name: _summary(Fields(value, cell.where)) for name, value in cell.mapping("nulls").items() if isinstance(value, dict)
    }
    return Cell(
        key=key,
        settings=settings,
        defense=_defense(cell.part("defense"), str(settings.get("defense", ""))),
        threat=_threat(cell.part("threat")),
        n=cell.whole("n", 0) or 0,
        candidates=cell.whole("candidates"),
        selected=_needed(_summary(cell.part("selected")), cell.where, "selected"),
        plain=_summary(cell.part("plain")),
        informed=_summary(cell.part("informed")),
        best_by_truth=_summary(cell.part("best_by_truth")),
        regret_median=regret.number("median"),
        regret_worst=regret.number("worst"),
        regret_flagged=bool(regret.flag("flagged")),
        attackers=tuple(_attacker(each) for each in cell.parts("attackers")),
        nulls={name: value for name, value in nulls.items() if value is not None},
        bar=_bar(bar.part("identified")),
        bar_psnr=_bar(bar.part("psnr")),
        records=tuple(_record(each, hide_labels) for each in cell.parts("records")),
        checks=tuple(_check(each) for each in cell.parts("checks")),
        bytes_up=sent.number("up"),
        bytes_dense=sent.number("dense"),
        utility=load_utility(cell.part("utility"), folder.parent / "utility"),
        timing=_timing(folder / f"{key}.timing.json"),
        pictures=pictures if pictures.is_file() else None,
        certificate=_certificate(cell.part("certificate")),
        risk=load_risk(cell.part("risk")),
        region=_region(cell.part("region")),
    )


def _needed(summary: Summary | None, where: str, name: str) -> Summary:
    if summary is None:
        raise Malformed(f"{where} lacks {name!r} with the share identified")
    return summary


def _share(share: Fields) -> Share | None:
    value, low, high = share.number("value"), share.number("low"), share.number("high")
    if value is None or low is None or high is None:
        return None
    n = share.whole("n", 0) or 0
    return Share(value=value, low=low, high=high, count=share.whole("count", round(value * n)) or 0, n=n)


def _spread(spread: Fields) -> Spread | None:
    median = spread.number("median")
    if median is None:
        return None
    low, high, worst = spread.number("low"), spread.number("high"), spread.number("worst")
    return Spread(median=median, low=low, high=high, worst=worst, n=spread.whole("n", 0) or 0)


def _summary(summary: Fields) -> Summary | None:
    identified = _share(summary.part("identified"))
    if identified is None:
        return None
    return Summary(
        identified=identified,
        psnr=_spread(summary.part("psnr")),
        ssim=_spread(summary.part("ssim")),
        mse=_spread(summary.part("mse")),
        lpips=_spread(summary.part("lpips")),
        lpips_reason=summary.part("lpips").text("unavailable"),
        label_accuracy=_share(summary.part("label_accuracy")),
        nearest={k: share for k in (3, 5) if (share := _share(summary.part(f"iip_{k}"))) is not None},
        noise_fraction=_spread(summary.part("noise_fraction")),
        rdlv=_spread(summary.part("rdlv_nvflare")),
    )


def _region(found: Fields) -> Region | None:
    area = found.number("area")
    if area is None:
        return None
    groups = {name: found.part(name) for name in ("selected", "plain", "informed", "data_mean")}

    def medians(metric: str) -> dict[str, Spread]:
        spreads = {name: _spread(group.part(metric)) for name, group in groups.items()}
        return {name: each for name, each in spreads.items() if each is not None}

    return Region(area=area, psnr=medians("psnr"), ssim=medians("ssim"))


def _bar(bar: Fields) -> Bar | None:
    value = bar.number("value")
    return None if value is None else Bar(null=bar.text("null"), value=value, high=bar.number("high", value) or value)


def _defense(defense: Fields, fallback: str) -> Defense:
    return Defense(
        spelling=defense.text("spelling", fallback),
        parts=defense.texts("parts"),
        rung=defense.whole("rung"),
        rungs=defense.whole("rungs"),
        random=bool(defense.flag("random")),
        acts_on=defense.texts("acts_on"),
        secure_aggregation=defense.flag("secure_aggregation"),
        guarantee=read_guarantee(defense.part("guarantee")),
    )


def _certificate(found: Fields) -> Certificate | None:
    if not found.text("sentence"):
        return None
    levels = found.part("psnr")
    return Certificate(
        identified=found.number("identified"),
        psnr={level: value for level in found.mapping("psnr") if (value := levels.number(level)) is not None},
        unit=found.text("unit"),
        sentence=found.text("sentence"),
        assumptions=found.texts("assumptions"),
        matching=_share(found.part("matching")),
        floor=load_mean_error(found.part("mean_error")),
    )


def _threat(threat: Fields) -> Threat:
    return Threat(knows=threat.texts("knows"), active=bool(threat.flag("active")), sentences=threat.texts("sentences"))


def _check(check: Fields) -> Check:
    level = check.text("level", "warn")
    # An unknown level is read as a warning: doubt must not get lost.
    level = level if level in {"ok", "warn", "fail"} else "warn"
    return Check(name=check.text("name"), level=level, sentence=check.text("sentence"), remedy=check.text("remedy"))


def _attacker(attacker: Fields) -> Attacker:
    return Attacker(
        recipe=attacker.text("recipe"),
        stance=attacker.text("stance"),
        tries=attacker.whole("tries"),
        chosen=attacker.whole("chosen"),
        rehearsal_psnr=attacker.number("rehearsal_psnr"),
        summary=_summary(attacker.part("summary")),
    )


def _record(record: Fields, hide_label: bool) -> Record:
    return Record(
        pseudonym=record.text("pseudonym"),
        owner=record.text("owner") or None,
        label="" if hide_label else record.text("label"),
        label_correct=record.flag("label_correct"),
        identified=bool(record.flag("identified")),
        rank=record.whole("rank"),
        psnr=record.number("psnr"),
        ssim=record.number("ssim"),
        lpips=record.number("lpips"),
    )


def _timing(path: Path) -> Timing:
    if not path.is_file():
        return Timing()
    try:
        timing = Fields(read_json(path), path.name)
    except Malformed:
        return Timing()
    return Timing(
        seconds=timing.number("seconds"),
        peak_memory_mb=timing.number("peak_memory_mb"),
        defense_ms=timing.number("defense_ms"),
        undefended_ms=timing.number("undefended_ms"),
        risk_seconds=timing.number("risk_seconds"),
    )


QUOTED_PATH = re.compile(r"""(["'])(?:~|[A-Za-z]:)?[/\\][^"']*[/\\]""")
BARE_PATH = re.compile(r"""(?:~|(?<![\w.:/\\~>…])[A-Za-z]:(?=\\)|(?<![\w.:/\\~>…]))[/\\](?:[^\s"'/\\]+[/\\])+""")


def without_folders(value: Any) -> Any:
    """Cut the folders from every absolute path, which may name a person, a project or a patient.

    >>> without_folders("gradveil audit --data /home/ada/ward-7/scans.npz --seed 0")
    'gradveil audit --data …/scans.npz --seed 0'
    """
    if isinstance(value, dict):
        return {without_folders(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if isinstance(value, str):
        return BARE_PATH.sub("…/", QUOTED_PATH.sub(r"\1…/", value))
    return value
