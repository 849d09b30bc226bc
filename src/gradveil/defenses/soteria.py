"""Soteria: prune the columns of the last layer's gradient whose features tell most about the input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from gradveil.adversary import MASK, OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, Need, State
from gradveil.errors import UsageError
from gradveil.learning.learner import Learner
from gradveil.records import Comparison, Observation, WhatArrives
from gradveil.study.checks import check_number
from gradveil.tensors import Named, check_finite

__all__ = ["Soteria", "SoteriaAdversary", "column_mask", "feature_sensitivities", "last_linear_layer"]

AT_ONCE = 512
"""Feature-example pairs differentiated in one batched pass; bounds memory whatever the width of the layer."""
AT_ONCE_ON_GPU = 4096
ENTRIES_AT_ONCE_ON_GPU = AT_ONCE_ON_GPU * 3 * 32 * 32
"""The same on a GPU, fewer for larger inputs: small passes would leave most of it idle."""


def last_linear_layer(model: nn.Module) -> str:
    """Return the name of the weight of the last linear layer, in the model's order, or raise `UsageError`."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise UsageError("soteria prunes the features before a linear layer, and this model has none; choose another defense")
    return f"{names[-1]}.weight" if names[-1] else "weight"


def feature_sensitivities(learner: Learner, inputs: Tensor, noise: Named | None = None) -> tuple[Tensor, Tensor]:
    """Return what the last linear layer sees, r (B, F), and how it moves with the input, ‖∂r_i/∂x‖₂ per example (B, F).

    All F rows of the Jacobian come from batched backward passes over one forward pass, not from one backward per feature. Where a
    layer sees several positions per example, features are summed over them. In train-mode BatchNorm, where examples mix,
    a row holds the derivative of the feature summed over the batch, as in the released code.

    Args:
        learner: Model at the weights to differentiate at.
        inputs: (B, ...) examples.
        noise: What an adapted model gets beside them.
    """
    owner = last_linear_layer(learner.model).rpartition(".")[0]
    module = learner.model.get_submodule(owner)
    assert isinstance(module, nn.Linear)
    count, width = inputs.shape[0], module.in_features

    def features(x: Tensor) -> Tensor:
        caught: list[Tensor] = []

        def catch(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            caught.append(arguments[0])

        handle = module.register_forward_pre_hook(catch)
        try:
            learner.forward(learner.weights, x, noise)
        finally:
            handle.remove()
        return caught[-1].reshape(count, -1, width).sum(1)

    seen, pull = vjp(features, inputs)[:2]

    def row(one_hot: Tensor) -> Tensor:
        slope: Tensor = pull(one_hot.expand(count, width))[0]
        length: Tensor = torch.linalg.vector_norm(slope.reshape(count, -1), dim=1)
        return length

    rows = torch.eye(width, dtype=seen.dtype, device=seen.device)
    norms = vmap(row, chunk_size=max(1, _pairs_at_once(inputs) // max(1, count)))(rows)  # (F, B)
    return seen.detach(), norms.T.detach()


def _pairs_at_once(inputs: Tensor) -> int:
    if inputs.device.type != "cuda":
        return AT_ONCE
    return min(AT_ONCE_ON_GPU, ENTRIES_AT_ONCE_ON_GPU // max(1, math.prod(inputs.shape[1:])))


def column_mask(features: Tensor, sensitivities: Tensor, rate: float, epsilon: float) -> Tensor:
    """Return 1 for features whose column is kept and 0 for the others, as (F,).

    The score of a feature is the sum over the batch of ‖∂r_i/∂x‖ / (|r_i| + epsilon); the ``rate`` share with the smallest
    scores is pruned. Dead features (zero, and moved by nothing, for every example) have a zero column anyway and are not
    counted: in the released code many of them push the percentile to zero, or to NaN, and nothing is pruned.
    """
    alive = ((features != 0) | (sensitivities != 0)).any(0)
    size = features.abs() + epsilon
    # With epsilon = 0 a feature at zero that does move is infinitely sensitive; the smallest number stands for zero.
    score = (sensitivities / size.clamp_min(torch.finfo(size.dtype).tiny)).sum(0).clamp_max(torch.finfo(size.dtype).max)
    count = int(alive.sum())
    if count == 0:
        return torch.zeros_like(score)
    position = math.ceil(round(rate * (count - 1), 6))
    threshold = score[alive].kthvalue(position + 1).values
    return ((score >= threshold) & alive).to(features)


@dataclass(frozen=True)
class SoteriaAdversary(OpenAdversary):
    """Reads the pruned columns off the zeros of the defended layer and compares everything else, which arrives as it was.

    For one step of one client that is all there is to know. Over several local steps, or in an aggregate, masks differ and only
    the columns that nobody ever sent are seen as zero.
    """

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that all is exact but the defended layer's weight, and that too where no column is missing.

        Incomplete where masks of several steps or clients lie over each other.
        """
        told, settings = super().arrives(observation), observation.learner.settings
        many = settings.local_steps > 1 or settings.epochs > 0 or observation.threat.clients > 1
        return told.replace(exact=lambda: told.exact() - self._pruned(observation), incomplete=many)

    def _pruned(self, observation: Observation) -> set[str]:
        """Return the defended layer's weight where a column of it was withheld."""
        weights, layer = observation.update.weights, last_linear_layer(observation.learner.model)
        return {layer} if layer in weights and bool((weights[layer] == 0).all(0).any()) else set()

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update and, for the defended layer, the mask of its columns that are not all zero."""
        seen = observation.updates[round_index].weights
        layer = last_linear_layer(observation.learner.model)
        masks = {name: torch.ones_like(value) for name, value in seen.items()}
        if layer in seen:
            masks[layer] = (seen[layer] != 0).any(0).to(seen[layer]).expand_as(seen[layer]).clone()
        return with_prefix(seen, OBSERVED) | with_prefix(masks, MASK)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare what was not pruned."""
        mask = prefixed(evidence, MASK)
        return Comparison({name: value * mask[name] for name, value in simulated.items()}, prefixed(evidence, OBSERVED))


@DEFENSES.register(
    DefenseCard(
        name="soteria",
        summary="Zeroes the columns of the last linear layer's gradient whose features tell most about the input.",
        paper="Sun et al., Soteria: Provable Defense against Privacy Leakage in Federated Learning from Representation "
        "Perspective, CVPR 2021",
        url="https://arxiv.org/abs/2012.06043",
        cost="the Jacobian of all features at every step: as many backward passes as the layer is wide, batched",
        weakness="every other layer and the bias arrive exactly, and the zero columns show the mask",
        acts_on=("gradient",),
        ladder=({"rate": 0.1}, {"rate": 0.5}, {"rate": 0.8}, {"rate": 0.95}),
        off={"rate": 0.0},
    )
)
@dataclass(frozen=True, kw_only=True)
class Soteria(Defense):
    """Soteria: ``∂W · diag(m)``, m_i = 0 for the share ``rate`` of features with the smallest Σ_batch ‖∂r_i/∂x‖ / (|r_i| + ε).

    r is the input of the last linear layer. Only that layer's weight is touched, at every step, with one mask for the batch.

    Departs from the paper: the paper prunes the largest ‖r_i (∂r_i/∂x)⁻¹‖; like all released code this is the ratio of norms
    instead of a pseudo-inverse. Released code adds ε = 0.1 (the authors' code for the cosine attack, our default), 1e-10, or
    nothing (0) to r_i; all are settings. |r_i| stands where released code has r_i: the same for non-negative features, while a
    negative one would turn its score around. Percentiles are taken over features that are not dead.

    Cost: all rows of the Jacobian ∂r/∂x, in batched passes instead of one backward per feature. Known weakness:
    `SoteriaAdversary`; labels are read off the bias as before.

    Attributes:
        rate: Share of live features to prune; 0 is off.
        epsilon: Added to |r_i|.
    """

    rate: float = 0.8
    epsilon: float = 0.1

    def __post_init__(self) -> None:
        """Refuse anything but a share below one and a small number that is not negative."""
        check_number("soteria", "rate", self.rate, below=1.0)
        check_number("soteria", "epsilon", self.epsilon)

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Mask the columns by the features of this step's examples at this step's weights."""
        check_finite(gradient, "the gradient")
        learner, batch = view.learner, view.batch
        layer = last_linear_layer(learner.model)
        if self.rate == 0 or batch is None or layer not in gradient:
            return gradient, state
        rows = None if view.raw_batch is None else learner.rows_at(view.step, len(view.raw_batch))
        noise = learner.noise_at(view.step, rows) if learner.noise else None
        found = feature_sensitivities(learner.replace(weights=view.weights or learner.weights), batch.inputs, noise)
        mask = column_mask(*found, self.rate, self.epsilon)
        return {**gradient, layer: gradient[layer] * mask}, state

    def needs(self) -> frozenset[Need]:
        """Ask for the batch: columns are chosen by the features of its examples."""
        return super().needs() | ({"batch"} if self.rate else set())

    def adversary(self) -> OpenAdversary:
        """Return the attacker who reads the mask off the zero columns."""
        return SoteriaAdversary() if self.rate else OpenAdversary()
