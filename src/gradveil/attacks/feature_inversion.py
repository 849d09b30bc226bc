"""Feature inversion: a last layer whose gradient arrives exactly gives away its input features; search for the image that has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradveil.attacks.base import ATTACKS, AttackCard, Desk
from gradveil.attacks.execution import choose_execution
from gradveil.attacks.labels import classifier_layer, recover_labels
from gradveil.attacks.linear_layer import layer_inputs
from gradveil.attacks.loop import Problem, optimise
from gradveil.attacks.optimisers import Adam
from gradveil.attacks.priors import total_variation
from gradveil.learning.learner import Learner
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.tensors import Named

__all__ = ["FeatureInversion", "features_at"]


def features_at(learner: Learner, layer: str, inputs: Tensor) -> Tensor:
    """Return the input of the module that owns the weight ``layer``, as (B, features)."""
    caught: list[Tensor] = []

    def catch(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        caught.append(arguments[0])

    module = learner.model.get_submodule(layer.removesuffix(".weight"))
    handle = module.register_forward_pre_hook(catch)
    try:
        learner.forward(learner.weights, inputs)
    finally:
        handle.remove()
    return caught[0].reshape(inputs.shape[0], -1)


@ATTACKS.register(
    AttackCard(
        name="feature_inversion",
        summary="Reads the features before the last layer off its gradient and searches for the image that produces them.",
        paper="after Dosovitskiy and Brox 2016 and METHODS of this project; exact features by Phong et al. 2018",
        url="https://arxiv.org/abs/1506.02753",
        cost="one backward pass per step and candidate, no double backward: several times cheaper than gradient matching",
        weakness="one example per update; deep networks keep few details in their last features",
        needs=frozenset({Knowledge.ARCHITECTURE}),
        home="sigmoid LeNet, default initialisation, one 3×32×32 image, 400 steps",
        floor_psnr=15.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class FeatureInversion:
    """Minimise ``|phi(x') - r|^2 / |r|^2 + tv TV(x')`` with ``r = dW^T db / |db|^2`` from the last linear layer.

    The ratio is blind to a common positive factor, so clipping does not hinder it, and a layer that a defense lets through exactly is enough.

    Departs from the paper: features come from the gradient rather than from the network's output. Cost: about three forward passes per step.
    Known weakness: needs a bias in the last layer and one example per update.
    """

    card: ClassVar[AttackCard]
    steps: int = 1000
    restarts: int = 1
    learning_rate: float = 0.05
    tv: float = 0.03
    tv_end: float = 0.003
    stance: str = "plain"

    def applies(self, observation: Observation) -> str | None:
        """Return why not, unless one example stands behind the update and the last layer is linear with a bias."""
        if observation.examples != 1:
            return "more than one example stands behind the update"
        if observation.learner.settings.shares != "gradient":
            return "several local steps move the features"
        layer = classifier_layer(observation.update.weights, observation.classes)
        if layer is None or layer.removesuffix("weight") + "bias" not in observation.update.weights:
            return "the model has no linear last layer with a bias"
        return None

    def run(self, observations: Sequence[Observation], desk: Desk) -> list[Reconstruction]:
        """Invert the features of all observations at once."""
        first = observations[0]
        layer = classifier_layer(first.update.weights, first.classes)
        assert layer is not None  # `applies` has checked
        learner, name = first.learner, layer
        steps = desk.steps(self.steps)
        inputs, wanted = self._starts(observations, name, desk)

        def loss(leaves: Named, constants: Named) -> Tensor:
            features = features_at(learner, name, leaves["inputs"])
            misfit = (features - constants["features"]).square().sum() / constants["features"].square().sum().clamp_min(1e-30)
            return misfit + constants["tv"] * total_variation(leaves["inputs"])

        def refresh(step: int, leaves: Named, constants: Named) -> Named:
            weight = self.tv * (self.tv_end / self.tv) ** min(1.0, step / max(1.0, 0.9 * steps))
            return {**constants, "tv": torch.full_like(constants["tv"], weight)}

        problem = Problem(
            loss,
            {"inputs": inputs},
            {"features": wanted, "tv": torch.full((inputs.shape[0],), self.tv, device=inputs.device)},
            boxed=frozenset({"inputs"}),
            refresh=refresh,
            tracks=lambda step: step >= int(0.9 * steps),
        )
        execution = choose_execution(desk.execution, inputs.device, learner.parameters, inputs.shape[0], 1, 0)
        outcome = optimise(problem, Adam(learning_rate=self.learning_rate), steps, execution, progress=desk.progress)
        return [
            Reconstruction(
                inputs=outcome.leaves["inputs"][row],
                targets=recover_labels(observations[row // self.restarts]),
                recipe=self.card.name,
                target=row // self.restarts,
                stance=self.stance,
                restart=row % self.restarts,
                first_loss=float(outcome.first_loss[row]),
                best_loss=float(outcome.best_loss[row]),
                gradient_norm=float(outcome.gradient_norm[row]),
                steps=outcome.steps,
                status=outcome.status[row],
            )
            for row in range(inputs.shape[0])
        ]

    def _starts(self, observations: Sequence[Observation], layer: str, desk: Desk) -> tuple[Tensor, Tensor]:
        inputs, wanted = [], []
        for index, observation in enumerate(observations):
            features = layer_inputs(observation.update.weights, layer, 1)
            reference = observation.update.weights[layer]
            for restart in range(self.restarts):
                generator = desk.seed.child(self.card.name, restart).generator("start", client=index)
                noise = torch.randn((1, *observation.input_shape), generator=generator)
                inputs.append((0.5 + 0.01 * noise).to(reference))
                wanted.append(features if features is not None else reference.new_zeros((1, reference.shape[1])))
        return torch.stack(inputs), torch.stack(wanted)
