"""Two rounds under a defense with an unknown, and a prior that is made up: for the tests of linear attackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed
from gradveil.attacks.pca_prior import LinearPrior
from gradveil.learning import Learner
from gradveil.records import Comparison, Observation
from gradveil.tensors import Named
from tests.unit.attacks.scenes import CLASSES, SHAPE, drawn, make_batch, make_learner, observe

MLP = "mlp(hidden=2, activation='sigmoid')"


@dataclass(frozen=True)
class Scaled(OpenAdversary):
    """Sends everything times an unknown, and compares twice that with what was seen less the unknown."""

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        return {"factor": 2 + torch.rand((), generator=generator)}

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        return {n: v * variables["factor"] for n, v in update.items()}

    def penalty(self, variables: Named) -> Tensor:
        return 7 * variables["factor"].square()

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        seen = prefixed(evidence, OBSERVED)
        return Comparison({n: 2 * v for n, v in simulated.items()}, {n: v - variables["factor"] for n, v in seen.items()})


def two_rounds(adversary: Any = None, size: int = 2) -> Observation:
    first = make_learner(MLP)
    second = make_learner(MLP, seed=1)
    seen = observe(first, make_batch(size), rounds=(second,))
    return seen.replace(adversary=adversary or Scaled())


def prior_of(rank: int = 3, held: int = 9, seed: int = 0) -> LinearPrior:
    size = 2 * 8 * 8
    basis, _ = torch.linalg.qr(drawn(size, rank, seed=seed) - 0.5)
    deviations = 0.3 + drawn(rank, seed=seed + 1)
    means = 0.3 + 0.4 * drawn(3, size, seed=seed + 2)
    kept, labels = drawn(held, *SHAPE, seed=seed + 3), torch.arange(held) % CLASSES
    return LinearPrior(means, basis * deviations, (basis / deviations).T.contiguous(), 0.1, kept, labels, "same")
