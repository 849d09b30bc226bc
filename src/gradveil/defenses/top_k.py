"""Top-k: only the largest entries of the whole update are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, DefenseCard, State
from gradveil.defenses.parts.sparse_update import SparseUpdateDefense, ZeroedEntriesAdversary
from gradveil.errors import UsageError
from gradveil.records import Update
from gradveil.study.checks import check_number
from gradveil.tensors import Named, check_finite, flatten, map_tensors

__all__ = ["TopK", "keep_largest"]


def keep_largest(named: Named, keep: float) -> Named:
    """Zero all but the largest ``keep`` share of the entries, over all tensors together; ties with the last one survive."""
    magnitude = flatten(map_tensors(torch.abs, named))
    if magnitude.numel() == 0:
        return dict(named)
    # Rounded first, as in pruning: 0.07 · 100 is 7.000000000000001 in floating point, and means 7.
    count = max(1, math.ceil(round(keep * magnitude.numel(), 6)))
    threshold = magnitude.kthvalue(magnitude.numel() - count + 1).values
    return {name: torch.where(value.abs() >= threshold, value, torch.zeros_like(value)) for name, value in named.items()}


@DEFENSES.register(
    DefenseCard(
        name="top_k",
        summary="Sends only the largest entries of the whole update.",
        paper="Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017",
        url="https://arxiv.org/abs/1704.05021",
        cost="selects one order statistic; sends fewer bytes (not under secure aggregation); training slows down where little is "
        "kept",
        weakness="the zeros show the mask, and the entries that are left are exact and the most telling ones",
        acts_on=("update", "wire"),
        ladder=({"keep": 0.5}, {"keep": 0.1}, {"keep": 0.01}, {"keep": 0.001}),
        off={"keep": 1.0},
    )
)
@dataclass(frozen=True, kw_only=True)
class TopK(SparseUpdateDefense):
    """Global magnitude selection: ``sent_i = u_i if |u_i| >= t else 0``, with t the k-th largest |u| of all, k = ⌈keep · n⌉.

    Unlike `pruning`, whole layers of small entries can vanish. Entries equal to the k-th largest survive, so at least k are sent.

    Departs from the paper: the threshold is exact, not estimated from a sample, and what is dropped is not added to the next
    update.

    Cost: below one sort. Known weakness: `ZeroedEntriesAdversary` compares only where something was sent.

    Attributes:
        keep: Share of the entries to send; 1 is off.
    """

    keep: float = 0.1

    def __post_init__(self) -> None:
        """Refuse anything but a share above zero."""
        check_number("top_k", "keep", self.keep, open_below=True)
        if self.keep > 1:
            raise UsageError(f"top_k: keep is {self.keep!r}; it is a share of the entries, so it must be at most 1")

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Keep the largest entries of all weights together."""
        check_finite(update.weights)
        if self.keep == 1:
            return update, state
        return update.replace(weights=keep_largest(update.weights, self.keep)), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who reads the mask off the zeros."""
        return ZeroedEntriesAdversary() if self.keep < 1 else OpenAdversary()
