"""Entry dropout: random entries of the update are zeroed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, DefenseCard, State
from gradveil.defenses.parts.sparse_update import SparseUpdateDefense, ZeroedEntriesAdversary
from gradveil.records import Update
from gradveil.study.checks import check_flag, check_number
from gradveil.tensors import check_finite, map_tensors

__all__ = ["EntryDropout"]


@DEFENSES.register(
    DefenseCard(
        name="entry_dropout",
        summary="Zeroes random entries of the update.",
        paper="Konečný et al., Federated Learning: Strategies for Improving Communication Efficiency, 2016",
        url="https://arxiv.org/abs/1610.05492",
        cost="one random number per weight; sends fewer bytes (not under secure aggregation); training slows down as by a "
        "smaller learning rate",
        weakness="the zeros show the mask, the entries that are left are exact, and a fresh mask each round soon shows them all",
        acts_on=("update", "wire"),
        ladder=({"rate": 0.2}, {"rate": 0.5}, {"rate": 0.9}, {"rate": 0.99}),
        off={"rate": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class EntryDropout(SparseUpdateDefense):
    """Random sparsification: ``sent_i = u_i · m_i``, with m_i = 0 with probability ``rate``, else 1 (or 1 / (1 - rate)).

    Departs from the paper: each entry is drawn by itself, so the number of zeros varies; the paper draws a mask of fixed size
    from a seed and sends the seed. Not rescaled unless asked for, as attack papers evaluate it.

    Cost: one pass over the weights. Known weakness: `ZeroedEntriesAdversary` compares only where something was sent.

    Attributes:
        rate: Probability that an entry is zeroed; 0 is off.
        rescale: Divide what is left by 1 - rate, so that the update is right on average.
    """

    rate: float = 0.5
    rescale: bool = False

    def __post_init__(self) -> None:
        """Refuse anything but a share below one."""
        check_number("entry_dropout", "rate", self.rate, below=1.0)
        check_flag("entry_dropout", "rescale", self.rescale)

    @property
    def factor(self) -> float:
        """What the entries that are left are multiplied with."""
        return 1.0 / (1.0 - self.rate) if self.rescale else 1.0

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Drop entries; the same seed, round and position in a chain give the same bits."""
        check_finite(update.weights)
        if self.rate == 0:
            return update, state
        generator = view.generator("entry_dropout")

        def drop(value: Tensor) -> Tensor:
            kept = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float32) >= self.rate
            return torch.where(kept, value * self.factor, torch.zeros_like(value))

        return update.replace(weights=map_tensors(drop, update.weights)), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who reads the mask off the zeros."""
        return ZeroedEntriesAdversary(self.factor) if self.rate else OpenAdversary()
