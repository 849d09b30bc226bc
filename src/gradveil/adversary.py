"""The attacker who knows the defense, in its simplest form, for defenses and generic attackers to refine.

`OpenAdversary` knows that nothing was done to the update. A defense refines the few methods in which it differs; a chain
composes them. All methods but those that take an observation run under ``torch.func.vmap``: no data-dependent branches,
no in-place changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradveil.records import Comparison, Observation, Reconstruction, WhatArrives
from gradveil.tensors import Named, mean

if TYPE_CHECKING:
    from gradveil.learning.learner import GradientHook, Learner

__all__ = ["MASK", "OBSERVED", "OpenAdversary", "overrides", "prefixed", "with_prefix"]

OBSERVED = "observed/"
MASK = "mask/"
_SEARCHING = ("evidence", "variables", "prepare_learner", "on_examples", "on_gradient", "on_update", "replay", "compare")
"""What decides how a search goes; who refines none of it searches as one who ignores the defense."""


def with_prefix(named: Named, prefix: str) -> Named:
    """Return the tensors under ``prefix`` + name, so that several sets travel in one dictionary."""
    return {prefix + name: value for name, value in named.items()}


def prefixed(evidence: Named, prefix: str) -> Named:
    """Return the inverse of `with_prefix`: the tensors filed under ``prefix``."""
    return {name[len(prefix) :]: value for name, value in evidence.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class OpenAdversary:
    """Compares the raw update with what was seen. Satisfies the protocol `gradveil.records.AdversaryModel`.

    A refinement overrides `on_examples`, `on_gradient` and `on_update` where the defense can be replayed differentiably,
    `evidence` and `compare` where the comparison itself changes, `arrives` and `finish` where it knows more. The hooks
    `prepare_learner`, `on_...` and `of_client` are how `replay` is made here, and no part of the protocol.
    """

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that everything arrives as it was computed, and whether a refinement searches otherwise than the plain attacker.

        A refinement takes this and changes what it knows better: ``super().arrives(observation).replace(exact=frozenset)``.
        """
        return WhatArrives(
            exact=lambda: frozenset(observation.update.weights),
            plain_search=not any(overrides(self, name) for name in _SEARCHING),
        )

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the decoded update of one round."""
        return with_prefix(observation.updates[round_index].weights, OBSERVED)

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        """Return no unknowns."""
        return {}

    def of_client(self, variables: Named, client: int) -> Named:
        """Return the unknowns of one client of an aggregate; here all clients share them."""
        return variables

    def prepare_learner(self, learner: Learner, variables: Named) -> Learner:
        """Return the learner as the defense changes it: adapted model, handed-in noise, hidden learning rate."""
        return learner

    def on_examples(self, learner: Learner, variables: Named) -> GradientHook | None:
        """Return the differentiable form of what the defense does to the gradients of single examples, or None.

        The hook sees and returns tensors with a leading axis over examples; the replay averages them afterwards.
        """
        return None

    def on_gradient(self, learner: Learner, variables: Named) -> GradientHook | None:
        """Return the differentiable form of what the defense does to each step's gradient, or None."""
        return None

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        """Return the differentiable form of what the defense does to the update."""
        return update

    def replay(self, learner: Learner, inputs: Tensor, targets: Tensor, variables: Named) -> Named:
        """Return what the client would have sent for the dummies; of an aggregate, the mean of what its clients would have."""
        clients = learner.settings.clients
        if clients == 1:
            return self._replay_one(learner, inputs, targets, self.of_client(variables, 0))
        alone, size = learner.replace(settings=learner.settings.replace(clients=1)), inputs.shape[0] // clients
        # Every client of an aggregate applies the defense by itself: a mean of clipped updates is not a clipped mean.
        sent = [
            self._replay_one(alone, inputs[start : start + size], targets[start : start + size], self.of_client(variables, index))
            for index, start in enumerate(range(0, clients * size, size))
        ]
        return mean(sent)

    def _replay_one(self, learner: Learner, inputs: Tensor, targets: Tensor, variables: Named) -> Named:
        guesses = self.prepare_learner(learner, variables).guesses(inputs.shape[0])
        sent = [self._replay_in_order(each, inputs, targets, variables) for each in guesses]
        return sent[0] if len(sent) == 1 else mean(sent)

    def _replay_in_order(self, learner: Learner, inputs: Tensor, targets: Tensor, variables: Named) -> Named:
        hook, per_example = self._hook(learner, variables)
        learner = learner.replace(per_example=per_example)
        return self.on_update(learner.update(inputs, targets, hook), learner, variables)

    def _hook(self, learner: Learner, variables: Named) -> tuple[GradientHook | None, bool]:
        examples, batch = self.on_examples(learner, variables), self.on_gradient(learner, variables)
        if examples is None:
            return batch, False

        def both(step: int, weights: Named, gradient: Named, inputs: Tensor, targets: Tensor) -> Named:
            gradient = {name: value.mean(0) for name, value in examples(step, weights, gradient, inputs, targets).items()}
            return gradient if batch is None else batch(step, weights, gradient, inputs, targets)

        return both, True

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare tensor by tensor."""
        return Comparison(simulated=simulated, observed=prefixed(evidence, OBSERVED))

    def penalty(self, variables: Named) -> Tensor:
        """Return zero: there are no unknowns."""
        return torch.zeros(())

    def finish(self, reconstruction: Reconstruction, observation: Observation) -> Reconstruction:
        """Return the reconstruction unchanged."""
        return reconstruction


def overrides(adversary: OpenAdversary, method: str) -> bool:
    """Whether a refinement does something of its own in a method."""
    return getattr(type(adversary), method) is not getattr(OpenAdversary, method)
