"""Pruning of embeddings: the small entries of every record's embedding are zeroed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import MASK, OBSERVED, OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.embedding_noise import EmbeddingAdversary
from gradveil.defenses.pruning import prune
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT
from gradveil.records import Comparison, Observation, WhatArrives
from gradveil.study.checks import check_number
from gradveil.tensors import Named, check_finite

__all__ = ["EmbeddingPruning", "PrunedEmbeddingAdversary"]

LEAST = "least"


@dataclass(frozen=True)
class PrunedEmbeddingAdversary(EmbeddingAdversary):
    """Compares the entries that were sent, and asks of each zeroed one only that it is no larger than the smallest sent.

    A zero tells less than a value and more than nothing: the dummy's entry counts by what it exceeds that bound.
    """

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that it is incomplete where the gradient is seen as well: the label in it is not read."""
        return super().arrives(observation).replace(incomplete=EMBEDDING_GRADIENT in observation.update.weights)

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the embedding, the mask of its entries that are not zero, and each record's smallest of those."""
        seen = observation.updates[round_index].weights[EMBEDDING]
        kept = seen != 0
        rows = torch.where(kept, seen.abs(), torch.inf).reshape(len(seen), -1).amin(1)
        least = torch.where(torch.isfinite(rows), rows, torch.zeros_like(rows))
        return {OBSERVED + EMBEDDING: seen, MASK + EMBEDDING: kept.to(seen), LEAST: least}

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare what was sent, and what should not have been."""
        value, mask = simulated[EMBEDDING], evidence[MASK + EMBEDDING]
        bound = evidence[LEAST].reshape(-1, *[1] * (value.ndim - 1))
        excess = torch.relu(value - bound) - torch.relu(-value - bound)
        return Comparison({EMBEDDING: mask * value + (1 - mask) * excess}, {EMBEDDING: evidence[OBSERVED + EMBEDDING]})


@DEFENSES.register(
    DefenseCard(
        name="embedding_pruning",
        summary="Zeroes the small entries of every record's embedding in vertical learning.",
        cost="selects one order statistic per record; the label owner's model sees only the largest entries",
        weakness="the entries that are left are exact and the most telling ones, and the zeros say that theirs are smaller",
        acts_on=("embedding",),
        ladder=({"rate": 0.2}, {"rate": 0.5}, {"rate": 0.9}, {"rate": 0.98}),
        off={"rate": 0.0},
    )
)
@dataclass(frozen=True, kw_only=True)
class EmbeddingPruning(Defense):
    """Magnitude pruning per record: ``sent_i = e_i if |e_i| >= t else 0``, with t the rate-quantile of |e| of this record.

    Departs from the paper: none in the mathematics; it is a baseline of Xu et al. 2025 (rates 0.9 and 0.98), who do not say over
    what the quantile is taken. Here it is one record's whole embedding, so that no record's mask depends on others.

    Cost: below one sort per record. Known weakness: `PrunedEmbeddingAdversary`.

    Attributes:
        rate: Share of entries to zero; 0 is off.
    """

    rate: float = 0.9

    def __post_init__(self) -> None:
        """Refuse anything but a share below one."""
        check_number("embedding_pruning", "rate", self.rate, below=1.0)

    def protect_embedding(self, embedding: Tensor, view: ClientView, state: State) -> tuple[Tensor, State]:
        """Prune every record's embedding by itself."""
        check_finite({EMBEDDING: embedding}, "the embedding")
        if self.rate == 0 or len(embedding) == 0:
            return embedding, state
        return torch.stack([prune(row, self.rate) for row in embedding]), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who reads the mask off the zeros."""
        return PrunedEmbeddingAdversary() if self.rate else OpenAdversary()
