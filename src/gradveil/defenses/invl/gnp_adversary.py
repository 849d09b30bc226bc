"""The attacker who knows InvL-GNP: the noise fills a small subspace, and everything outside it arrives exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed
from gradveil.defenses.invl.singular_noise import average_jacobian, left_basis, noise_range, public_centres
from gradveil.defenses.parts.recent import Recent, content_of
from gradveil.learning.learner import Learner
from gradveil.records import Comparison, Observation, WhatArrives
from gradveil.tensors import Named, flatten, unflatten

__all__ = ["SubspaceUpdateAdversary"]

BASIS, TRUST = "basis", "trust"
PRECISION = 1e-3
"""What the attacker takes for exact outside the subspace, as a share of what the update holds there."""
MOST_ENTRIES = 2**29
"""Largest U that is formed, in numbers; for larger models the attacker compares plainly and says that it is incomplete."""
_BASES: Recent[Tensor] = Recent(2)


@dataclass(frozen=True)
class SubspaceUpdateAdversary(OpenAdversary):
    """Compares updates where the client added no noise, and by its likelihood where it did.

    The noise lies in the span of u_{j+1} … u_k of an average Jacobian Ḡ: k - j dimensions of p. Both sides are compared as
    ``r - (1 - w) U Uᵀ r``: whole outside the span, that is on the leading u_1 … u_j and on all that no u reaches, and with a
    weight w inside it that makes the residual's size there that of what counts as exact outside.

    What is incomplete: the server has the client's weights, and not its class means. It takes the mean public input (mid-grey
    where there is none) for every class. The closer the client's class means are to it, the better the two bases agree; for a
    client with a single record they agree least, since there Ḡ is that record's own Jacobian: on a LeNet and 16-pixel
    photographs the server's basis took a tenth of the noise's energy off one record's update, and a quarter off that of eight.
    How much is left it cannot know, so it tells no noise. With public centres the basis is exactly the client's, and nothing is
    left. In an aggregate each client's noise has a basis of its own, and with a basis kept for several rounds the server must
    remember the weights of the round in which it was made: here it takes those of the round.

    Attributes:
        std: Standard deviation of the noise along each direction.
        share: As the defense's.
        spared: As the defense's.
        rule: As the defense's.
        mode: As the defense's.
        most: As the defense's.
        shared: Whether the client, too, takes public centres.
    """

    std: float
    share: float
    spared: float
    rule: str
    mode: str
    most: int
    shared: bool

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that nothing is exact: the noise spreads over all tensors.

        Incomplete where the client's centres are its own, for rounds and aggregates, and where U is too large to form.
        """
        many = len(observation.updates) > 1 or observation.threat.clients > 1
        guessed = not self.shared or observation.public is None
        return super().arrives(observation).replace(exact=frozenset, incomplete=guessed or many or not self._fits(observation))

    def _fits(self, observation: Observation) -> bool:
        inputs = torch.Size(observation.input_shape).numel()
        return observation.learner.parameters * min(inputs, self.most) <= MOST_ENTRIES

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update outside the noise, the span of the noise, and the weight inside it."""
        seen = observation.updates[round_index].weights
        found = {OBSERVED + name: value for name, value in seen.items()}
        if not self._fits(observation):
            return found
        flat = flatten(seen)
        basis = self._basis(observation.learners[round_index], observation.public, observation.input_shape).to(flat)
        exact = PRECISION * (flat - basis.T @ (basis @ flat)).norm()
        return {**found, BASIS: basis, TRUST: exact / (exact.square() + self.std**2).sqrt()}

    def _basis(self, learner: Learner, public: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return u_{j+1} … u_k as rows (k - j, p)."""

        def make() -> Tensor:
            images = torch.full((1, *shape), 0.5) if public is None else public
            jacobian = average_jacobian(learner, *public_centres(learner, images))
            found = noise_range(jacobian, low=self.spared, high=self.share, rule=self.rule, mode=self.mode, most=self.most)
            return left_basis(jacobian, found.scaled)

        return _BASES.get((learner.content, content_of(public), shape, self), make)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare what the noise does not reach, and a little of what it does."""
        observed = prefixed(evidence, OBSERVED)
        if BASIS not in evidence:
            return Comparison(simulated, observed)
        basis, trust = evidence[BASIS], evidence[TRUST]

        def cleared(named: Named) -> Named:
            flat = flatten(named)
            return unflatten(flat - (1 - trust) * (basis.T @ (basis @ flat)), named)

        return Comparison(cleared(simulated), cleared(observed))
