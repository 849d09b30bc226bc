"""Recipes: gradient matching put together from shared parts and run on many targets × restarts at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gradveil.adversary import prefixed, with_prefix
from gradveil.attacks.adaptive import REFRESH_EVERY, STANCES, adversary_for
from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.execution import COARSE_FROM, Execution, choose_execution
from gradveil.attacks.engine.label_belief import label_hypotheses
from gradveil.attacks.engine.loop import Outcome, Problem, Refresh, optimise
from gradveil.attacks.engine.matrix_convolution import quicker
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.engine.optimisers import LBFGS, Adam
from gradveil.attacks.engine.priors import energy, total_variation
from gradveil.attacks.engine.smooth_relu import has_relu, sharpness_at, smooth_learner, with_sharpness
from gradveil.attacks.generic.stances import renewed, renewing_of
from gradveil.errors import MissingKnowledge, UsageError
from gradveil.learning.autograd import one_at_a_time
from gradveil.learning.learner import Learner
from gradveil.learning.statistics import recover_statistics, statistics_distance
from gradveil.records import AdversaryModel, Comparison, Knowledge, Observation, Reconstruction
from gradveil.study.checks import check_choice
from gradveil.tensors import Named, matrix_products

__all__ = ["LIKELIHOOD", "Labels", "Recipe", "Start", "run_recipe"]

Start = Literal["noise", "uniform", "grey"]
Labels = Literal["recovered", "joint", "given"]

LIKELIHOOD = "likelihood"
STATISTICS = "statistics/"
SETTLED = 0.9

_Place = tuple[int, int, int]
"""Of one candidate: its target, its hypothesis about labels, its restart."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a gradient-matching attack.

    Attributes:
        name: Shown in reports.
        objective: A registered objective, or ``likelihood``: the Gaussian log-likelihood where the informed adversary knows the
            noise.
        optimiser: Adam or L-BFGS.
        steps: Evaluations per candidate.
        restarts: Starts per target.
        start: ``noise`` N(0.5, 0.25²), ``uniform`` on [0, 1], or ``grey``.
        tv: Weight of total variation at the start.
        tv_end: Weight at the end, reached geometrically; None keeps it constant.
        relative: Measure the matching loss in units of its value at the start, so that one prior weight fits every model.
        energy: Weight of the squared distance to grey.
        box: Keep inputs inside [0, 1].
        labels: ``recovered`` from the update, where a stance knows the defense all that are plausible; ``joint`` optimised with
            the inputs; ``given`` by the threat model.
        stance: How the defense is treated; see `gradveil.attacks.adaptive`.
        smooth_relu: Use the smooth ReLU derivative where the model has ReLUs.
        matching: Weight of the matching term; 0 leaves the prior alone, which is a null baseline.
        statistics: Weight, within the matching, of the distance to the BatchNorm statistics that the upload carries.
    """

    name: str
    objective: str = "cosine"
    optimiser: Adam | LBFGS = dataclasses.field(default_factory=Adam)
    steps: int = 1000
    restarts: int = 1
    start: Start = "noise"
    tv: float = 0.0
    tv_end: float | None = None
    relative: bool = False
    energy: float = 0.0
    box: bool = True
    labels: Labels = "recovered"
    stance: str = "plain"
    smooth_relu: bool = False
    matching: float = 1.0
    statistics: float = 0.0

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing; a typo must not become another attack."""
        choices = {
            "objective": (*OBJECTIVES.names(), LIKELIHOOD),
            "start": get_args(Start),
            "labels": get_args(Labels),
            "stance": STANCES,
        }
        for name, known in choices.items():
            check_choice("", name, getattr(self, name), known)
        if self.tv_end is not None and not self.tv > 0:
            raise UsageError(f"tv_end is {self.tv_end}, but tv is {self.tv}; a weight that changes geometrically starts above 0")


