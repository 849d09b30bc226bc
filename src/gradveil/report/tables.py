"""Rows for the page's tables: exposure per record and owner, the heat map, the checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradveil.study.proved import Guarantee
from gradveil.study.results import CellResult, Record
from gradveil.verdict.numbers import interval, percent
from gradveil.verdict.status import NOT_A_SETTING, Headline, Setting
from gradveil.verdict.words import setting_words

__all__ = [
    "Certificates",
    "Flag",
    "HeatCell",
    "HeatMap",
    "Owner",
    "Proofs",
    "RecordRow",
    "certificates",
    "differing",
    "flags",
    "heat_maps",
    "owners",
    "proofs",
    "records",
    "spread_out",
]

GRID = ("state", "batch_size", "local_steps")
REGRET = (
    "warn",
    "regret",
    "The attacker had a clearly better candidate and did not select it (regret above 3 dB): the verdict may understate the leak.",
    "Read the best by truth beside the verdict; a better referee or rehearsal narrows the gap.",
)


@dataclass(frozen=True, kw_only=True)
class RecordRow:
    """One record: undefended, under the best defense, and under how many defenses it was identified."""

    pseudonym: str
    ident: str
    owner: str
    label: str
    bare: Record | None
    best: Record | None
    hits: int
    defenses: int


@dataclass(frozen=True, kw_only=True)
class Owner:
    """One owner: how many of their records were identified."""

    name: str
    n: int
    bare: int
    best: int
    psnr: float | None


def records(headline: Headline, ids: Mapping[str, str]) -> list[RecordRow]:
    """Return one row per record of the leading setting, most exposed first."""
    setting = headline.setting
    found: dict[str, Record] = {}
    for cell in setting.cells:
        for record in cell.records:
            found.setdefault(record.pseudonym, record)
    by_cell = [{record.pseudonym: record for record in cell.records} for cell in setting.defended]
    bare = _by_pseudonym(headline.undefended)
    best = _by_pseudonym(headline.best)
    rows = [
        RecordRow(
            pseudonym=name,
            ident=ids.get(name, ""),
            owner=record.owner or "",
            label="" if record.label is None else str(record.label),
            bare=bare.get(name),
            best=best.get(name),
            hits=sum(cell[name].identified for cell in by_cell if name in cell),
            defenses=sum(name in cell for cell in by_cell),
        )
        for name, record in found.items()
    ]
    return sorted(rows, key=_exposure, reverse=True)


def _by_pseudonym(cell: CellResult | None) -> dict[str, Record]:
    return {record.pseudonym: record for record in cell.records} if cell is not None else {}


def _exposure(row: RecordRow) -> tuple[bool, int, float]:
    psnr = row.bare.psnr if row.bare is not None else None
    return row.bare is not None and row.bare.identified, row.hits, -math.inf if psnr is None else psnr


def owners(rows: Sequence[RecordRow]) -> list[Owner]:
    """Return one row per owner, most exposed first; empty when the data has no owners."""
    groups: dict[str, list[RecordRow]] = {}
    for row in rows:
        if row.owner:
            groups.setdefault(row.owner, []).append(row)
    found = [
        Owner(
            name=name,
            n=len(group),
            bare=sum(row.bare is not None and row.bare.identified for row in group),
            best=sum(row.best is not None and row.best.identified for row in group),
            psnr=max((row.bare.psnr for row in group if row.bare is not None and row.bare.psnr is not None), default=None),
        )
        for name, group in groups.items()
    ]
    return sorted(found, key=lambda owner: (owner.bare / owner.n, owner.best), reverse=True)


def differing(cells: Sequence[CellResult]) -> list[str]:
    """Return the settings that take more than one value in the run, in the order the cells name them."""
    told = [cell.settings.as_dict() for cell in cells]
    names = dict.fromkeys(name for each in told for name in each if name not in NOT_A_SETTING)
    return [name for name in names if len({str(each.get(name)) for each in told}) > 1]


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """One square: its shade from 0 to 5, and its numbers; ``share`` is empty where nothing was measured."""

    shade: int | None
    share: str
    note: str


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Batch sizes down, local steps across, for one defense and one training state."""

    defense: str
    title: str
    leading: bool
    steps: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HeatCell, ...]], ...]


def heat_maps(cells: Sequence[CellResult], leading: Sequence[str]) -> list[HeatMap]:
    """Return one map per defense and state when the grid has more than one value; ``leading`` defenses come first."""
    varying = differing(cells)
    if not any(name in varying for name in GRID):
        return []
    beside = [name for name in varying if name not in ("batch_size", "local_steps")]
    groups: dict[tuple[str, str], list[CellResult]] = {}
    for cell in cells:
        title = setting_words(cell, beside) if beside else ""
        groups.setdefault((cell.defense.spelling, title), []).append(cell)
    maps = [_heat_map(defense, title, group, defense in leading) for (defense, title), group in groups.items()]
    order = {name: i for i, name in enumerate(leading)}
    return sorted(maps, key=lambda heat: order.get(heat.defense, len(order)))


