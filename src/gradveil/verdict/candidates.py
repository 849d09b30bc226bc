"""What a defense may cost and leak, and what each was measured to: the two sides of a recommendation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gradveil.errors import UsageError, suggest
from gradveil.study.checks import is_number
from gradveil.study.codec import encode
from gradveil.study.measures import Estimate, Share
from gradveil.verdict.levels import LEVELS

__all__ = ["Candidate", "Requirements"]


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a defense may cost; None leaves a side open.

    Attributes:
        max_accuracy_drop: Percentage points of accuracy that training with it may lose.
        max_time: Client time, relative to no defense.
        max_bytes_ratio: Bytes that clients send, relative to no defense.
        max_identified: Share of records, compared with the upper bound of what attackers got at the level.
        strict: Whether the far end of the interval of the accuracy must be within the limit, not only its mean.
        level: What counts as a leak: label, list or picture.
        cut: Judge the rows of models that are cut here; empty takes horizontal rows, or all cuts where those have no defense.
    """

    max_accuracy_drop: float | None = None
    max_time: float | None = None
    max_bytes_ratio: float | None = None
    max_identified: float | None = None
    strict: bool = False
    level: str = "picture"
    cut: str = ""

    def __post_init__(self) -> None:
        """Refuse limits that mean nothing."""
        if self.level not in LEVELS:
            raise UsageError(f"--level is {self.level!r}{suggest(self.level, LEVELS)}")
        for name, most in (
            ("max_accuracy_drop", 100.0),
            ("max_time", math.inf),
            ("max_bytes_ratio", math.inf),
            ("max_identified", 1.0),
        ):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 <= value <= most):
                known = f"between 0 and {most:g}" if math.isfinite(most) else "of at least 0"
                raise UsageError(f"--{name.replace('_', '-')} is {value:g}; give a number {known}")
        if all(each is None for each in (self.max_accuracy_drop, self.max_time, self.max_bytes_ratio, self.max_identified)):
            raise UsageError(
                "give at least one limit, as in --max-accuracy-drop 1; without one, the strongest defense always wins"
            )
        if self.strict and self.max_accuracy_drop is None:
            raise UsageError("--strict is about --max-accuracy-drop; give that too")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A defense at one strength, with its worst numbers over all settings.

    Attributes:
        spelling: The defense.
        identified: What the strongest attacker got at the level asked for, where its upper bound is highest.
        accuracy: Accuracy after training.
        difference: Change of accuracy by paired seeds, or None where it was not measured.
        time: Client time relative to no defense, or None.
        sent: Bytes that clients send relative to no defense, or None.
        doubts: Why it cannot be judged; empty where it can.
        excess: Each limit it breaks, in words, with how far beyond it is, relative to the limit.
    """

    spelling: str
    identified: Share
    accuracy: Estimate | None
    difference: Estimate | None
    time: float | None
    sent: float | None
    doubts: tuple[str, ...]
    excess: tuple[tuple[str, float], ...]

    @property
    def qualifies(self) -> bool:
        """Whether it can be judged and breaks no limit."""
        return not self.doubts and not self.excess

    def rank(self) -> tuple[float, float, float]:
        """Order of preference: lowest upper bound, then accuracy, then client time."""
        gained = -self.difference.value if self.difference is not None else math.inf
        return round(self.identified.high, 9), gained, math.inf if self.time is None else self.time

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "defense": self.spelling,
            "identified": encode(self.identified),
            "accuracy": encode(self.accuracy),
            "difference": encode(self.difference),
            "time_ratio": self.time,
            "bytes_ratio": self.sent,
            "qualifies": self.qualifies,
            "reasons": [*self.doubts, *(words for words, _ in self.excess)],
        }
