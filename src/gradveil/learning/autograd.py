"""The same learner for one candidate at a time: plain autograd instead of function transforms.

Function transforms let hundreds of attacks share one program, and cost a third of a small step where there is only one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.learning.learner import Learner
from gradveil.tensors import Named

__all__ = ["AutogradLearner", "one_at_a_time"]


@dataclass(frozen=True, eq=False)
class AutogradLearner(Learner):
    """A learner whose gradient is taken by plain autograd and can be differentiated again; not to be mapped."""

    def gradient(self, weights: Named, inputs: Tensor, targets: Tensor, noise: Named | None = None) -> Named:
        """Return the gradient of the batch loss with respect to the weights, as part of the graph of inputs and weights."""
        if self.per_example:  # called under vmap, where plain autograd cannot go
            return super().gradient(weights, inputs, targets, noise)
        # After a local step the weights are part of the graph themselves.
        leaves = {name: value if value.requires_grad else value.detach().requires_grad_() for name, value in weights.items()}
        loss = self.objective(leaves, inputs, targets, noise)
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))


def one_at_a_time(learner: Learner) -> Learner:
    """Return the same training for candidates that are not mapped; learners of another kind are returned as they are."""
    if type(learner) is not Learner:
        return learner
    return AutogradLearner(**{each.name: getattr(learner, each.name) for each in dataclasses.fields(Learner)})
