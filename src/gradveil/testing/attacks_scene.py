"""The small world in which the contract of an attack is checked: pictures, a network it applies to, and what a client sends."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.adversary import OpenAdversary
from gradveil.attacks.base import Attack, AttackContext, PublicRecords
from gradveil.data.public import public_images
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.learning.learner import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.metrics.psnr import peak_signal_to_noise
from gradveil.models import build_model, split_model
from gradveil.randomness import Seed
from gradveil.records import Observation, Reconstruction, ThreatModel, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.testing.contract import NotApplicable

__all__ = ["BRIEF", "HOME_STEPS", "Scene", "best_psnr", "home_pictures", "public_records"]

SHAPE = (3, 16, 16)
CLASSES = 10
TARGETS = 4
PUBLIC = 400
HOME_STEPS = 200
"""Budget of the home setting, in which an attack must reach the floor on its card."""

BRIEF = 12
"""Budget where only the form of an answer is looked at."""

MODELS = ("lenet", "mlp(hidden=32)", "lenet/cut1", "gradveil.testing.attacks_scene:pooled_net")
"""An attack is at home in the first of these that it applies to; with a cut, the embedding of the bottom model is sent."""


def pooled_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a small ReLU network with max pooling, which no built-in model is at a size that is attacked in seconds."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (height // 2) * (width // 2), classes),
    )


@functools.cache
def home_pictures() -> Tensor:
    """Return the true pictures (TARGETS, ...) of the home setting."""
    return public_images(SHAPE, TARGETS, Seed(36).child("contract of attacks"))


@functools.cache
def public_records() -> PublicRecords:
    """Return what an attacker at home may learn from: other crops of the photograph that the truth is cut from."""
    inputs = public_images(SHAPE, PUBLIC, Seed(36).child("public records"))
    return PublicRecords(inputs, torch.arange(PUBLIC) % CLASSES, "same")


@functools.cache
def _learner(spelling: str) -> Learner:
    whole, _, cut = spelling.partition("/")
    model = build_model(whole, input_shape=SHAPE, classes=CLASSES, seed=Seed(36).child("contract of attacks"))
    if cut:
        return EmbeddingLearner.of_bottom(split_model(model, cut)[0], cross_entropy)
    return Learner.of(model, cross_entropy, TrainingSettings())


@dataclass(frozen=True, eq=False)
class Scene:
    """A client's training, true pictures and labels, and the ways to show them to an attack.

    Attributes:
        learner: The client's training.
        inputs: (TARGETS, ...) the truth, one picture per update.
        labels: (TARGETS,) their labels.
    """

    learner: Learner
    inputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, attack: Attack) -> Scene:
        """Build the home of an attack; the same bits every time, and no global generator is moved."""
        reasons = []
        for spelling in MODELS:
            scene = cls(_learner(spelling), home_pictures(), torch.tensor([3, 1, 4, 1]))
            reason = attack.applies(scene.observe(0))
            if reason is None:
                return scene
            reasons.append(f"{spelling}: {reason}")
        raise NotApplicable(f"the attack applies to none of the contract's models ({'; '.join(reasons)})")

    def exactly(self) -> Scene:
        """Return the scene in double precision, where results do not hang on the last bit of a sum."""
        return Scene(self.learner.to(torch.float64), self.inputs.double(), self.labels)

    def through(self, wrap: Callable[[nn.Module], nn.Module]) -> Scene:
        """Return the scene with a wrapped model at the same weights."""
        model = copy.deepcopy(self.learner.model)
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(self.learner.weights[name])
        return Scene(type(self.learner).of(wrap(model), self.learner.loss, self.learner.settings), self.inputs, self.labels)

    def observe(self, index: int, **changes: Any) -> Observation:
        """Show the undefended update of one picture."""
        part = slice(index, index + 1)
        weights = self.learner.update(self.inputs[part], self.labels[part])
        return Observation(
            learners=(self.learner,),
            updates=(Update(weights, examples=1),),
            payloads=(),
            input_shape=SHAPE,
            classes=CLASSES,
            examples=1,
            threat=ThreatModel(),
            adversary=OpenAdversary(),
        ).replace(**changes)

    def observe_all(self, count: int = TARGETS) -> list[Observation]:
        """Show the first ``count`` updates."""
        return [self.observe(index) for index in range(count)]

    def observe_noise(self, index: int) -> Observation:
        """Show Gaussian noise with the norm of the true update, tensor by tensor."""
        truth = self.observe(index)
        generator = Seed(36).generator("random update", client=index)
        drawn = {n: torch.randn(v.shape, generator=generator).to(v) for n, v in truth.update.weights.items()}
        same_norm = {n: v * (truth.update.weights[n].norm() / v.norm().clamp_min(1e-12)) for n, v in drawn.items()}
        return truth.replace(updates=(truth.update.replace(weights=same_norm),))

    @staticmethod
    def context(budget: int, **changes: Any) -> AttackContext:
        """Return the attacker's context; the same seed every time."""
        return AttackContext(**{"seed": Seed(3), "budget": budget, "execution": "batched", "public": public_records(), **changes})


def best_psnr(candidates: Sequence[Reconstruction], truth: Tensor) -> Tensor:
    """Return, per target, the PSNR of its best candidate."""
    best = torch.full((len(truth),), float("-inf"), dtype=torch.float64)
    for candidate in candidates:
        found = peak_signal_to_noise(candidate.inputs.to(truth), truth[candidate.target][None])[0]
        best[candidate.target] = torch.maximum(best[candidate.target], found)
    return best