@dataclass(frozen=True)
class _Matching:
    """The loss of one candidate; every member is the same for all candidates."""

    recipe: Recipe
    learners: tuple[Learner, ...]
    adversary: AdversaryModel
    noise_std: float | None
    smooth: bool

    def loss(self, leaves: Named, constants: Named) -> Tensor:
        recipe, inputs = self.recipe, leaves["inputs"]
        weight = constants["tv"] if recipe.tv_end is not None else recipe.tv
        total = weight * total_variation(inputs) if recipe.tv else inputs.sum() * 0
        if recipe.energy:
            total = total + recipe.energy * energy(inputs)
        if not recipe.matching:
            return total
        unit = constants["unit"] if recipe.relative else 1.0
        total = total + unit * recipe.matching * self.misfit(leaves, constants)
        variables = prefixed(leaves, "unknown/")
        return total + self.adversary.penalty(variables) if variables else total

    def misfit(self, leaves: Named, constants: Named) -> Tensor:
        """Return the matching objective alone, averaged over the rounds seen."""
        inputs = leaves["inputs"]
        targets = leaves["label_logits"].softmax(-1) if "label_logits" in leaves else constants["labels"]
        total = inputs.sum() * 0
        variables = prefixed(leaves, "unknown/")
        for index, plain_learner in enumerate(self.learners):
            learner = with_sharpness(plain_learner, constants["sharpness"]) if self.smooth else plain_learner
            simulated = self.adversary.replay(learner, inputs, targets, variables)
            comparison = self.adversary.compare(prefixed(constants, f"{index}|"), simulated, variables)
            total = total + self._distance(comparison, inputs) / len(self.learners)
            if self.recipe.statistics:
                seen = prefixed(constants, f"{index}|{STATISTICS}")
                apart = statistics_distance(learner.statistics(inputs, targets), seen)
                total = total + self.recipe.statistics * apart / len(self.learners)
        return total

    def _distance(self, comparison: Comparison, inputs: Tensor) -> Tensor:
        if self.recipe.objective != LIKELIHOOD:
            return OBJECTIVES.get(self.recipe.objective)(comparison)
        misfit = torch.stack([r.square().sum() for r in comparison.residuals().values()]).sum()
        return misfit / (2 * (self.noise_std or 1.0) ** 2 * inputs.numel())


