"""A limit as a user writes it: ``identified>0.05``, ``list[gaussian_noise]>5%``; `gradveil.verdict.limits` applies it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.errors import UsageError, suggest
from gradveil.registry import parse_call, split_chain
from gradveil.significance import fewest_to_show

__all__ = ["COUNTED", "METRICS", "Limit", "parse_limit"]

METRICS = {
    **dict.fromkeys(("identified", "list", "label", "owner", "list_owner", "presence"), True),
    **{"psnr": True, "ssim": True, "mse": False, "invre": True, "exposure": True},
}
"""Whether a higher value is a larger leak."""

COUNTED = {"identified": "picture", "list": "list", "label": "label", "owner": "owner", "list_owner": "list_owner"} | {
    "presence": "presence"
}
"""Shares of what was counted, with the level each is about."""
SHARES = (*COUNTED, "invre")
"""Those that lie between 0 and 1."""
GUESSED = {"presence": 0.5}
"""What guessing gets, where that is not next to nothing: so much cannot be avoided."""
GRAMMAR = re.compile(r"\s*(\w+)\s*(?:\[(.*)\])?\s*(>=|<=|>|<|==?)\s*(\S+?)\s*(%?)\s*")


@dataclass(frozen=True)
class Limit:
    """One limit.

    Attributes:
        text: As the user wrote it.
        metric: identified, list, label, owner, list_owner, presence, psnr, ssim, mse, invre or exposure.
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

    def fewest_records(self, share: float | None = None) -> int | None:
        """Return how many records it takes to show that the limit holds; 1 for other metrics, None where no number is enough.

        Args:
            share: What is hit of them; by default what guessing gets, which is next to nothing except for presence.

        >>> parse_limit("identified>0.05").fewest_records()
        59
        """
        if self.metric not in COUNTED:
            return 1
        return fewest_to_show(self.value, GUESSED.get(self.metric, 0.0) if share is None else share)


def parse_limit(text: str, known: Sequence[str] = tuple(METRICS)) -> Limit:
    """Read ``metric>number`` or ``metric[defense]>number``; a number may end with ``%``.

    Args:
        text: What the user wrote.
        known: Metrics that this run measures.

    >>> parse_limit("identified[pruning] > 5%")
    Limit(text='identified[pruning] > 5%', metric='identified', value=0.05, defense='pruning')
    """
    found = GRAMMAR.fullmatch(text)
    example = {"identified": "identified>0.05", "exposure": "exposure>3"}.get(known[0], f"{known[0]}>20")
    if found is None:
        right = f"{example} or {example.replace('>', '[gaussian_noise]>')}"
        raise UsageError(f"cannot read the limit {text!r}; write it as {right}")
    metric, defense, sign, number, percent = found.groups()
    if metric not in known:
        raise UsageError(f"the limit {text!r} names no metric that can be limited here, as in {example}{suggest(metric, known)}")
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
        right = f"{metric} is a share from 0 to 1, as in {metric}>0.05"
        if metric == "invre":
            right = "invre is a score from 0 to 1, as in invre>0.45"
        raise UsageError(f"the limit {text!r} is out of range; {right}")
    return Limit(text, metric, value, (defense or "").strip())


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)
