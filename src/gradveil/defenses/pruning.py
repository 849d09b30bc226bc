"""Pruning: the small entries of every tensor are zeroed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, DefenseCard, State
from gradveil.defenses.parts.sparse_update import SparseUpdateDefense, ZeroedEntriesAdversary
from gradveil.records import Update
from gradveil.study.checks import check_number
from gradveil.tensors import check_finite, map_tensors

__all__ = ["Pruning", "prune"]


def prune(value: Tensor, rate: float) -> Tensor:
    """Zero the entries whose magnitude is below the ``rate`` quantile of all magnitudes of this tensor.

    The quantile t interpolates linearly between the neighbouring order statistics, at position rate · (n - 1). An entry is below
    t exactly where it is below the order statistic at the position rounded up, so that one is selected, nothing interpolated.
    ``torch.quantile`` cannot be used: it refuses more than 16 million entries.
    """
    if value.numel() == 0:
        return value.clone()
    magnitude = value.abs().reshape(-1)
    # Rounded first: 0.55 · 100 is 55.00000000000001 in floating point, and means 55.
    position = math.ceil(round(rate * (magnitude.numel() - 1), 6))
    threshold = magnitude.kthvalue(position + 1).values
    return torch.where(value.abs() >= threshold, value, torch.zeros_like(value))


@DEFENSES.register(
    DefenseCard(
        name="pruning",
        summary="Zeroes the small entries of every tensor of the update.",
        paper="Lin, Han, Mao, Wang and Dally, Deep Gradient Compression, ICLR 2018",
        url="https://arxiv.org/abs/1712.01887",
        cost="selects one order statistic per tensor; sends fewer bytes (not under secure aggregation); training slows down at "
        "high rates",
        weakness="the zeros show the mask, and the entries that are left are exact and the most telling ones",
        acts_on=("update", "wire"),
        ladder=({"rate": 0.2}, {"rate": 0.8}, {"rate": 0.9}, {"rate": 0.99}),
        off={"rate": 0.0},
    )
)
@dataclass(frozen=True, kw_only=True)
class Pruning(SparseUpdateDefense):
    """Per-tensor magnitude pruning: ``sent_i = u_i if |u_i| >= t_l else 0``, with t_l the rate-quantile of |u| in tensor l.

    Entries at the threshold survive, so each tensor keeps at least its largest entry, and one of equal entries is kept whole.

    Departs from the paper: no error feedback, momentum correction or warm-up; this is the defense as attack papers evaluate it
    (NumPy's linear percentile per tensor).

    Cost: below one sort per tensor. Known weakness: `ZeroedEntriesAdversary` compares only where something was sent.

    Attributes:
        rate: Share of entries to zero in each tensor; 0 is off.
    """

    rate: float = 0.9

    def __post_init__(self) -> None:
        """Refuse anything but a share below one."""
        check_number("pruning", "rate", self.rate, below=1.0)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Prune every weight tensor by itself."""
        check_finite(update.weights)
        if self.rate == 0:
            return update, state
        return update.replace(weights=map_tensors(lambda value: prune(value, self.rate), update.weights)), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who reads the mask off the zeros."""
        return ZeroedEntriesAdversary() if self.rate else OpenAdversary()
