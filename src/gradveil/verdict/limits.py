"""Limits a pipeline can be gated on: ``identified>0.05`` fails when more than 5 % of the records may have been identified.

A limit is compared with the bound of the confidence interval that is worse for the owner of the data, never with the point
estimate: the upper bound of identified, PSNR and SSIM, the lower bound of MSE. So few records cannot pass a strict limit. Where
one attacker alone identified clearly more records than the attacker's choice among all candidates, that attacker counts.
``invre>0.45`` is about risk without an attack: it fails where some record may score above, and takes the most its score can be.

It applies to every cell except the undefended baseline ``none``, which is there for comparison; where ``none`` is the only
defense, it applies to that. ``identified[gaussian_noise]>0.05`` applies to cells with that defense, alone or in a chain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.errors import LeakAboveLimit, Unreliable
from gradveil.significance import clearly_ahead
from gradveil.study.limits import METRICS, Limit

__all__ = ["Outcome", "Violation", "compare", "enforce"]

BASELINE = "none"


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
    """

    violations: tuple[Violation, ...]
    doubts: tuple[str, ...]
    judged: int

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as plain JSON values."""
        broken = [
            {"limit": v.limit.text, "defense": v.defense, "bound": v.bound, "sentence": v.sentence} for v in self.violations
        ]
        return {"passed": not broken and not self.doubts, "violations": broken, "doubts": list(self.doubts)}


def compare(limits: Iterable[Limit], cells: Sequence[Mapping[str, Any]], missing: Sequence[str] = ()) -> Outcome:
    """Compare every limit with every cell it is meant for.

    Args:
        limits: What may not be passed.
        cells: Cell records as docs/results-format.md has them.
        missing: Keys of cells that are not done; they cannot pass.
    """
    violations: list[Violation] = []
    doubts = [f"cell {key} is not done" for key in missing]
    judged = 0
    for limit in limits:
        meant = _meant(limit, cells)
        if not meant and not missing:
            doubts.append(f"the limit {limit.text!r} fits no cell of this run")
        for cell in meant:
            judged += 1
            bound, doubt = _bound(limit, cell)
            if doubt:
                doubts.append(f"{_spelling(cell)}: {doubt}")
            elif limit.broken_by(bound):
                violations.append(Violation(limit, _spelling(cell), bound, _sentence(limit, cell, bound)))
    return Outcome(tuple(violations), tuple(dict.fromkeys(doubts)), judged)


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


def _spelling(cell: Mapping[str, Any]) -> str:
    return str(cell.get("cell", {}).get("defense") or cell.get("defense", {}).get("spelling", ""))


def _meant(limit: Limit, cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if limit.defense:
        return [cell for cell in cells if limit.covers(_spelling(cell))]
    return [cell for cell in cells if _spelling(cell) != BASELINE] or list(cells)


def _bound(limit: Limit, cell: Mapping[str, Any]) -> tuple[float, str]:
    """Return the bound that counts, or a sentence why there is none."""
    if limit.metric == "invre":
        # No attack is behind it, so a failed check of the attacks says nothing about it.
        risk = cell.get("risk") or {"reason": "risk was not scored"}
        bounds = [float(record["high"]) for record in risk.get("records", ())]
        return (max(bounds), "") if bounds else (math.nan, f"there is no score of risk ({risk.get('reason', '')})")
    failed = [str(check.get("sentence", "")) for check in cell.get("checks", ()) if check.get("level") == "fail"]
    if failed:
        return math.nan, f"a trust check failed ({failed[0].rstrip('.')})"
    summary = _judged(limit, cell)
    bound = summary.get("high" if METRICS[limit.metric] else "low")
    if not isinstance(bound, (int, float)) or not math.isfinite(bound):
        return math.nan, f"{limit.metric} was not measured"
    return float(bound), ""


def _judged(limit: Limit, cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the summary that counts: of the choice among all candidates, or of a single attacker who identified clearly more."""
    selected = cell.get("selected") or {}
    ahead = clearly_ahead(cell.get("attackers") or (), selected) if limit.metric == "identified" else None
    return (ahead["summary"] if ahead is not None else selected).get(limit.metric) or {}


def _sentence(limit: Limit, cell: Mapping[str, Any], bound: float) -> str:
    if limit.metric == "invre":
        return _risk_sentence(limit, cell, bound)
    summary = _judged(limit, cell)
    if limit.metric != "identified":
        side = "at most" if METRICS[limit.metric] else "at least"
        told = f"median {limit.metric} {summary.get('median', math.nan):.4g}, {side} {bound:.4g}"
        return f"{_spelling(cell)} is beyond {limit.text}: {told} (95 %)"
    told = f"{summary.get('count')} of {summary.get('n')} records identified, at most {bound:.1%} (95 %)"
    if summary.get("value", 1.0) > limit.value:
        return f"{_spelling(cell)} is beyond {limit.text}: {told}"
    more = f"audit at least {limit.fewest_records()} records to show less" if limit.value > 0 else "a limit of 0 cannot be shown"
    return f"{_spelling(cell)} may be beyond {limit.text}: {told}; {more}"


def _risk_sentence(limit: Limit, cell: Mapping[str, Any], bound: float) -> str:
    records = cell["risk"]["records"]
    worst = max(records, key=lambda record: float(record["high"]))
    beyond = sum(float(record["high"]) > limit.value for record in records)
    told = f"InvRE of {worst['pseudonym']} is {worst['invre']:.3f}, at most {bound:.3f}"
    return f"{_spelling(cell)} is beyond {limit.text}: {told}; {beyond} of {len(records)} records"
