"""Limits on risk that a pipeline can be gated on: ``invre>0.45`` fails when some record may score above 0.45.

A limit is compared with the most a record's score can be: with leading singular values only, the upper end of what the rest
allows. It applies to every defense but the baseline ``none``, unless that is the only one; ``invre[pruning]>0.45`` to that one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.errors import LeakAboveLimit, Unreliable, UsageError
from gradveil.registry import parse_call, split_chain
from gradveil.risk.exposure import Assessment

__all__ = ["RiskLimit", "enforce_risk", "parse_risk_limit"]

GRAMMAR = re.compile(r"\s*invre\s*(?:\[(.*)\])?\s*>\s*([0-9.eE+-]+)\s*")


@dataclass(frozen=True)
class RiskLimit:
    """One limit: as written, the value, and the defense it is meant for (empty for all)."""

    text: str
    value: float
    defense: str = ""

    def covers(self, spelling: str) -> bool:
        """Whether the limit is meant for a defense."""
        names = [parse_call(part)[0] for part in split_chain(spelling)]
        return not self.defense or self.defense in (*names, spelling)


def parse_risk_limit(text: str) -> RiskLimit:
    """Read ``invre>number`` or ``invre[defense]>number``.

    >>> parse_risk_limit("invre>0.45").value
    0.45
    """
    found = GRAMMAR.fullmatch(text)
    try:
        value = float(found[2]) if found else float("nan")
    except ValueError:
        value = float("nan")
    if found is None or not 0 <= value < 1:
        raise UsageError(f"cannot read the limit {text!r}; write it as invre>0.45, with a score from 0 to 1: higher is worse")
    return RiskLimit(text, value, (found[1] or "").strip())


def enforce_risk(limits: Sequence[RiskLimit], assessments: Sequence[Assessment]) -> None:
    """Raise where a record may score beyond a limit.

    Raises:
        LeakAboveLimit: Some record does, with the worst one named by its row.
        Unreliable: A limit fits no defense that was assessed.
    """
    broken = []
    for limit in limits:
        meant = [each for each in assessments if limit.covers(each.defense)]
        if not limit.defense:
            meant = [each for each in meant if each.defense != "none"] or meant
        if not meant:
            raise Unreliable(f"the limit {limit.text!r} fits no defense of this run")
        for each in meant:
            worst = max(each.records, key=lambda record: record.risk.high)
            if worst.risk.high > limit.value:
                beyond = sum(record.risk.high > limit.value for record in each.records)
                told = f"InvRE of row {worst.row} is {worst.risk.invre:.3f}, at most {worst.risk.high:.3f}"
                name = f"{each.model} with {each.defense}"
                broken.append(f"{name} is beyond {limit.text}: {told}; {beyond} of {len(each.records)} records")
    if broken:
        raise LeakAboveLimit("; ".join(broken))