def run_recipe(recipe: Recipe, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
    """Run one recipe on all observations; they must share learners, threat model and shapes (one cell is one batch)."""
    learner = observations[0].learner
    with matrix_products(learner.device, coarse=learner.parameters >= COARSE_FROM):
        return _run_recipe(recipe, observations, context)


def _run_recipe(recipe: Recipe, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
    first = observations[0]
    adversary = adversary_for(recipe.stance, first, context)
    smooth = recipe.smooth_relu and bool(recipe.matching) and has_relu(first.learner)
    learners = tuple(smooth_learner(learner) if smooth else learner for learner in first.learners)
    learners = tuple(quicker(learner, first.input_shape) for learner in learners)
    matching = _Matching(recipe, learners, adversary, adversary.arrives(first).noise_std, smooth)
    steps = context.steps(recipe.steps)
    places, leaves, constants = _stack(recipe, adversary, observations, context, smooth)
    count = leaves["inputs"].shape[0]
    execution = choose_execution(
        context.execution,
        leaves["inputs"].device,
        first.learner.parameters,
        count,
        first.examples,
        steps if recipe.matching else 0,
    )
    if execution.mode == "looped":
        matching = dataclasses.replace(matching, learners=tuple(one_at_a_time(learner) for learner in learners))
    if recipe.statistics and execution.mode == "compiled":
        # The compiler does not follow the hooks that listen to BatchNorm layers.
        execution = dataclasses.replace(execution, mode="batched")
    problem = Problem(
        loss=matching.loss,
        leaves=leaves,
        constants=constants,
        boxed=frozenset({"inputs"}) if recipe.box else frozenset(),
        refresh=_refresher(matching, adversary, first.learners, context, steps),
        tracks=_tracker(adversary, smooth or recipe.tv_end is not None, steps, context),
        schedules=_schedules(recipe, smooth, steps),
    )
    begun = _constants_at(0, problem, leaves)
    # Weights of priors are tuned for a unit taken where ReLUs are smoothest, before their sharpness begins to grow.
    begun |= {"sharpness": constants["sharpness"]} if smooth else {}
    slope, value = _misfits(matching, leaves, begun, execution)
    if recipe.relative and recipe.matching:
        constants["unit"] = 1 / value.clamp_min(1e-30)
    floor = float("-inf") if recipe.objective == LIKELIHOOD or not recipe.matching or recipe.relative else 1e-14
    outcome = optimise(
        problem, recipe.optimiser, steps, execution, stop_below=floor, progress=context.progress, watch=context.watch
    )
    if recipe.matching:
        # Priors and schedules aside: whether the *matching* moved is what tells a working attack from a smoothing filter.
        ends = [(each, _constants_at(steps - 1, problem, each)) for each in (leaves, outcome.leaves)]
        renewing = renewing_of(adversary, context)
        if renewing is not None and renewing.settles:
            # Weights of entries make two losses comparable only where both have the same.
            held = renewed(renewing, first.learners, outcome.leaves, constants, context, steps - 1)
            ends = [(each, {**own, **held}) for each, own in ends]
        first_loss, best_loss = (_misfits(matching, each, own, execution)[1] for each, own in ends)
        outcome = dataclasses.replace(outcome, first_loss=first_loss, best_loss=best_loss, gradient_norm=slope)
    return _candidates(recipe, observations, outcome, constants, places)


def _stack(
    recipe: Recipe, adversary: AdversaryModel, observations: Sequence[Observation], context: AttackContext, smooth: bool
) -> tuple[list[_Place], Named, Named]:
    """Draw starts and gather evidence: candidates are ordered target-major, then by labels, restarts next to each other.

    All plausible labels begin at the same starts, so that what tells them apart is the labels alone.
    """
    places, rows_leaves, rows_constants = [], [], []
    for index, observation in enumerate(observations):
        reference = next(iter(observation.update.weights.values()))
        evidence: Named = {}
        for round_index in range(len(observation.updates)):
            evidence |= with_prefix(adversary.evidence(observation, round_index), f"{round_index}|")
            if recipe.statistics and recipe.matching:
                evidence |= with_prefix(_statistics(observation, round_index), f"{round_index}|{STATISTICS}")
        choices = _labels(recipe, observation, context)
        for hypothesis, restart in itertools.product(range(len(choices)), range(recipe.restarts)):
            labels = choices[hypothesis]
            generator = context.seed.child(recipe.name, recipe.stance, "restart", restart).generator("start", client=index)
            leaves = {"inputs": _start(recipe.start, (observation.examples, *observation.input_shape), generator).to(reference)}
            if labels is None:
                logits = torch.randn((observation.examples, observation.classes), generator=generator)
                leaves["label_logits"] = logits.to(reference)
            leaves |= {"unknown/" + n: v.to(reference) for n, v in adversary.variables(observation, generator).items()}
            constants = dict(evidence) if labels is None else {**evidence, "labels": labels}
            one = torch.ones((), dtype=reference.dtype, device=reference.device)
            constants |= {"sharpness": one} if smooth else {}
            constants |= {"unit": one} if recipe.relative else {}
            places.append((index, hypothesis, restart))
            rows_leaves.append(leaves)
            rows_constants.append(constants)
    return places, _stack_rows(rows_leaves), _stack_rows(rows_constants)


def _statistics(observation: Observation, round_index: int) -> Named:
    learner = observation.learners[round_index]
    per_client = observation.examples // learner.settings.clients
    return recover_statistics(learner, observation.updates[round_index].buffers, per_client)


def _constants_at(step: int, problem: Problem, leaves: Named) -> Named:
    """Return the constants of a problem as they are at one step for given leaves."""
    constants = problem.constants | problem.scheduled(step)
    return constants if problem.refresh is None else problem.refresh(step, leaves, constants)


def _misfits(matching: _Matching, leaves: Named, constants: Named, execution: Execution) -> tuple[Tensor, Tensor]:
    """Return, per candidate, the norm of the slope (in the inputs) and the value of the matching loss alone."""
    inputs = leaves["inputs"]
    if not matching.recipe.matching:
        return inputs.new_zeros(len(inputs)), inputs.new_zeros(len(inputs))
    others = {n: v for n, v in leaves.items() if n != "inputs"}

    def misfit(row: Tensor, rest: Named) -> Tensor:
        own = {"inputs": row.reshape(inputs.shape[1:]), **prefixed(rest, "leaf|")}
        return matching.misfit(own, prefixed(rest, "constant|"))

    rest = with_prefix(others, "leaf|") | with_prefix(constants, "constant|")
    gradients, values = execution.once().prepare(misfit)(inputs.flatten(1), rest)
    return gradients.norm(dim=1), values


def _stack_rows(rows: list[Named]) -> Named:
    return {name: _stack_one([row[name] for row in rows]) for name in rows[0]}


def _stack_one(values: list[Tensor]) -> Tensor:
    """Stack; what is one and the same tensor for all candidates, as a basis of the model's, is kept once."""
    first = values[0]
    return first.expand(len(values), *first.shape) if all(value is first for value in values) else torch.stack(values)


def _labels(recipe: Recipe, observation: Observation, context: AttackContext) -> list[Tensor | None]:
    """Return what to search with: None where labels are searched for too, those given, or all that are plausible."""
    if recipe.labels == "joint":
        return [None]
    known = Knowledge.LABELS in observation.threat.knows and observation.labels is not None
    if recipe.labels == "given" and not known:
        raise MissingKnowledge(f"recipe {recipe.name!r} needs to know {Knowledge.LABELS}; grant it or set labels = 'recovered'")
    found = label_hypotheses(observation, recipe.stance, context)
    # Without the matching term labels change nothing.
    return list(found if recipe.matching else found[:1])


def _start(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if kind == "grey":
        # A trace of noise breaks the symmetry between restarts and between the examples of a batch.
        return 0.5 + 0.01 * torch.randn(shape, generator=generator)
    if kind == "uniform":
        return torch.rand(shape, generator=generator)
    return (0.5 + 0.25 * torch.randn(shape, generator=generator)).clamp(0, 1)


def _refresher(
    matching: _Matching, adversary: AdversaryModel, learners: tuple[Learner, ...], context: AttackContext, steps: int
) -> Refresh | None:
    """Return the function that renews what an adversary reads off the dummies, or None where it reads nothing."""
    renewing = renewing_of(adversary, context)
    if renewing is None or not matching.recipe.matching:
        return None
    last, held = math.ceil(SETTLED * steps) if renewing.settles else steps, renewing

    def refresh(step: int, leaves: Named, constants: Named) -> Named:
        if step >= last or (step % REFRESH_EVERY and step != steps - 1):
            return constants
        return constants | renewed(held, learners, leaves, constants, context, step)

    return refresh


def _schedules(recipe: Recipe, smooth: bool, steps: int) -> dict[str, Callable[[int], float]]:
    """Return what changes from step to step alike for all candidates: sharpness, and the weight of the prior."""
    found: dict[str, Callable[[int], float]] = {}
    if smooth:
        found["sharpness"] = lambda step: sharpness_at(step, steps)
    if recipe.tv_end is not None:
        ratio = recipe.tv_end / recipe.tv
        found["tv"] = lambda step: recipe.tv * ratio ** min(1.0, step / max(1.0, SETTLED * steps))
    return found


def _tracker(adversary: AdversaryModel, changing: bool, steps: int, context: AttackContext) -> Callable[[int], bool] | None:
    """Losses are comparable only once schedules have settled and, straight-through, where the offset has just been renewed."""
    renewing = renewing_of(adversary, context)
    if not changing and renewing is None:
        return None
    settles = renewing is not None and renewing.settles
    settled = min(math.ceil(SETTLED * steps), steps - 1) if changing or settles else 0
    every = 1 if renewing is None or settles else REFRESH_EVERY
    return lambda step: step >= settled and (step % every == 0 or step == steps - 1)


def _candidates(
    recipe: Recipe, observations: Sequence[Observation], outcome: Outcome, constants: Named, places: Sequence[_Place]
) -> list[Reconstruction]:
    found = []
    for row, (target, hypothesis, restart) in enumerate(places):
        observation = observations[target]
        leaves = {name: value[row] for name, value in outcome.leaves.items()}
        joint = "label_logits" in leaves
        labels = leaves["label_logits"].argmax(-1) if joint else constants["labels"][row]
        found.append(
            Reconstruction(
                inputs=leaves["inputs"],
                targets=labels,
                recipe=recipe.name,
                target=target,
                stance=recipe.stance,
                restart=restart,
                hypothesis=hypothesis,
                variables=prefixed(leaves, "unknown/"),
                first_loss=float(outcome.first_loss[row]),
                best_loss=float(outcome.best_loss[row]),
                gradient_norm=float(outcome.gradient_norm[row]),
                steps=int(outcome.steps[row]),
                status=outcome.status[row],
                oracle_labels=not joint and observation.labels is not None and Knowledge.LABELS in observation.threat.knows,
            )
        )
    return found
