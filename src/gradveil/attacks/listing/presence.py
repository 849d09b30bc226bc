"""Is the record on the list at all? A threshold learned on the attacker's own releases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NUMBERS", "Presence"]

NUMBERS = ("score", "lead", "height")


@dataclass(frozen=True, kw_only=True)
class Presence:
    """Says that a record is on the list where one number is above a threshold.

    The number is the score of the best candidate, its lead over the second best, or its height over the median, in which what
    noise adds to all scores of a release cancels: whichever told the attacker's own releases from themselves without their
    candidate most often.

    Attributes:
        number: Which of `NUMBERS` is asked for.
        threshold: Above it a record is said to be there.
        rehearsed: Share of the attacker's own releases it was right about, half of them with their candidate taken off the list.
    """

    number: str = "score"
    threshold: float = 0.0
    rehearsed: float | None = None

    @classmethod
    def learned(cls, scores: Tensor, truth: Tensor) -> Presence:
        """Learn from own releases.

        Args:
            scores: (S, N), minus infinity where a candidate is not on the list.
            truth: (S,) the candidates behind the releases.
        """
        if not len(truth) or scores.shape[1] < 3:
            return cls()
        without = scores.scatter(1, truth[:, None], float("-inf"))
        rules = [cls._best(_number(scores, name), _number(without, name), name) for name in NUMBERS]
        return max(rules, key=lambda rule: rule.rehearsed or 0.0)

    @classmethod
    def _best(cls, there: Tensor, absent: Tensor, number: str) -> Presence:
        values, order = torch.cat([there, absent]).sort()
        right = torch.cat([torch.ones_like(there), -torch.ones_like(absent)])[order].cumsum(0)
        # Below the threshold k values: right about all absent ones among them, wrong about all that were there.
        accuracy = (len(there) - torch.cat([right.new_zeros(1), right])) / len(values)
        same = torch.cat([values[1:] == values[:-1], values.new_zeros(1, dtype=torch.bool)])
        accuracy[1:] = accuracy[1:].masked_fill(same, -1.0)  # nothing lies between equal values
        cut = int(accuracy.argmax())
        left = values[cut - 1] if cut else values[0] - 1
        at = (left + values[cut]) / 2 if cut < len(values) else left
        return cls(number=number, threshold=float(at), rehearsed=float(accuracy[cut]))

    def says(self, scores: Tensor) -> Tensor:
        """Return for each release (R, N) whether its record is on the list."""
        return _number(scores, self.number) > self.threshold


def _number(scores: Tensor, number: str) -> Tensor:
    """Return one number per release; candidates that are not on its list count for nothing."""
    if number == "height":
        middle = scores.masked_fill(~torch.isfinite(scores), float("nan")).nanmedian(1).values
        return torch.nan_to_num(scores.amax(1) - middle, nan=-1e300, neginf=-1e300)
    top = torch.nan_to_num(scores, nan=-1e300, neginf=-1e300).topk(min(2, scores.shape[1])).values
    return top[:, 0] - top[:, -1] if number == "lead" else top[:, 0]
