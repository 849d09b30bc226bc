"""Dropout of embeddings: random entries of the embedding a party sends are zeroed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import MASK, OBSERVED, OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.embedding_noise import EmbeddingAdversary
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT
from gradveil.records import Comparison, Observation, WhatArrives
from gradveil.study.checks import check_flag, check_number
from gradveil.tensors import Named, check_finite

__all__ = ["DroppedEmbeddingAdversary", "EmbeddingDropout"]


@dataclass(frozen=True)
class DroppedEmbeddingAdversary(EmbeddingAdversary):
    """Reads the mask off the zeros and compares only the rest, which arrived as it was.

    An entry that was zero before, as behind a ReLU, cannot be told from a dropped one and is not compared.

    Attributes:
        factor: What the entries that are left were multiplied with.
    """

    factor: float = 1.0

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that it is incomplete where the gradient is seen as well: the label in it is not read."""
        return super().arrives(observation).replace(incomplete=EMBEDDING_GRADIENT in observation.update.weights)

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the embedding and the mask of its entries that are not zero."""
        seen = observation.updates[round_index].weights[EMBEDDING]
        return {OBSERVED + EMBEDDING: seen, MASK + EMBEDDING: (seen != 0).to(seen)}

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare where something was seen."""
        masked = self.factor * simulated[EMBEDDING] * evidence[MASK + EMBEDDING]
        return Comparison({EMBEDDING: masked}, {EMBEDDING: evidence[OBSERVED + EMBEDDING]})


@DEFENSES.register(
    DefenseCard(
        name="embedding_dropout",
        summary="Zeroes random entries of every record's embedding in vertical learning.",
        cost="one random number per entry; the label owner's model must do with what is left",
        weakness="the zeros show the mask, the entries that are left are exact, and a fresh mask for the same record shows more",
        acts_on=("embedding",),
        ladder=({"rate": 0.2}, {"rate": 0.5}, {"rate": 0.9}, {"rate": 0.98}),
        off={"rate": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class EmbeddingDropout(Defense):
    """Random sparsification of the embedding: ``sent_i = e_i m_i``, m_i = 0 with probability ``rate``, else 1 (1 / (1 - rate)).

    Departs from the paper: none in the mathematics; it is a baseline of Xu et al. 2025 (rates 0.9 and 0.98), who do not say
    whether what is left is rescaled. Not rescaled unless asked for.

    Cost: one pass over the embedding. Known weakness: `DroppedEmbeddingAdversary`.

    Attributes:
        rate: Probability that an entry is zeroed; 0 is off.
        rescale: Divide what is left by 1 - rate, so that the embedding is right on average.
    """

    rate: float = 0.9
    rescale: bool = False

    def __post_init__(self) -> None:
        """Refuse anything but a share below one."""
        check_number("embedding_dropout", "rate", self.rate, below=1.0)
        check_flag("embedding_dropout", "rescale", self.rescale)

    @property
    def factor(self) -> float:
        """What the entries that are left are multiplied with."""
        return 1.0 / (1.0 - self.rate) if self.rescale else 1.0

    def protect_embedding(self, embedding: Tensor, view: ClientView, state: State) -> tuple[Tensor, State]:
        """Drop entries; the same seed, round and position in a chain give the same bits."""
        check_finite({EMBEDDING: embedding}, "the embedding")
        if self.rate == 0:
            return embedding, state
        generator = view.generator("embedding_dropout")
        kept = torch.rand(embedding.shape, generator=generator, device=embedding.device, dtype=torch.float32) >= self.rate
        return torch.where(kept, embedding * self.factor, torch.zeros_like(embedding)), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who reads the mask off the zeros."""
        return DroppedEmbeddingAdversary(self.factor) if self.rate else OpenAdversary()
