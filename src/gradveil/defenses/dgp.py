"""Dual gradient pruning: zero the largest and the smallest entries, and carry what was withheld to the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import MASK, OBSERVED, OpenAdversary, prefixed
from gradveil.defenses.base import DEFENSES, ClientView, DefenseCard, State
from gradveil.defenses.parts.label_evidence import among_the_zeros
from gradveil.defenses.parts.sparse_update import SparseUpdateDefense, ZeroedEntriesAdversary
from gradveil.errors import UsageError
from gradveil.learning.learner import GradientHook, Learner
from gradveil.records import Observation, Update, WhatArrives
from gradveil.study.checks import check_flag, check_number
from gradveil.tensors import Named, check_finite

__all__ = ["DGP", "DGPAdversary", "middle_mask"]

ERROR = "error/"


def middle_mask(value: Tensor, largest: float, smallest: float) -> Tensor:
    """Return 1 where an entry is neither among the ``largest`` nor the ``smallest`` share of its tensor's magnitudes.

    Counts, not thresholds: ⌈largest · n⌉ and ⌊smallest · n⌋ entries are left out; of equal magnitudes those that come first count
    as the larger. Rounded up, so that the largest entry of a short tensor is hidden too. Safe under vmap.
    """
    count = value.numel()
    # Rounded first: 0.05 · 100 is 5.000000000000001 in floating point, and means 5.
    top, bottom = math.ceil(round(largest * count, 6)), math.floor(round(smallest * count, 6))
    order = value.detach().abs().reshape(-1).sort(descending=True, stable=True).indices
    places = torch.arange(count, device=value.device)
    kept = ((places >= top) & (places < count - bottom)).to(value)
    return torch.zeros_like(value).reshape(-1).scatter(0, order, kept).reshape(value.shape)


@dataclass(frozen=True)
class DGPAdversary(ZeroedEntriesAdversary):
    """Reads the mask off the zeros, and knows how many gradients error feedback has put into an entry.

    In the first round the fed-back error is zero, so what arrives of a single step is exact. Later, an entry that was withheld in
    the k rounds before holds the sum of k + 1 gradients, and one that was sent in the round before only its own. The attacker
    divides by k + 1: exact for k = 0, and as good for others as the model stands still between rounds. Several local steps are
    replayed with the pruning and its error feedback inside, and compared as they are.

    Attributes:
        largest: As the defense's.
        smallest: As the defense's.
        error_feedback: As the defense's.
    """

    largest: float = 0.05
    smallest: float = 0.75
    error_feedback: bool = True

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that it is incomplete also for later rounds: what is fed back is estimated there instead of replayed.

        The label of one example is among the zeros of the last bias, its entry being the largest.
        """
        told, later = super().arrives(observation), any(update.round > 0 for update in observation.updates)
        return told.replace(
            incomplete=told.incomplete or (self.error_feedback and later),
            label_evidence=among_the_zeros if self.largest and not _takes_steps(observation.learner) else None,
        )

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return one gradient's share of the update, and the mask of its entries that are not zero."""
        found = super().evidence(observation, round_index)
        if _takes_steps(observation.learners[round_index]):
            # Steps overlap, so no mask can be read off their sum: everything is compared with a replay that prunes.
            return {n: torch.ones_like(v) if n.startswith(MASK) else v for n, v in found.items()}
        if self.error_feedback:
            for name, value in prefixed(found, OBSERVED).items():
                found[OBSERVED + name] = value / (1 + _rounds_withheld(name, observation.updates, round_index))
        return found

    def on_gradient(self, learner: Learner, variables: Named) -> GradientHook | None:
        """Prune as the client does where several steps follow each other; the mask of one step is seen."""
        if not _takes_steps(learner):
            return None
        carried: dict[str, Tensor] = {}

        def hook(step: int, weights: Named, gradient: Named, inputs: Tensor, targets: Tensor) -> Named:
            sent = {}
            for name, value in gradient.items():
                total = value + carried[name] if step and self.error_feedback else value
                sent[name] = total * middle_mask(total, self.largest, self.smallest)
                carried[name] = total - sent[name] if _keeps_some(value, self.largest, self.smallest) else torch.zeros_like(total)
            return sent

        return hook


