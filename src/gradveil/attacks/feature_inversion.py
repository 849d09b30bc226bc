"""Feature inversion: a last layer whose gradient arrives exactly gives away its input; search for the image behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack, AttackCard, AttackContext, Cost
from gradveil.attacks.engine.execution import choose_execution
from gradveil.attacks.engine.labels import classifier_layer, recover_labels
from gradveil.attacks.engine.loop import Problem, optimise
from gradveil.attacks.engine.optimisers import Adam
from gradveil.attacks.engine.priors import total_variation
from gradveil.attacks.linear_layer import features_at, layer_inputs
from gradveil.learning.learner import Learner
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.study.checks import check_number
from gradveil.tensors import Named

__all__ = ["FeatureInversion", "feature_layer"]


def feature_layer(observation: Observation) -> str | None:
    """Return the weight of the layer whose input is read off: the classifier, or the last linear layer before any noise.

    A model that draws noise (a variational bottleneck) hides what comes behind it; a layer that still sees the same input
    whatever is drawn gives it away as exactly as ever.
    """
    learner, weights = observation.learner, observation.update.weights
    if not learner.noise:
        layer = classifier_layer(weights, observation.classes)
        return layer if layer is not None and weights[layer].ndim == 2 else None  # of a convolution the mean over places is told
    names = [name for name, value in weights.items() if value.ndim == 2 and name.endswith(".weight")]
    inputs = next(iter(learner.weights.values())).new_full((1, *observation.input_shape), 0.5)
    still = [name for name in names if _ignores_noise(learner, name, inputs)]
    return still[-1] if still else None


def _ignores_noise(learner: Learner, layer: str, inputs: Tensor) -> bool:
    seen = []
    for level in (0.0, 1.0):
        noise = {name: torch.full_like(value, level) for name, value in learner.zero_noise(1).items()}
        seen.append(features_at(learner, layer, inputs, noise))
    return torch.equal(seen[0], seen[1])


@ATTACKS.register(
    AttackCard(
        name="feature_inversion",
        summary="Reads the features before the last layer off its gradient and searches for the image that produces them.",
        paper="after Dosovitskiy and Brox, Inverting Visual Representations with Convolutional Networks, CVPR 2016",
        url="https://arxiv.org/abs/1506.02753",
        cost="one backward pass per step and candidate, no double backward: several times cheaper than gradient matching",
        weakness="one example per update; deep networks keep few details in their last features",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES}),
        home="sigmoid LeNet, default initialisation, one 3×16×16 picture, 200 steps",
        floor_psnr=16.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class FeatureInversion(Attack):
    """Minimise ``|phi(x') - r|^2 / |phi(x_0) - r|^2 + tv TV(x')`` with ``r = dW^T db / |db|^2`` from the last linear layer.

    The ratio is blind to a common positive factor, so clipping does not hinder it, and a layer that a defense lets through
    exactly is enough.

    Departs from the paper: features come from the gradient rather than from the network's output.

    Cost: about three forward passes per step. Known weakness: needs a bias in the last layer and one example per update.
    """

    card: ClassVar[AttackCard]
    steps: int = 1000
    restarts: int = 1
    learning_rate: float = 0.1
    tv: float = 0.5
    tv_end: float = 0.02
    stance: str = "plain"

    def __post_init__(self) -> None:
        """Refuse a weight that cannot change geometrically."""
        for name in ("tv", "tv_end"):
            check_number("feature_inversion", name, getattr(self, name), open_below=True)

    def cost(self) -> Cost:
        """Return its steps and restarts."""
        return Cost(self.steps, self.restarts)

    def applies(self, observation: Observation) -> str | None:
        """Return why not, unless one example stands behind the update and the last layer is linear with a bias."""
        if observation.examples != 1:
            return "more than one example stands behind the update"
        if observation.learner.settings.shares != "gradient":
            return "several local steps move the features"
        layer = feature_layer(observation)
        if layer is None or layer.removesuffix("weight") + "bias" not in observation.update.weights:
            return "the model has no linear last layer with a bias"
        return None

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Invert the features of all observations at once."""
        observations = [observation.clearest for observation in observations]
        first = observations[0]
        layer = feature_layer(first)
        assert layer is not None  # `applies` has checked
        learner, name = first.learner, layer
        steps = context.steps(self.steps)
        inputs, wanted = self._starts(observations, name, context)

        def misfit(row: Tensor, constants: Named) -> Tensor:
            features = features_at(learner, name, row.reshape(inputs.shape[1:]))
            return (features - constants["features"]).square().sum()

        def loss(leaves: Named, constants: Named) -> Tensor:
            return misfit(leaves["inputs"], constants) * constants["unit"] + constants["tv"] * total_variation(leaves["inputs"])

        def weight(step: int) -> float:
            share = min(1.0, step / max(1.0, 0.9 * steps))
            return self.tv * math.pow(self.tv_end / self.tv, share)

        execution = choose_execution(context.execution, inputs.device, learner.parameters, inputs.shape[0], 1, steps)
        if execution.mode == "compiled":  # the compiler does not follow the hooks that catch features
            execution = replace(execution, mode="batched")
        measure = execution.once().prepare(misfit)
        slope, start = measure(inputs.flatten(1), {"features": wanted})
        # In units of the misfit at the start: saturated features differ little from input to input, whatever their size.
        unit = 1 / start.clamp_min(1e-30)
        constants = {"features": wanted, "unit": unit, "tv": torch.full_like(start, self.tv)}
        problem = Problem(
            loss,
            {"inputs": inputs},
            constants,
            boxed=frozenset({"inputs"}),
            schedules={"tv": weight},
            tracks=lambda step: step >= min(math.ceil(0.9 * steps), steps - 1),
        )
        outcome = optimise(problem, Adam(learning_rate=self.learning_rate), steps, execution, progress=context.progress)
        _, end = measure(outcome.leaves["inputs"].flatten(1), {"features": wanted})
        return [
            Reconstruction(
                inputs=outcome.leaves["inputs"][row],
                targets=recover_labels(observations[row // self.restarts]),
                recipe=self.card.name,
                target=row // self.restarts,
                stance=self.stance,
                restart=row % self.restarts,
                first_loss=float(start[row] * unit[row]),
                best_loss=float(end[row] * unit[row]),
                gradient_norm=float(slope[row].norm() * unit[row]),
                steps=int(outcome.steps[row]),
                status=outcome.status[row],
            )
            for row in range(inputs.shape[0])
        ]

    def _starts(self, observations: Sequence[Observation], layer: str, context: AttackContext) -> tuple[Tensor, Tensor]:
        inputs, wanted = [], []
        for index, observation in enumerate(observations):
            features = layer_inputs(observation.update.weights, layer, 1)
            reference = observation.update.weights[layer]
            for restart in range(self.restarts):
                generator = context.seed.child(self.card.name, restart).generator("start", client=index)
                noise = torch.randn((1, *observation.input_shape), generator=generator)
                inputs.append((0.5 + 0.01 * noise).to(reference))
                wanted.append(features if features is not None else reference.new_zeros((1, reference.shape[1])))
        return torch.stack(inputs), torch.stack(wanted)
