"""What linear attackers compare, as one function of the input: its value and slope about a point, and rehearsals of it.

Letters: B examples behind one update, r coordinates of the prior for each, C = B r unknowns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from gradveil.adversary import OpenAdversary, prefixed, with_prefix
from gradveil.attacks.adaptive import adversary_for
from gradveil.attacks.base import USES_THE_DEFENSE, AttackContext
from gradveil.attacks.pca_prior import LinearPrior
from gradveil.records import AdversaryModel, Comparison, Observation
from gradveil.spectra.jacobians import guarded, load_forward_mode
from gradveil.tensors import Named

__all__ = ["Evidence", "Slope", "at_once", "entries", "evidence_of", "held_batches", "rehearsed", "slopes", "values"]

WORKING_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
"""How much a batch of products may take while it runs, by kind of device."""
MOST_AT_ONCE = 512
LEAST_ENTRIES = 64
"""Of a tensor, looked at however many others there are."""
FIRST_DRAW = 40_000_000
"""Draws of the client's randomness beyond those of searches, of beliefs about labels, and of other learners."""

Slope = tuple[Named, Named]
"""What the client produces at a point, and some of its derivatives (c, ...) by coordinates."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """One observation as an attacker of one stance compares it, all rounds together.

    Attributes:
        observation: What was seen.
        adversary: The stance's way to replay and compare.
        variables: The defense's unknowns, at their starting values.
        seen: Per round, what is compared with.
        share: Of the entries of every tensor that are looked at; a few stand for all where there are too many to hold.
    """

    observation: Observation
    adversary: AdversaryModel
    variables: Named
    seen: tuple[Named, ...]
    share: float = 1.0

    def simulate(self, inputs: Tensor, targets: Tensor) -> Named:
        """Return what the client would have produced in every round; safe under vmap."""
        found: Named = {}
        for index, learner in enumerate(self.observation.learners):
            found |= with_prefix(self.adversary.replay(learner, inputs, targets, self.variables), f"{index}|")
        return found

    def compare(self, simulated: Named) -> Comparison:
        """Return both sides, which coincide at the truth; safe under vmap."""
        left: Named = {}
        right: Named = {}
        for index, evidence in enumerate(self.seen):
            found = self.adversary.compare(evidence, prefixed(simulated, f"{index}|"), self.variables)
            left |= with_prefix(found.simulated, f"{index}|")
            right |= with_prefix(found.observed, f"{index}|")
        if self.share >= 1:
            return Comparison(left, right)
        return Comparison(_some(left, self.share), _some(right, self.share))

    def residuals(self, simulated: Named) -> Named:
        """Return simulated minus observed; safe under vmap."""
        return self.compare(simulated).residuals()

    def push(self, slope: Slope) -> Named:
        """Return the derivatives (c, ...) of the residuals from those of what the client produces."""
        load_forward_mode()
        at, columns = slope

        def one(column: Named) -> Named:
            pair: Any = jvp(self.residuals, (at,), (column,))
            tangent: Named = pair[1]
            return tangent

        return dict(guarded(lambda: vmap(one)(columns)))


def evidence_of(observation: Observation, stance: str, context: AttackContext, *, share: float = 1.0) -> Evidence:
    """Return what a stance compares, or a share of its entries.

    A linear attacker learns gains and errors itself, of more records, so ``learned`` begins with the values alone.
    """
    adversary = OpenAdversary() if stance == "learned" else adversary_for(stance, observation)
    reference = next(iter(observation.learner.weights.values()))
    # All observations get the same, so that nothing depends on the company a target is attacked in.
    drawn = adversary.variables(observation, context.seed.child("linear", stance).generator("start"))
    variables = {name: value.to(reference) for name, value in drawn.items()}
    seen = tuple(adversary.evidence(observation, index) for index in range(len(observation.updates)))
    return Evidence(observation, adversary, variables, seen, share)


def entries(observation: Observation) -> int:
    """Return how many numbers were seen."""
    return sum(value.numel() for update in observation.updates for value in update.weights.values())


def at_once(evidence: Evidence, inputs: Tensor) -> int:
    """Return for how many inputs like these the client is replayed together."""
    observation = evidence.observation
    each = 8 * (entries(observation) + observation.learner.parameters + inputs.numel()) * inputs.element_size()
    return max(1, min(MOST_AT_ONCE, WORKING_BYTES.get(inputs.device.type, WORKING_BYTES["cpu"]) // each))


def slopes(evidence: Evidence, prior: LinearPrior, mean: Tensor, point: Tensor, targets: Tensor) -> Iterator[Slope]:
    """Yield what the client produces about a point, and all its derivatives by forward mode, as many at once as fit.

    Args:
        evidence: The attacker's function.
        prior: Its directions.
        mean: (B, ...).
        point: (B, r) coordinates.
        targets: (B,) labels.
    """
    load_forward_mode()
    # A tangent gets the whole storage of its point.
    point = point.clone()

    def made(coordinates: Tensor) -> Named:
        return evidence.simulate(prior.decode(coordinates, mean), targets)

    def one(direction: Tensor) -> Slope:
        pair: Any = jvp(made, (point,), (direction.reshape(point.shape),))
        found: Slope = pair
        return found

    # The value is the same for all directions, which torch's own hints do not know of.
    parted: Any = (None, 0)
    mapped = vmap(one, out_dims=parted)
    for piece in torch.eye(point.numel(), dtype=point.dtype, device=point.device).split(at_once(evidence, mean)):
        at, columns = guarded(lambda rows=piece: mapped(rows))  # type: ignore[misc]
        yield _detached(at), _detached(columns)


def values(function: Callable[[Tensor], Named], inputs: Tensor, most: int) -> Iterator[Named]:
    """Yield a function of named tensors over the rows of ``inputs``, a few rows at a time."""
    for piece in inputs.split(most):
        yield _detached(guarded(lambda rows=piece: vmap(function)(rows)))  # type: ignore[misc]


def held_batches(prior: LinearPrior, examples: int, first: int, count: int) -> Tensor:
    """Return (count, B, ...) held-out public records as batches, from record ``first`` on; they are taken round and round."""
    rows = (first + torch.arange(count * examples, device=prior.held.device)) % len(prior.held)
    return prior.held[rows].reshape(count, examples, *prior.held.shape[1:])


def rehearsed(
    observation: Observation, context: AttackContext, stance: str, inputs: Tensor, targets: Tensor
) -> list[Observation]:
    """Return what would have been seen had the client held each of the attacker's own batches (N, B, ...) with these labels (B,).

    Who knows the defense runs the client's code; others know what is sent without one.
    """
    alone = observation.replace(labels=None)
    if stance in USES_THE_DEFENSE and context.observe is not None:
        seen = [context.observe(each, targets, FIRST_DRAW + place) for place, each in enumerate(inputs)]
        return [alone.replace(updates=one.updates, payloads=one.payloads) for one in seen]
    sent: list[Sequence[Named]] = []
    if stance in USES_THE_DEFENSE and context.simulate is not None:
        sent = [context.simulate(each, targets, FIRST_DRAW + place) for place, each in enumerate(inputs)]
    else:
        rounds = [vmap(lambda x, own=learner: own.update(x, targets))(inputs) for learner in observation.learners]
        sent = [[{name: value[place] for name, value in named.items()} for named in rounds] for place in range(len(inputs))]
    return [
        alone.replace(updates=tuple(dataclasses.replace(u, weights=w) for u, w in zip(observation.updates, one, strict=True)))
        for one in sent
    ]


def _some(named: Named, share: float) -> Named:
    """Return some entries of every tensor, the same ones whenever it is asked."""
    return {n: v.reshape(-1)[_places(v.numel(), share, v.device)] for n, v in named.items()}


@lru_cache(maxsize=256)
def _places(count: int, share: float, device: torch.device) -> Tensor:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return order[: max(min(count, LEAST_ENTRIES), math.ceil(share * count))].sort().values.to(device)


def _detached(named: Named) -> Named:
    return {name: value.detach() for name, value in named.items()}