def _rounds_withheld(name: str, updates: tuple[Update, ...], index: int) -> Tensor:
    """Count, per entry, the rounds just before ``index`` in which it was not sent, as far back as rounds were seen."""
    withheld = torch.ones_like(updates[index].weights[name])
    total = torch.zeros_like(withheld)
    for earlier in range(index - 1, -1, -1):
        if updates[earlier].round != updates[earlier + 1].round - 1:
            break
        withheld = withheld * (updates[earlier].weights[name] == 0)
        total = total + withheld
    return total


def _takes_steps(learner: Learner) -> bool:
    return learner.settings.epochs > 0 or learner.settings.local_steps > 1


def _keeps_some(value: Tensor, largest: float, smallest: float) -> bool:
    count = value.numel()
    return math.ceil(round(largest * count, 6)) + math.floor(round(smallest * count, 6)) < count


@DEFENSES.register(
    DefenseCard(
        name="dgp",
        summary="Zeroes the largest and the smallest entries of every tensor of the gradient; what is withheld comes later.",
        paper="Xue et al., Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks, AAAI 2024",
        url="https://arxiv.org/abs/2401.16687",
        cost="one sort per tensor and step, and memory for one more copy of the weights; sends fewer bytes (not under secure "
        "aggregation)",
        weakness="the zeros show the mask, and what is left of the first round is exact",
        acts_on=("gradient", "wire"),
        ladder=(
            {"largest": 0.01, "smallest": 0.5},
            {"largest": 0.05, "smallest": 0.75},
            {"largest": 0.05, "smallest": 0.9},
            {"largest": 0.2, "smallest": 0.75},
        ),
        off={"largest": 0.0, "smallest": 0.0},
    )
)
@dataclass(frozen=True, kw_only=True)
class DGP(SparseUpdateDefense):
    """Dual gradient pruning: ``c = middle(g + e)``, ``e ← g + e - c``, per tensor at every step, with e = 0 before the first.

    ``middle`` zeroes the ⌈largest · n⌉ largest and the ⌊smallest · n⌋ smallest magnitudes of a tensor of n entries. The error e
    is kept in the defense's state and goes from step to step and from round to round.

    Departs from the paper: counts, as in its training code; its privacy code compares with percentiles and has no error
    feedback. The count of the largest is rounded up: rounded down, as released, a tensor of fewer than 20 entries (the bias of
    ten classes, which names the label) would send its largest. A tensor too short to have a middle (up to four entries at the
    default) sends zeros and keeps no error, which could never be sent and would only grow; it is not trained.

    Cost: one sort per tensor. Sparse on the wire after one step; the sum of several steps is mostly not. Known weakness:
    `DGPAdversary`.

    Attributes:
        largest: Share of entries to zero from the top.
        smallest: Share of entries to zero from the bottom.
        error_feedback: Whether what is withheld is added to the next gradient.
    """

    largest: float = 0.05
    smallest: float = 0.75
    error_feedback: bool = True

    def __post_init__(self) -> None:
        """Refuse anything but two shares that leave something."""
        check_number("dgp", "largest", self.largest, below=1.0)
        check_number("dgp", "smallest", self.smallest, below=1.0)
        check_flag("dgp", "error_feedback", self.error_feedback)
        if self.largest + self.smallest >= 1:
            raise UsageError(f"dgp: largest {self.largest} and smallest {self.smallest} leave nothing; their sum must be below 1")

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Prune the gradient with the error of earlier steps added to it, and keep what was withheld."""
        check_finite(gradient, "the gradient")
        if not self._on:
            return gradient, state
        sent, kept = {}, dict(state)
        for name, value in gradient.items():
            total = value + state[ERROR + name] if self.error_feedback and ERROR + name in state else value
            sent[name] = total * middle_mask(total, self.largest, self.smallest)
            if self.error_feedback and _keeps_some(value, self.largest, self.smallest):
                kept[ERROR + name] = total - sent[name]
        return sent, kept

    def adversary(self) -> OpenAdversary:
        """Return the attacker who reads the mask off the zeros and knows the error feedback."""
        if not self._on:
            return OpenAdversary()
        return DGPAdversary(largest=self.largest, smallest=self.smallest, error_feedback=self.error_feedback)

    @property
    def _on(self) -> bool:
        return self.largest > 0 or self.smallest > 0
