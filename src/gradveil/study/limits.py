"""A limit as a user writes it: ``identified>0.05``, ``identified[gaussian_noise]>5%``; `gradveil.verdict.limits` applies it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.errors import UsageError, suggest
from gradveil.registry import parse_call, split_chain

__all__ = ["METRICS", "Limit", "parse_limit"]

METRICS = {"identified": True, "psnr": True, "ssim": True, "mse": False, "invre": True}
"""Whether a higher value is a larger leak."""

SHARES = ("identified", "invre")
"""Those that lie between 0 and 1."""
GRAMMAR = re.compile(r"\s*(\w+)\s*(?:\[(.*)\])?\s*(>=|<=|>|<|==?)\s*(\S+?)\s*(%?)\s*")
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


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)
