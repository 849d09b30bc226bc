"""DP-SGD: every example's gradient clipped, the sum made noisy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.clipping import SCOPES, Scope
from gradveil.defenses.example_clipping import ClippedExamplesAdversary, clip_each
from gradveil.defenses.parts.label_evidence import label_under_noise
from gradveil.errors import UsageError
from gradveil.learning.learner import GradientHook, Learner
from gradveil.records import Observation, WhatArrives
from gradveil.study.checks import check_choice, check_number
from gradveil.tensors import Named

__all__ = ["DPSGD", "DPSGDAdversary"]


def noise_on_sum(names: Iterable[str], bound: float, noise_multiplier: float, scope: Scope) -> float:
    """Return the standard deviation of the noise on the sum of clipped gradients.

    The largest norm of one example is the bound, or bound · √layers where every layer is clipped by itself.
    """
    layers = len({name.rpartition(".")[0] for name in names}) if scope == "layer" else 1
    return noise_multiplier * bound * math.sqrt(layers)


def step_sizes(observation: Observation) -> list[int]:
    """Return how many examples one client used at each of its local steps."""
    return observation.learner.settings.sizes(max(1, observation.examples // observation.threat.clients))


def accumulated_noise(observation: Observation, std: Callable[[int], float]) -> float | None:
    """Return the standard deviation, on the update that is seen, of noise drawn anew at every step.

    A gradient carries it as it is. With SGD the noise of step t of T moves the update by the learning rate times
    1 + m + ... + m^(T-1-t), m the momentum. That is exact for one step; for several it leaves out that noisy weights also change
    later gradients, which is of second order in the learning rate. Adam is not linear in its gradients: None.

    Args:
        observation: Whose training settings and number of clients count.
        std: Standard deviation on the gradient of a step, from its number of examples.
    """
    settings = observation.learner.settings
    per_step = [std(size) for size in step_sizes(observation)]
    clients = observation.threat.clients
    if settings.shares == "gradient":
        return per_step[0] / math.sqrt(clients)
    if settings.optimizer != "sgd":
        return None
    moved, factor = [], 0.0
    for each in reversed(per_step):
        factor = 1 + settings.momentum * factor
        moved.append(settings.learning_rate * factor * each)
    return math.hypot(*moved) / math.sqrt(clients)


@dataclass(frozen=True)
class DPSGDAdversary(ClippedExamplesAdversary):
    """Clips every dummy's gradient in the same way, and knows how much noise lies on the update.

    One step is told exactly. Over several steps the noise is told to first order in the learning rate, and the replay follows the
    path without noise, which nobody outside the client knows better; so the truth then leaves a residual a little above it, and
    the attacker says that it is incomplete.
    """

    noise_multiplier: float
    expected_batch: int

    def arrives(self, observation: Observation) -> WhatArrives:
        """Tell the noise per entry of the update; none for Adam, which is not linear in its gradients.

        Where there is noise nothing is exact; clipping alone leaves every layer exact up to a factor. Incomplete where noise
        changes the path itself: after several noisy steps, or through Adam.
        """
        told, settings = super().arrives(observation), observation.learner.settings
        if not self.noise_multiplier:
            return told
        whole = noise_on_sum(observation.learner.weights, self.bound, self.noise_multiplier, self.scope)
        std = accumulated_noise(observation, lambda size: whole / (self.expected_batch or size))
        bent = settings.shares != "gradient" and (settings.optimizer != "sgd" or len(step_sizes(observation)) > 1)
        return told.replace(exact=frozenset, noise_std=std, incomplete=bent, label_evidence=label_under_noise(std))

    def on_examples(self, learner: Learner, variables: Named) -> GradientHook:
        """Clip along the leading axis, differentiably, and divide by what the client divides by."""
        clip = super().on_examples(learner, variables)

        def hook(step: int, weights: Named, gradient: Named, inputs: Tensor, targets: Tensor) -> Named:
            clipped = clip(step, weights, gradient, inputs, targets)
            if not self.expected_batch:
                return clipped
            return {name: value * (inputs.shape[0] / self.expected_batch) for name, value in clipped.items()}

        return hook


@DEFENSES.register(
    DefenseCard(
        name="dp_sgd",
        summary="Clips the gradient of every single example and adds Gaussian noise to their sum, at every local step.",
        paper="Abadi et al., Deep Learning with Differential Privacy, CCS 2016",
        url="https://arxiv.org/abs/1607.00133",
        cost="one gradient per example: memory grows with the batch, and time several-fold; accuracy falls with the noise, the "
        "more the smaller the batch; models that mix examples (BatchNorm in train mode) cannot use it",
        weakness="the guarantee is per record: what the client's records share (their class, their owner) is not hidden, and "
        "many rounds spend it; at small noise it is a formality",
        acts_on=("gradient",),
        ladder=(
            {"noise_multiplier": 0.001},
            {"noise_multiplier": 0.01},
            {"noise_multiplier": 0.1},
            {"noise_multiplier": 0.5},
            {"noise_multiplier": 1.0},
        ),
        off={"noise_multiplier": 0.0, "bound": None},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class DPSGD(Defense):
    """DP-SGD: ``g = (Σ_i g_i · min(1, C / ‖g_i‖₂) + N(0, (σ C)² I)) / B`` at every local step.

    The noise is drawn once per step, after the sum. ``gradveil.risk.privacy_of`` says what ε follows. Two ways to count:

    * Batches in a fixed order (what local training does here): every step that a record takes part in counts in full (q = 1), for
      neighbours in which one record's gradient is set to zero. One step with σ = 1 gives ε = 4.38 at δ = 1e-5, with σ = 0.5
      ε = 10.0, with σ = 0.1 ε = 91.8: the weaker rungs are noise, not a guarantee.
    * Poisson sampling, each record in each step by an independent coin: needs a training loop that samples so, and
      ``expected_batch`` set, because dividing by the number of records drawn would reveal it.

    Departs from the paper: by default the divisor B is the number of examples present and no Poisson sampling is claimed (see
    above). With ``scope = "layer"`` (Fed-CDP, Wei et al. 2021, https://arxiv.org/abs/2107.01154) every layer is clipped to C and
    the noise grows by √layers, so that ε stays the same; Fed-CDP itself scales the noise by C alone.

    Cost: per-example gradients. Known weakness: as Gaussian noise, it averages out over rounds on the same data, which is what
    the accountant counts. What the attacker knows is `DPSGDAdversary`.

    Attributes:
        bound: C, the largest norm of one example's gradient; None is off, and then there can be no noise.
        noise_multiplier: σ, the noise on the sum over C; 0 adds none.
        scope: ``global`` clips all weights together, ``layer`` each layer by itself.
        expected_batch: Divisor B; 0 takes the number of examples present.
    """

    granularity: ClassVar[Literal["batch", "example"]] = "example"

    bound: float | None = 1.0
    noise_multiplier: float = 1.0
    scope: Scope = "global"
    expected_batch: int = 0

    def __post_init__(self) -> None:
        """Refuse a bound that nothing fits in, noise without a bound, and unknown scopes."""
        check_number("dp_sgd", "noise_multiplier", self.noise_multiplier)
        check_choice("dp_sgd", "scope", self.scope, SCOPES)
        check_number("dp_sgd", "expected_batch", self.expected_batch)
        if self.expected_batch != int(self.expected_batch):
            raise UsageError(f"dp_sgd: expected_batch is {self.expected_batch!r}; it must be a whole number")
        if self.bound is not None:
            check_number("dp_sgd", "bound", self.bound, open_below=True)
        elif self.noise_multiplier or self.expected_batch:
            raise UsageError("dp_sgd: without a bound it is off; set a bound, or noise_multiplier=0 and expected_batch=0")

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Clip, sum, add noise once, divide; what is left is a single row, which the client's average keeps as it is."""
        if self.bound is None:
            return gradient, state
        std = noise_on_sum(gradient, self.bound, self.noise_multiplier, self.scope)
        generator = view.generator("dp_sgd")

        def noisy(value: Tensor) -> Tensor:
            total = value.sum(0, keepdim=True)
            if std:
                total = total + std * torch.randn(total.shape, generator=generator, device=total.device, dtype=total.dtype)
            return total / (self.expected_batch or value.shape[0])

        return {name: noisy(value) for name, value in clip_each(gradient, self.bound, self.scope).items()}, state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who clips too and knows the noise."""
        if self.bound is None:
            return OpenAdversary()
        return DPSGDAdversary(self.bound, self.scope, self.noise_multiplier, self.expected_batch)
