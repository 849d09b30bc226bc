"""LRP: every round a client trains at a learning rate that only it knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.learning.learner import Learner
from gradveil.records import Observation, Update, WhatArrives
from gradveil.study.checks import check_number
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, check_finite, scale

__all__ = ["HiddenRateAdversary", "LearningRatePerturbation"]

LOG_FACTOR = "log_factor"


@dataclass(frozen=True)
class HiddenRateAdversary(OpenAdversary):
    """Fits each client's learning rate together with its inputs, as the exponential of a free number.

    A gradient, or a single step, is only rescaled: objectives blind to scale see nothing of the defense, and all tensors still
    arrive exactly up to one factor. Several local steps bend with the rate, and there the fitted rate matters.
    One rate is fitted for all rounds seen, although a client draws one for each; over several the attacker is incomplete.
    """

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that it is incomplete over several rounds, each of which has a rate of its own."""
        return super().arrives(observation).replace(incomplete=len(observation.updates) > 1)

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        """Start every client at the nominal rate."""
        reference = next(iter(observation.update.weights.values()))
        return {LOG_FACTOR: torch.zeros(observation.learner.settings.clients, dtype=reference.dtype, device=reference.device)}

    def of_client(self, variables: Named, client: int) -> Named:
        """Return the rate of one client."""
        return {LOG_FACTOR: variables[LOG_FACTOR][client]}

    def prepare_learner(self, learner: Learner, variables: Named) -> Learner:
        """Train at the fitted rate."""
        return learner.replace(rate_factor=learner.rate_factor * variables[LOG_FACTOR].exp())

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        """Rescale a shared gradient, which no rate has touched, as the defense does."""
        return scale(update, variables[LOG_FACTOR].exp()) if learner.settings.shares == "gradient" else update


@DEFENSES.register(
    DefenseCard(
        name="lrp",
        summary="Trains every round at a learning rate drawn at random around the agreed one, which the client keeps to itself.",
        paper="Wan, Du, Yuan, Yang, Chen and Xu, Enhancing Privacy Preservation in Federated Learning via Learning Rate "
        "Perturbation, ICCV 2023",
        url="https://openaccess.thecvf.com/content/ICCV2023/html/Wan_Enhancing_Privacy_Preservation_in_Federated_Learning_via_"
        "Learning_Rate_Perturbation_ICCV_2023_paper.html",
        cost="one random number per round; clients weigh unequally in the average, by chance",
        weakness="one number hides nothing: a gradient or a single step is only rescaled, which attacks blind to scale do not "
        "notice, and over several steps the rate can be fitted with the inputs",
        acts_on=("training", "update"),
        ladder=({"spread": 0.25}, {"spread": 0.5}, {"spread": 0.75}, {"spread": 0.95}),
        off={"spread": 0.0},
        random=True,
        reconstruction_of_paper=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class LearningRatePerturbation(Defense):
    """Learning-rate perturbation: ``rate' = rate (1 + spread U(-1, 1))``, drawn by each client in each round.

    The drawn rate is hidden from the server and from other clients; the agreed rate and the spread are public. Where a gradient
    is shared no rate takes part in it, so the client rescales what it sends by the same factor: ``sent = g rate' / rate``.

    Departs from the paper: a reconstruction. Neither the range nor code is public, so the range is a setting; the personal mean
    rates of its variant ada-LRP are not here.

    Cost: one random number. Known weakness: `HiddenRateAdversary`; with a gradient or one step the update keeps its direction.

    Attributes:
        spread: Largest relative change of the learning rate, below 1; 0 is off.
    """

    spread: float = 0.5

    def __post_init__(self) -> None:
        """Refuse spreads that allow a rate of zero."""
        check_number("lrp", "spread", self.spread, below=1.0)

    def factor(self, view: ClientView) -> float:
        """Return this round's factor; every hook of the round draws the same."""
        # Step 0 in any hook, so that training and rescaling agree.
        generator = view.replace(step=0).generator("lrp")
        draw = torch.rand((), generator=generator, device=view.device, dtype=torch.float64)
        return 1 + self.spread * float(2 * draw - 1)

    def configure_training(self, settings: TrainingSettings, view: ClientView) -> TrainingSettings:
        """Train at the drawn rate."""
        return settings.replace(learning_rate=settings.learning_rate * self.factor(view)) if self.spread else settings

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Rescale a shared gradient; local weights have moved at the drawn rate already."""
        check_finite(update.weights)
        if self.spread == 0 or view.learner.settings.shares != "gradient":
            return update, state
        return update.replace(weights=scale(update.weights, self.factor(view))), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who fits the rate."""
        return HiddenRateAdversary() if self.spread else OpenAdversary()
