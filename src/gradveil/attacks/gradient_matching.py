"""The one gradient-matching attack: whatever a preset sets goes into a recipe, and the engine runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gradveil.attacks.adaptive import DRAWS, REFRESH_EVERY, STANCES
from gradveil.attacks.base import Attack, AttackContext, Cost
from gradveil.attacks.engine.label_belief import label_hypotheses
from gradveil.attacks.engine.matching import LIKELIHOOD, Recipe, run_recipe
from gradveil.attacks.engine.optimisers import LBFGS, Adam
from gradveil.records import Knowledge, Observation, Reconstruction

__all__ = ["GradientMatching"]

_OF_RECIPE = frozenset(field.name for field in dataclasses.fields(Recipe))


@dataclass(frozen=True)
class GradientMatching(Attack):
    """Searches for inputs that explain the update. A preset is a frozen dataclass deriving from it, with nothing but settings.

    A setting goes by its name: into the recipe (`gradveil.attacks.engine.matching.Recipe`), or into the optimiser. So a preset
    repeats no wiring that could go wrong, and what it does not offer as a setting it fixes in ``fixed``. A setting ``title``
    names the recipe in reports; else it has the name of the card.
    """

    optimiser: ClassVar[type[Adam] | type[LBFGS]] = Adam
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Settings of the recipe that are no choice of this preset."""

    def __post_init__(self) -> None:
        """Refuse unknown names when the attack is made, not when it runs."""
        self.recipe()

    def recipe(self) -> Recipe:
        """Return the recipe this attack runs."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        steering = {field.name for field in dataclasses.fields(self.optimiser)}
        return Recipe(
            name=settings.get("title") or self.card.name,
            optimiser=self.optimiser(**{name: value for name, value in settings.items() if name in steering}),
            **{name: value for name, value in settings.items() if name in _OF_RECIPE},
            **self.fixed,
        )

    def applies(self, observation: Observation) -> str | None:
        """Return None: any differentiable model can be tried; unless what the recipe asks for is not there."""
        recipe = self.recipe()
        if recipe.statistics and not observation.learner.running:
            return "the model has no BatchNorm whose statistics move"
        if recipe.statistics and not all(update.buffers for update in observation.updates):
            return "the upload carries no BatchNorm statistics"
        if recipe.labels == "joint" and observation.classes == 0:
            return "targets are masks, which it cannot search for together with the inputs"
        if recipe.objective == LIKELIHOOD and observation.adversary.arrives(observation).noise_std is None:
            return "the defense adds no Gaussian noise of known size"
        return None

    @property
    def stances(self) -> tuple[str, ...]:
        """All of them; but only who knows the defense knows a likelihood."""
        return ("informed",) if self.recipe().objective == LIKELIHOOD else STANCES

    def cost(self) -> Cost:
        """Return the recipe's steps and restarts, and how often the client is run for straight-through offsets."""
        recipe = self.recipe()
        # A renewal computes the raw update of the dummies, and straight through also runs the client on them.
        runs = {"averaged": DRAWS + 1, "straight_through": 2, "robust": 1}.get(recipe.stance, 0)
        return Cost(recipe.steps, recipe.restarts, runs / REFRESH_EVERY)

    def hypotheses(self, observation: Observation, context: AttackContext) -> int:
        """Return the number of plausible labels, unless labels are searched for."""
        recipe = self.recipe()
        return 1 if recipe.labels == "joint" else len(label_hypotheses(observation, recipe.stance, context))

    def needs(self, observation: Observation) -> frozenset[Knowledge]:
        """Ask also for the BatchNorm statistics where the recipe uses them."""
        more = {Knowledge.BN_STATISTICS} if self.recipe().statistics else set()
        return super().needs(observation) | more

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Run the recipe on all observations at once."""
        return run_recipe(self.recipe(), observations, context)
