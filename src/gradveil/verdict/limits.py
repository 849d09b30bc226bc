"""Limits a pipeline can be gated on: ``identified>0.05`` fails when more than 5 % of the records were identified.

    identified   pictures: records identified by what attackers rebuilt       owner        the same, counted by owner
    list         records pointed out by who holds a list of candidates        list_owner   the same, counted by owner
    label        labels found                                                 presence     told whether the record is on the list
    psnr · ssim · mse   of the attacker's choice                              invre        the paper's score of risk; no band
    exposure     dB above knowing nothing, of the worst record: by the oracle, or by what a regression got beyond its label

A limit on a share has three ends. More was hit than it allows: violated. The exact one-sided 95 % upper end of every attacker's
share is within it: it holds. Else too few records were audited to show it, and the run cannot tell. With no hit a limit g takes
ln .05 / ln(1 - g) records, 59 for 5 %. A limit on a level that was not measured, or that attackers who never moved, a failed
search or a capped budget say nothing about, cannot be judged either; nor one on pictures where a list names most records, or
where the same attackers were not seen to win: neither by power nor by breaking the undefended update. Records whose search failed
do not count as missed. Limits on
PSNR, SSIM and MSE are compared with the bound of the interval that is worse for the owner of the data, that on risk with the
most a record's score can be.

A limit applies to every cell except the undefended baseline ``none``, which is there for comparison; where ``none`` is the only
defense, it applies to that. ``identified[gaussian_noise]>0.05`` applies to cells with that defense, alone or in a chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.errors import LeakAboveLimit, Unreliable
from gradveil.significance import exact_upper
from gradveil.study.cell_exposure import CellExposure
from gradveil.study.exposures import Decibels, Exposure
from gradveil.study.limits import COUNTED, METRICS, Limit
from gradveil.study.measures import Share, Spread
from gradveil.study.results import CellResult
from gradveil.study.risks import NO_BAND, Assessment, RiskRecord
from gradveil.verdict.levels import level_of
from gradveil.verdict.numbers import count
from gradveil.verdict.status import settings_of
from gradveil.verdict.words import blind_to

__all__ = ["Outcome", "Violation", "compare", "enforce"]

BASELINE = "none"
OF_PICTURES = ("identified", "owner")
"""What searches were for: where they failed, too few hits say nothing."""
LOOKED_UP = {"list": "picture", "list_owner": "owner"}
"""What whoever rebuilt pictures could look up on a list, so that lists cannot leak less."""


@dataclass(frozen=True)
class Violation:
    """A limit that a cell is beyond."""

    limit: Limit
    defense: str
    bound: float
    sentence: str


@dataclass(frozen=True)
class Outcome:
    """How a run stands against its limits.

    Attributes:
        violations: Limits that are broken by cells that can be trusted.
        doubts: Sentences on cells that could not be judged.
        judged: How many pairs of a limit and a cell were compared.
        remarks: What to know about limits that can be judged, and yet say little.
    """

    violations: tuple[Violation, ...]
    doubts: tuple[str, ...]
    judged: int
    remarks: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as plain JSON values; remarks where there are any."""
        broken = [
            {"limit": v.limit.text, "defense": v.defense, "bound": v.bound, "sentence": v.sentence} for v in self.violations
        ]
        told = {"passed": not broken and not self.doubts, "violations": broken, "doubts": list(self.doubts)}
        return told | ({"remarks": list(self.remarks)} if self.remarks else {})


def compare(limits: Iterable[Limit], cells: Sequence[CellResult], missing: Sequence[str] = ()) -> Outcome:
    """Compare every limit with every cell it is meant for.

    Args:
        limits: What may not be passed.
        cells: Those that are done.
        missing: Keys of cells that are not done; they cannot pass.
    """
    limits = list(limits)
    violations: list[Violation] = []
    doubts = [f"cell {key} is not done" for key in missing]
    judged = 0
    bare = {id(cell): setting.undefended for setting in settings_of(cells) for cell in setting.cells}
    for limit in limits:
        meant = _meant(limit, [cell.defense.spelling for cell in cells])
        if not meant and not missing:
            doubts.append(f"the limit {limit.text!r} fits no cell of this run")
        for cell in (cells[place] for place in meant):
            found: Violation | str
            judged += 1
            # No attack is behind the next two, so a failed check of the attacks says nothing about them.
            if limit.metric == "exposure":
                found = _judge_cell_exposure(limit, cell.defense.spelling, cell.exposure)
            elif limit.metric == "invre":
                records, reason = (cell.risk.records, cell.risk.reason) if cell.risk is not None else ((), "risk was not scored")
                found = _judge_risk(limit, cell.defense.spelling, records, reason)
            else:
                found = _judge(limit, cell, bare[id(cell)])
            if isinstance(found, Violation):
                violations.append(found)
            elif found:
                doubts.append(f"{cell.defense.spelling}: {found}")
    return Outcome(tuple(violations), tuple(dict.fromkeys(doubts)), judged, _remarks(limits))


