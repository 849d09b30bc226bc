"""Attacks that are wrong on purpose. The contract suite must reject each by the named check, or it has gone blind.

Several are taken from released code: a matching term that is detached and does nothing, the last restart
or iterate instead of the best, an update read with the wrong sign, labels taken from the truth. None of them is registered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import Attack, AttackCard, AttackContext, Cost
from gradveil.attacks.engine.labels import recover_labels
from gradveil.attacks.engine.matching import run_recipe
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.learning.learner import GradientHook, Learner
from gradveil.records import Comparison, Knowledge, Observation, Reconstruction
from gradveil.tensors import Named, scale
from gradveil.testing.attacks_scene import home_pictures

__all__ = ["ATTACK_FAULTS"]

ATTACK_FAULTS: list[tuple[type[Attack], str]] = []
"""Every wrong attack, with the name of a check that must reject it."""


def rejected_by(*checks: str) -> Callable[[type[Attack]], type[Attack]]:
    """File a wrong attack under the checks that must reject it."""

    def file(kind: type[Attack]) -> type[Attack]:
        ATTACK_FAULTS.extend((kind, check) for check in checks)
        return kind

    return file


def _card(**changes: Any) -> AttackCard:
    return dataclasses.replace(InvertingGradients.card, name="wrong", **changes)


@dataclass(frozen=True, kw_only=True)
class _Wrong(InvertingGradients):
    """A right attack for others to spoil.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[AttackCard] = _card()

    def right(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Return what the right attack would."""
        return run_recipe(self.recipe(), observations, context)


@dataclass(frozen=True, eq=False)
class _DetachedLearner(Learner):
    """A client whose update is cut from what it was computed from."""

    def update(self, inputs: Tensor, targets: Tensor, hook: GradientHook | None = None) -> Named:
        """Return the update as constants."""
        return {name: value.detach() for name, value in super().update(inputs, targets, hook).items()}


@rejected_by("matching_is_alive", "reaches_its_floor")
@dataclass(frozen=True, kw_only=True)
class Detached(_Wrong):
    """Reads the dummy update from a state dict, as released code does: its value is logged, and its gradient is zero.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Match without a slope."""
        cut = _DetachedLearner(**{f.name: getattr(observations[0].learner, f.name) for f in dataclasses.fields(Learner)})
        return self.right([o.replace(learners=(cut,)) for o in observations], context)


@rejected_by("best_restart_is_kept")
@dataclass(frozen=True, kw_only=True)
class LastRestart(_Wrong):
    """Returns the last restart instead of the best.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Forget all restarts but the last."""
        return [candidate for candidate in self.right(observations, context) if candidate.restart == self.restarts - 1]


@rejected_by("best_iterate_is_kept", "best_so_far_survives_what_is_not_finite")
@dataclass(frozen=True, kw_only=True)
class LastIterate(_Wrong):
    """The loop of most released code: one target after the other, and the last iterate is returned.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Search one by one."""
        return [self._search(index, observation, context) for index, observation in enumerate(observations)]

    def _search(self, index: int, seen: Observation, context: AttackContext) -> Reconstruction:
        generator = context.seed.generator("start", client=index)
        shape = (seen.examples, *seen.input_shape)
        inputs = torch.rand(shape, generator=generator).to(next(iter(seen.update.weights.values()))).requires_grad_()
        labels, steps, losses = recover_labels(seen), context.steps(self.steps), []
        adam = torch.optim.Adam([inputs], lr=self.learning_rate)

        def loss() -> Tensor:
            simulated = seen.learner.update(inputs, labels)
            return OBJECTIVES.get(self.objective)(Comparison(simulated, seen.update.weights))

        for _ in range(steps):
            value = loss()
            losses.append(float(value.detach()))
            inputs.grad = torch.autograd.grad(value, inputs)[0].sign()
            adam.step()
            with torch.no_grad():
                inputs.clamp_(0, 1)
        last = float(loss().detach())
        return Reconstruction(
            inputs.detach(), labels, "wrong", target=index, first_loss=losses[0], best_loss=last, gradient_norm=1.0, steps=steps
        )


@rejected_by("reaches_its_floor")
@dataclass(frozen=True, kw_only=True)
class SignFlip(_Wrong):
    """Reads an update as local minus global weights.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Match what points the other way."""
        flipped = [o.replace(updates=tuple(u.replace(weights=scale(u.weights, -1)) for u in o.updates)) for o in observations]
        return self.right(flipped, context)


@rejected_by("random_update_tells_nothing")
@dataclass(frozen=True, kw_only=True)
class ReadsTheTruth(_Wrong):
    """Finds the true pictures lying around in the process, and blends its answer with them.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Cheat a little."""
        found = self.right(observations, context)
        return [c.replace(inputs=0.5 * c.inputs + 0.5 * home_pictures()[c.target].to(c.inputs)) for c in found]


@rejected_by("asks_only_for_declared_knowledge")
@dataclass(frozen=True, kw_only=True)
class LabelOracle(_Wrong):
    """Uses true labels that its card does not ask for.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Grant itself the labels."""
        threat = dataclasses.replace(observations[0].threat, knows=observations[0].threat.knows | {Knowledge.LABELS})
        found = self.right([o.replace(threat=threat) for o in observations], context)
        return [candidate.replace(oracle_labels=False) for candidate in found]


@rejected_by("asks_only_for_declared_knowledge")
@dataclass(frozen=True, kw_only=True)
class KnowsTheDefense(_Wrong):
    """Looks at the defense's own attacker model, which its card does not ask for.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Ask which tensors are exact."""
        observations[0].adversary.arrives(observations[0]).exact()
        return self.right(observations, context)


@rejected_by("stances_and_cost_are_told")
@dataclass(frozen=True, kw_only=True)
class HidesItsCost(_Wrong):
    """Says that it looks at the update once, so that plans and progress are wrong.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def cost(self) -> Cost:
        """Tell of one step."""
        return Cost()


@rejected_by("stops_within_budget")
@dataclass(frozen=True, kw_only=True)
class IgnoresTheBudget(_Wrong):
    """Takes as many steps as it likes and reports what it was allowed.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Spend five times as much."""
        found = self.right(observations, dataclasses.replace(context, budget=5 * context.budget))
        return [candidate.replace(steps=context.budget) for candidate in found]


@rejected_by("nothing_shown_is_changed")
@dataclass(frozen=True, kw_only=True)
class WritesToTheUpdate(_Wrong):
    """Reorders the update it was shown, in place; sums over its tensors stay as they were.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Swap entries."""
        found = self.right(observations, context)
        for value in observations[0].update.weights.values():
            value.copy_(value.flatten().flip(0).reshape(value.shape))
        return found


@rejected_by("global_generators_are_untouched", "same_seed_same_bits")
@dataclass(frozen=True, kw_only=True)
class DrawsFromNowhere(_Wrong):
    """Draws from torch's global generator, so a seed means nothing.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Add noise of unknown origin."""
        found = self.right(observations, context)
        noise = torch.randn(found[0].inputs.shape, generator=torch.default_generator)
        return [candidate.replace(inputs=candidate.inputs + 0.01 * noise) for candidate in found]


@rejected_by("company_does_not_matter")
@dataclass(frozen=True, kw_only=True)
class MixesTargets(_Wrong):
    """Pulls every answer towards the mean of all answers.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Mix targets."""
        found = self.right(observations, context)
        mean = torch.stack([candidate.inputs for candidate in found]).mean(0)
        return [candidate.replace(inputs=0.9 * candidate.inputs + 0.1 * mean) for candidate in found]


@rejected_by("best_iterate_is_kept")
@dataclass(frozen=True, kw_only=True)
class LiesAboutItsLoss(_Wrong):
    """Reports a tenth of its loss.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Boast."""
        return [candidate.replace(best_loss=candidate.best_loss / 10) for candidate in self.right(observations, context)]


@rejected_by("answers_are_well_formed")
@dataclass(frozen=True, kw_only=True)
class ForgetsATarget(_Wrong):
    """Answers for the first target only.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Attack the first."""
        return self.right(observations[:1], context)


@rejected_by("answers_are_well_formed")
@dataclass(frozen=True, kw_only=True)
class ReturnsAnotherShape(_Wrong):
    """Returns pictures without the axis over examples.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Drop an axis."""
        return [candidate.replace(inputs=candidate.inputs[0]) for candidate in self.right(observations, context)]


@rejected_by("builds_with_defaults")
@dataclass(frozen=True, kw_only=True)
class NeedsASetting(_Wrong):
    """Cannot be made without arguments.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    required: int


@rejected_by("rebuilt_is_equal")
@dataclass(frozen=True, kw_only=True)
class DoublesItsSteps(_Wrong):
    """Changes its own settings, so that it differs from what was saved.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    def __post_init__(self) -> None:
        """Take more than was asked for."""
        object.__setattr__(self, "steps", 2 * self.steps)


@rejected_by("card_is_complete")
@dataclass(frozen=True, kw_only=True)
class SaysTooLittle(_Wrong):
    """An attack without an honest card."""

    card: ClassVar[AttackCard] = _card(weakness="", home="", floor_psnr=0.0)
