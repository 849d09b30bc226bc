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
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.errors import LeakAboveLimit, Unreliable, UsageError, suggest
from gradveil.registry import parse_call, split_chain

__all__ = ["Limit", "Outcome", "Violation", "clearly_ahead", "compare", "enforce", "parse_limit"]

METRICS = {"identified": True, "psnr": True, "ssim": True, "mse": False, "invre": True}
"""Whether a higher value is a larger leak."""

SHARES = ("identified", "invre")
"""Those that lie between 0 and 1."""
GRAMMAR = re.compile(r"\s*(\w+)\s*(?:\[(.*)\])?\s*(>=|<=|>|<|==?)\s*(\S+?)\s*(%?)\s*")
BASELINE = "none"
Z = 1.959963984540054


@dataclass(frozen=True)
class Limit:
    """One limit.

    Attributes:
        text: As the user wrote it.
        metric: identified, psnr, ssim, mse or invre.
        value: What the bound may reach but not pass.
        defense: Name or full spelling of the defense it is meant for; empty for all.
    """

    text: str
    metric: str
    value: float
    defense: str = ""

    def covers(self, spelling: str) -> bool:
        """Whether the limit is meant for a defense, the question of the baseline aside."""
        if not self.defense:
            return True
        names = [parse_call(part)[0] for part in split_chain(spelling)]
        return self.defense in names or _bare(self.defense) == _bare(spelling)

    def broken_by(self, bound: float) -> bool:
        """Whether a bound lies beyond the limit."""
        return bound > self.value if METRICS[self.metric] else bound < self.value

    def fewest_records(self) -> int:
        """Return how many records it takes to pass when none is identified; 1 for other metrics.

        >>> parse_limit("identified>0.05").fewest_records()
        73
        """
        if self.metric != "identified":
            return 1
        return math.ceil(Z * Z * (1 - self.value) / self.value) if self.value > 0 else 2**31


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


def parse_limit(text: str, known: Sequence[str] = tuple(METRICS)) -> Limit:
    """Read ``metric>number`` or ``metric[defense]>number``; a number may end with ``%``.

    Args:
        text: What the user wrote.
        known: Metrics that this run measures.

    >>> parse_limit("identified[pruning] > 5%")
    Limit(text='identified[pruning] > 5%', metric='identified', value=0.05, defense='pruning')
    """
    found = GRAMMAR.fullmatch(text)
    example = {"identified": "identified>0.05", "invre": "invre>0.45"}.get(known[0], f"{known[0]}>20")
    if found is None:
        right = f"{example} or {example.replace('>', '[gaussian_noise]>')}"
        raise UsageError(f"cannot read the limit {text!r}; write it as {right}")
    metric, defense, sign, number, percent = found.groups()
    if metric not in known:
        raise UsageError(f"the limit {text!r} names no metric that can be limited here{suggest(metric, known)}, as in {example}")
    higher = METRICS[metric]
    if sign != (">" if higher else "<"):
        right = f"{metric}{'>' if higher else '<'}{number}{percent}"
        word = "higher" if higher else "lower"
        raise UsageError(f"the limit {text!r} cannot fail a leak: a {word} {metric} is a larger leak; write {right}")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        raise UsageError(f"the limit {text!r} has no number after {sign!r}; write it as {metric}{sign}0.05") from None
    if not math.isfinite(value) or (metric in SHARES and not 0 <= value < 1):
        right = "identified is a share from 0 to 1, as in identified>0.05"
        if metric == "invre":
            right = "invre is a score from 0 to 1, as in invre>0.45"
        raise UsageError(f"the limit {text!r} is out of range; {right}")
    return Limit(text, metric, value, (defense or "").strip())


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


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


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


def clearly_ahead(attackers: Sequence[Mapping[str, Any]], selected: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the attacker who alone identified clearly more records than the choice among all candidates, if there is one.

    A recipe that somebody commits to needs no truth, so what it identifies is identified, whatever the referee preferred. Their
    intervals must not touch: among a dozen attackers some are ahead by chance.

    Args:
        attackers: Rows of `gradveil.audit.judge.per_recipe`, as cells keep them.
        selected: The summary of the choice.
    """
    chosen = selected.get("identified") or {}
    shares = [(row, (row.get("summary") or {}).get("identified") or {}) for row in attackers]
    ahead = [(share.get("value", 0.0), row) for row, share in shares if share.get("low", 0.0) > chosen.get("high", 1.0)]
    return max(ahead, key=lambda pair: float(pair[0]))[1] if ahead else None


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