def _remarks(limits: Iterable[Limit]) -> tuple[str, ...]:
    return tuple(f"the limit {limit.text!r} is no band: {NO_BAND}" for limit in limits if limit.metric == "invre")


def compare_assessments(limits: Sequence[Limit], found: Sequence[Assessment], exposed: Sequence[Exposure] = ()) -> Outcome:
    """Compare scores model by model, so that the undefended baseline of each stands beside its own defenses."""
    decibels, scores = ([limit for limit in limits if (limit.metric == "exposure") == wanted] for wanted in (True, False))
    models = dict.fromkeys(each.model for each in found)
    parts = [
        *(compare_risk(scores, [(each.defense, _by_row(each)) for each in found if each.model == name]) for name in models),
        *(
            _compare_exposure(decibels, [e for e in exposed if e.model == name])
            for name in dict.fromkeys(e.model for e in exposed)
        ),
    ]
    for asked, there in ((decibels, exposed), (scores, found)):
        if asked and not there:
            parts.append(Outcome((), tuple(f"{limit.metric} was not scored" for limit in asked), len(asked)))
    violations = tuple(violation for part in parts for violation in part.violations)
    doubts = tuple(dict.fromkeys(doubt for part in parts for doubt in part.doubts))
    return Outcome(violations, doubts, sum(part.judged for part in parts), _remarks(limits))


def _by_row(each: Assessment) -> list[RiskRecord]:
    """Return the records of an assessment as limits know them, called by their row."""
    return [
        RiskRecord(pseudonym=f"row {record.row} under {each.model}", invre=record.invre, low=record.low, high=record.high)
        for record in each.records
    ]


def _compare_exposure(limits: Sequence[Limit], found: Sequence[Exposure]) -> Outcome:
    """Compare the exposure of every record of one model, defense by defense."""
    violations: list[Violation] = []
    doubts: list[str] = []
    judged = 0
    for limit in limits:
        meant = _meant(limit, [each.defense for each in found])
        if not meant:
            doubts.append(f"the limit {limit.text!r} fits no cell of this run")
        for own in (found[place] for place in meant):
            judged += 1
            named = [(f"row {record.row} under {own.model}", record) for record in own.records]
            outcome = _judge_exposure(limit, own.defense, named, own.reason)
            if isinstance(outcome, Violation):
                violations.append(outcome)
            elif outcome:
                doubts.append(f"{own.defense}: {outcome}")
    return Outcome(tuple(violations), tuple(dict.fromkeys(doubts)), judged)


def _judge_cell_exposure(limit: Limit, defense: str, own: CellExposure | None) -> Violation | str:
    if own is None:
        return "exposure was not scored"
    return _judge_exposure(limit, defense, [(record.pseudonym, record) for record in own.records], own.reason)


def _judge_exposure(limit: Limit, defense: str, named: Sequence[tuple[str, Decibels]], reason: str) -> Violation | str:
    """Return the violation of a limit on decibels, a sentence why it cannot be judged, or nothing."""
    known = [(record.exposure, name, "is exposed by") for name, record in named if record.exposure is not None]
    learned = [(value, name, "gave a regression") for name, record in named if (value := record.beyond_label) is not None]
    both = [*known, *learned]
    if both and limit.broken_by(max(both)[0]):
        worst, name, verb = max(both)
        beyond = len({own for value, own, _ in both if limit.broken_by(value)})
        told = f"{name} {verb} {worst:.1f} dB; {beyond} of {len(named)} records"
        return Violation(limit, defense, worst, f"{defense} is beyond {limit.text}: {told}")
    if reason or not known or len(known) < len(named):
        return f"there is no exposure ({reason or 'not of every record'})"
    return ""


def compare_risk(limits: Iterable[Limit], scored: Sequence[tuple[str, Sequence[RiskRecord]]]) -> Outcome:
    """Compare limits on risk with scores that no audit is around of: spellings of defenses, each with its records."""
    found = []
    doubts = []
    for limit in limits:
        meant = _meant(limit, [spelling for spelling, _ in scored])
        if not meant:
            doubts.append(f"the limit {limit.text!r} fits no cell of this run")
        found += [_judge_risk(limit, *scored[place]) for place in meant]
    return Outcome(tuple(each for each in found if isinstance(each, Violation)), tuple(dict.fromkeys(doubts)), len(found))


def enforce(outcome: Outcome) -> None:
    """Raise what the exit code is made of.

    Raises:
        LeakAboveLimit: A cell that can be trusted is beyond a limit.
        Unreliable: None is, but some cell could not be judged.
    """
    if outcome.violations:
        raise LeakAboveLimit("; ".join(violation.sentence for violation in outcome.violations))
    if outcome.doubts:
        raise Unreliable(f"the limits cannot be judged: {'; '.join(outcome.doubts)}")