def _heat_map(defense: str, title: str, cells: Sequence[CellResult], leading: bool) -> HeatMap:
    batches, steps = _values(cells, "batch_size"), _values(cells, "local_steps")
    measured = {(cell.settings.said("batch_size"), cell.settings.said("local_steps")): cell for cell in cells}
    rows = {batch: tuple(_heat_cell(measured.get((batch, step))) for step in steps) for batch in batches}
    told = tuple((_or_unsaid(batch), row) for batch, row in rows.items())
    return HeatMap(defense=defense, title=title, leading=leading, steps=tuple(map(_or_unsaid, steps)), rows=told)


def _values(cells: Sequence[CellResult], name: str) -> list[int | None]:
    return sorted({cell.settings.said(name) for cell in cells}, key=lambda value: math.inf if value is None else value)


def _or_unsaid(value: int | None) -> str:
    return "?" if value is None else str(value)


def _heat_cell(cell: CellResult | None) -> HeatCell:
    if cell is None:
        return HeatCell(shade=None, share="", note="not measured")
    share = cell.identified
    if cell.failures:
        return HeatCell(shade=None, share="no verdict", note="a check failed")
    note = f"{interval(share.low, share.high)}, n = {share.n}"
    return HeatCell(shade=min(5, math.ceil(share.value * 5)), share=percent(share.value), note=note)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One check, with every cell in which it came out this way."""

    level: str
    name: str
    sentence: str
    remedy: str
    cells: tuple[str, ...]


def flags(settings: Sequence[Setting]) -> list[Flag]:
    """Return every check once, failures first, with the cells it speaks about."""
    cells = [cell for setting in settings for cell in setting.cells]
    varying = differing(cells)
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for cell in cells:
        where = cell.defense.spelling + (f" ({setting_words(cell, varying)})" if varying else "")
        for check in cell.checks:
            # Passed checks are shown by name alone: their sentences may carry a number per cell.
            sentence = "" if check.level == "ok" else check.sentence
            groups.setdefault((check.level, check.name, sentence, check.remedy if sentence else ""), []).append(where)
        if cell.regret.flagged:
            groups.setdefault(REGRET, []).append(where)
    found = [
        Flag(level=level, name=name, sentence=sentence, remedy=remedy, cells=tuple(dict.fromkeys(where)))
        for (level, name, sentence, remedy), where in groups.items()
    ]
    return sorted(found, key=lambda flag: ("fail", "warn", "ok").index(flag.level))


def spread_out(values: Sequence[float | None], least: float = 0.005) -> bool:
    """Return whether the known values differ enough to be an axis."""
    known = [value for value in values if value is not None]
    return len(known) > 1 and max(known) - min(known) > least


@dataclass(frozen=True, kw_only=True)
class Proofs:
    """What is proved about each defense, and every assumption once."""

    rows: tuple[tuple[CellResult, Guarantee], ...]
    assumptions: tuple[str, ...]


def proofs(found: Sequence[tuple[CellResult, Guarantee | None]]) -> Proofs:
    """Return the guarantees that are known; without rows where no defense carries one, as then there is nothing to explain."""
    known = tuple((cell, guarantee) for cell, guarantee in found if guarantee is not None)
    if all(guarantee.epsilon is None for _, guarantee in known):
        return Proofs(rows=(), assumptions=())
    said = dict.fromkeys(line for _, guarantee in known for line in guarantee.assumptions)
    return Proofs(rows=known, assumptions=tuple(said))


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Cells with what no attacker can exceed, the levels of PSNR they name, and every assumption once.

    ``smoothing`` is the width of the prior behind the floors under the mean error; None where there are none.
    """

    cells: tuple[CellResult, ...]
    levels: tuple[str, ...]
    assumptions: tuple[str, ...]
    smoothing: float | None = None


def certificates(cells: Sequence[CellResult]) -> Certificates:
    """Return the cells that have a certificate, each with its own; none where no defense has one."""
    proved = [(cell, cell.certificate) for cell in cells if cell.certificate is not None]
    found = [(cell, each) for cell, each in proved if each.identified is not None or each.floor is not None]
    levels = dict.fromkeys(level for _, each in found for level in each.psnr)
    said = dict.fromkeys(line for _, each in found for line in each.assumptions)
    smoothing = next((each.floor.smoothing for _, each in found if each.floor is not None), None)
    cells = tuple(cell for cell, _ in found)
    return Certificates(cells=cells, levels=tuple(levels), assumptions=tuple(said), smoothing=smoothing)
