"""Gaussian noise on the embedding a party of vertical learning sends (ENP)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.parts.strength import noise_std
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT
from gradveil.records import Comparison, Observation, WhatArrives
from gradveil.study.checks import check_flag, check_number
from gradveil.tensors import Named, check_finite

__all__ = ["EmbeddingAdversary", "EmbeddingNoise", "NoisyEmbeddingAdversary"]


@dataclass(frozen=True)
class EmbeddingAdversary(OpenAdversary):
    """Compares embeddings alone.

    Where the gradient that went back is seen too, it is that of the embedding as sent, which is seen anyway: it tells the label,
    and nothing about the input that the embedding does not. Dummies would have to be sent through the defense to use it.
    """

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare the embedding."""
        return Comparison({EMBEDDING: simulated[EMBEDDING]}, {EMBEDDING: evidence[OBSERVED + EMBEDDING]})

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that nothing is exact."""
        return super().arrives(observation).replace(exact=frozenset)


@dataclass(frozen=True)
class NoisyEmbeddingAdversary(EmbeddingAdversary):
    """Knows how much noise lies on the embedding: a candidate at the truth leaves a residual of that size.

    The same record embedded again carries fresh noise, which averages out; this attacker fits all that it sees at once.
    """

    std: float

    def arrives(self, observation: Observation) -> WhatArrives:
        """Tell the noise per entry; incomplete where the gradient is seen as well, since the label in it is not read."""
        seen = observation.update.weights
        return super().arrives(observation).replace(noise_std=self.std, incomplete=EMBEDDING_GRADIENT in seen)


@DEFENSES.register(
    DefenseCard(
        name="embedding_noise",
        summary="Adds independent Gaussian noise to every entry of the embedding that a party of vertical learning sends (ENP).",
        cost="one random number per entry; the label owner's model must live with the noise, in training or at prediction time",
        weakness="fresh noise averages out when a record is embedded again, and strong image priors see through it",
        acts_on=("embedding",),
        ladder=({"delta": 0.01}, {"delta": 0.1}, {"delta": 0.7}, {"delta": 2.0}),
        off={"delta": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class EmbeddingNoise(Defense):
    """Noise on the embedding: ``sent = e + N(0, δ)``, elementwise.

    Departs from the paper: none; this is ENP, the baseline of Xu et al. 2025, who set δ = 0.7 for CIFAR-10 and 0.5 for STL-10 on
    a ResNet cut after its second block. Embeddings are in units of their own: look at their size before choosing δ.

    Cost: one pass over the embedding. Known weakness: `NoisyEmbeddingAdversary`.

    Attributes:
        delta: Variance δ of the noise, as the paper has it; 0 is off.
        variance: False reads ``delta`` as a standard deviation.
    """

    delta: float = 0.7
    variance: bool = True

    def __post_init__(self) -> None:
        """Refuse a negative or endless amount of noise."""
        check_number("embedding_noise", "delta", self.delta)
        check_flag("embedding_noise", "variance", self.variance)

    @property
    def std(self) -> float:
        """Standard deviation of the noise."""
        return noise_std(self.delta, self.variance)

    def protect_embedding(self, embedding: Tensor, view: ClientView, state: State) -> tuple[Tensor, State]:
        """Add the noise; the same seed, round and position in a chain give the same bits."""
        check_finite({EMBEDDING: embedding}, "the embedding")
        if self.std == 0:
            return embedding, state
        generator = view.generator("embedding_noise")
        drawn = torch.randn(embedding.shape, generator=generator, device=embedding.device, dtype=embedding.dtype)
        return embedding + self.std * drawn, state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who knows the noise."""
        return NoisyEmbeddingAdversary(self.std) if self.std else OpenAdversary()