def _meant(limit: Limit, spellings: Sequence[str]) -> list[int]:
    """Return the places of the defenses that a limit is meant for."""
    if limit.defense:
        return [place for place, spelling in enumerate(spellings) if limit.covers(spelling)]
    return [place for place, spelling in enumerate(spellings) if spelling != BASELINE] or list(range(len(spellings)))


def _judge(limit: Limit, cell: CellResult, undefended: CellResult | None) -> Violation | str:
    """Return the violation of a limit on what attacks reached, a sentence why it cannot be judged, or nothing."""
    if cell.failures:
        return f"a trust check failed ({cell.failures[0].sentence.rstrip('.')})"
    if limit.metric in COUNTED:
        return _judge_share(limit, cell, undefended)
    spread: Spread | None = getattr(cell.selected, limit.metric)
    higher = METRICS[limit.metric]
    bound = None if spread is None else spread.high if higher else spread.low
    if spread is None or bound is None:
        return f"{limit.metric} was not measured"
    if not limit.broken_by(bound):
        why = blind_to(cell, undefended)
        return f"cannot tell whether {limit.text} holds: {why}" if why else ""
    told = f"median {limit.metric} {spread.median:.4g}, {'at most' if higher else 'at least'} {bound:.4g} (95 %)"
    return Violation(limit, cell.defense.spelling, bound, f"{cell.defense.spelling} is beyond {limit.text}: {told}")


def _judge_share(limit: Limit, cell: CellResult, undefended: CellResult | None) -> Violation | str:
    """Return the violation of a limit on a share, or why the run cannot tell."""
    view, defense = level_of(cell, COUNTED[limit.metric]), cell.defense.spelling
    share = view.share
    if share is None:
        return f"{limit.metric} was not measured: {view.reason}"
    told = f"{share.count} of {count(share.n, view.unit)} {view.done}".replace("\u00a0", " ")
    if share.value > limit.value:
        told += f", at least {share.low:.1%} (95 %, corrected for the choice among attackers)"
        return Violation(limit, defense, share.low, f"{defense} is beyond {limit.text}: {told}")
    pictures = level_of(cell, LOOKED_UP[limit.metric]).share if limit.metric in LOOKED_UP else None
    if pictures is not None and pictures.value > limit.value:
        seen = f"{pictures.count} of {count(pictures.n, view.unit)} identified by pictures, which can be looked up on a list"
        return f"cannot tell whether {limit.text} holds: {told}, and {seen}".replace("\u00a0", " ")
    why = blind_to(cell, undefended) if limit.metric in OF_PICTURES else ""
    if why:
        return f"cannot tell whether {limit.text} holds: {told}, and {why}"
    if not limit.broken_by(view.upper):
        return _of_those_searched(limit, cell, share) if limit.metric in OF_PICTURES else ""
    if view.hurried and not limit.broken_by(share.upper):
        more = f"{view.hurried} of them, and has for more if lists are shorter"
        return f"cannot tell whether {limit.text} holds: {told}, at most {view.upper:.1%} (exact one-sided 95 %); {more}"
    needed = limit.fewest_records(share.value)
    more = f"audit at least {needed} {view.unit}s" if needed else "no number of records shows that, so allow more"
    if needed and share.effective is not None:
        more += f" in updates or of owners of their own, because these {share.n} are worth {share.effective:.0f}"
    return f"cannot tell whether {limit.text} holds: {told}, at most {view.upper:.1%} (exact one-sided 95 %); {more}"


def _of_those_searched(limit: Limit, cell: CellResult, share: Share) -> str:
    """Return a doubt where the limit holds only if records whose search failed are taken for missed; else nothing."""
    failed = cell.gap.search_failed if cell.gap is not None else None
    if failed is None or not failed.count or not share.n:
        return ""
    left = (share.effective or share.n) * (1 - failed.value)
    upper = exact_upper(min(share.value * (share.effective or share.n), left), left) if left >= 1 else 1.0
    if not limit.broken_by(upper):
        return ""
    return (
        f"cannot tell whether {limit.text} holds: the search failed for {failed.count} of {failed.n} records, and of the others "
        f"the share may be as high as {upper:.1%} (exact one-sided 95 %); audit more records, or give attackers more steps"
    )


def _judge_risk(limit: Limit, defense: str, records: Sequence[RiskRecord], reason: str = "") -> Violation | str:
    """Return the violation of a limit on risk without an attack, a sentence why it cannot be judged, or nothing."""
    if not records:
        return f"there is no score of risk ({reason})"
    worst = max(records, key=lambda record: record.high)
    if not limit.broken_by(worst.high):
        return ""
    beyond = sum(record.high > limit.value for record in records)
    told = f"InvRE of {worst.pseudonym} is {worst.invre:.3f}, at most {worst.high:.3f}"
    sentence = f"{defense} is beyond {limit.text}: {told}; {beyond} of {len(records)} records"
    return Violation(limit, defense, worst.high, sentence)
