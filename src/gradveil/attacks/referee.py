"""The referee: one ranking over the candidates of all recipes, as the attacker would make it, without the truth.

Recipes have losses that cannot be compared, so every candidate is scored anew: in float64, without priors, by replaying the
whole defended client through the informed adversary model, its unknowns refitted. Where the noise of the release is known the
score is the Gaussian negative log-likelihood; else it is the mean over tensors of the relative squared residual, each tensor
weighted by how exactly it arrives. How exactly is measured, not declared: the attacker sends public images of its own through
the same client and looks at the residual at their truth.

A low score alone does not make a good image: where the update determines the input only in part, a sharp recipe fits it more
exactly than a smooth one and looks worse. So the attacker compares each candidate with what the same recipe did in rehearsal.
Candidates whose score is as good as their recipe's rehearsal scores, or as good as a truth's, are tied, and ties go to the
recipe that came closest to the truth in rehearsal; where no candidate went as rehearsed, the lowest score wins. A candidate that
scores no worse than the winner and whose recipe rehearsed better wins however its own rehearsal went.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.adversary import prefixed, with_prefix
from gradveil.attacks.engine.execution import choose_execution
from gradveil.attacks.engine.loop import Problem, optimise
from gradveil.attacks.engine.matrix_convolution import quicker
from gradveil.attacks.engine.optimisers import Adam
from gradveil.learning.learner import Learner
from gradveil.recording import Recorded
from gradveil.records import AdversaryModel, Observation, Reconstruction
from gradveil.tensors import Named, digest

__all__ = ["Referee", "Verdict", "compare_candidates", "recipe_key"]

_Both = Callable[[Tensor, Tensor, Named], tuple[Named, Named]]

UNKNOWN, EVIDENCE = "unknown|", "evidence|"
REFIT_STEPS = 60
TIE_FACTOR = 2.0
ROUNDING = 1e-9  # a residual this small is that of float32 at the client; no candidate is dropped over it
TRUTH_SLACK = 1.25
"""A truth scores a little differently from one image to the next, and few are rehearsed."""


def recipe_key(candidate: Reconstruction) -> str:
    """Return ``recipe/stance``: what a rehearsal ranks."""
    return f"{candidate.recipe}/{candidate.stance}"


@dataclass(frozen=True)
class Verdict:
    """What the attacker selects for one target: the candidate's index, all scores, and which candidates were tied.

    The chosen one need not be among them, see `Referee.select`.
    """

    chosen: int
    scores: list[float]
    tied: list[int]


@dataclass(frozen=True)
class Referee:
    """Scores candidates and selects among them.

    Attributes:
        arrival: Per tensor, the root mean square relative residual at the truth of public images; 0 where it arrives exactly.
        truth_score: The highest score a truth reached in rehearsal; a candidate below it explains the update as well as the
            truth would.
        rehearsal: Mean PSNR of each recipe on the public images.
        rehearsal_score: Highest score of each recipe on the public images.
        truths: The scores of all truths in rehearsal.
        known: Scores already computed, by the content of what was scored: fitting unknowns is the most expensive part of judging.
        entries: How many entries are compared, by the content of the observation; known once a candidate was scored.
        recorded: Slopes of misfits by learners, which are kept so that no other takes their place, and adversary.
    """

    arrival: dict[str, float] = field(default_factory=dict)
    truth_score: float = 0.0
    rehearsal: dict[str, float] = field(default_factory=dict)
    rehearsal_score: dict[str, float] = field(default_factory=dict)
    truths: tuple[float, ...] = ()
    known: dict[Hashable, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    entries: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    recorded: dict[Hashable, tuple[Recorded, Sequence[Learner]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def rehearsed(
        cls,
        observations: Sequence[Observation],
        truths: Sequence[tuple[Tensor, Tensor]],
        originals: Sequence[Tensor],
        candidates: Sequence[Sequence[Reconstruction]],
    ) -> Referee:
        """Learn from the attacker's own public images how exactly tensors arrive, what a truth scores, which recipe does best.

        Args:
            observations: What the client would have sent for the public images.
            truths: The inputs the client would have trained on, and their labels.
            originals: The public images themselves; a defense that changes data makes them differ from what is trained on.
            candidates: What the recipes made of the observations.
        """
        if not observations:
            return cls()
        squares: dict[str, list[float]] = {}
        for observation, (inputs, labels) in zip(observations, truths, strict=True):
            residuals, observed, _ = compare_candidates(observation, inputs[None].double(), labels[None], [{}])
            for name, value in residuals.items():
                size = float(observed[name].square().sum())
                squares.setdefault(name, []).append(float(value.square().sum()) / size if size > 0 else 0.0)
        arrival = {name: (sum(values) / len(values)) ** 0.5 for name, values in squares.items()}
        judge = cls(arrival)
        scores = [
            judge.scores(o, [Reconstruction(x, y, recipe="truth")])[0] for o, (x, y) in zip(observations, truths, strict=True)
        ]
        worst: dict[str, float] = {}
        for observation, many in zip(observations, candidates, strict=True):
            for candidate, found in zip(many, judge.scores(observation, many), strict=True):
                worst[recipe_key(candidate)] = max(found, worst.get(recipe_key(candidate), 0.0))
        return cls(arrival, max(scores), _rehearsal_psnr(originals, candidates), worst, tuple(scores))

    def scores(self, observation: Observation, candidates: Sequence[Reconstruction]) -> list[float]:
        """Return one score per candidate, lower is better; infinite where it cannot be computed."""
        keys = [_key(observation, candidate) for candidate in candidates]
        new = [place for place, key in enumerate(keys) if key not in self.known]
        if new:
            scores = self._scores(observation, [candidates[place] for place in new])
            self.known.update({keys[place]: score for place, score in zip(new, scores, strict=True)})
        return [self.known[key] for key in keys]

    def _scores(self, observation: Observation, candidates: Sequence[Reconstruction]) -> list[float]:
        inputs = torch.stack([c.inputs if c.unfinished is None else c.unfinished for c in candidates]).double()
        labels = torch.stack([c.targets for c in candidates])
        residuals, observed, count = compare_candidates(observation, inputs, labels, [c.variables for c in candidates])
        self.entries[observation.content] = count
        std = observation.adversary.arrives(observation).noise_std
        if std is not None and std > 0:
            total = torch.stack([_energies(r) for r in residuals.values()]).sum(0) / (2 * std**2 * count)
        else:
            total = self._weighted(residuals, observed)
        return [float(v) if bool(torch.isfinite(v)) else float("inf") for v in total]

    def misfit(self, observation: Observation, candidate: Reconstruction) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the weighted relative residual, and its slope, as a function of a candidate's inputs, all else as it is."""
        # What differs between updates of one client is handed in, so that on a GPU one recording serves all of them.
        key = (*(id(learner) for learner in observation.learners), repr(observation.adversary))
        if key not in self.recorded:
            both = _both(_doubled(observation), observation.adversary)

            def slope(given: Named) -> Named:
                with torch.enable_grad():
                    inputs = given["inputs"].detach().requires_grad_()
                    sides = both(inputs.clamp(0, 1), given["labels"], prefixed(given, UNKNOWN), prefixed(given, EVIDENCE))
                    value = self._weighted(*({n: v[None] for n, v in side.items()} for side in sides))[0]
                (found,) = torch.autograd.grad(value, inputs)
                return {"value": value.detach(), "slope": found}

            self.recorded[key] = Recorded(slope), observation.learners
        recorded, _ = self.recorded[key]
        fixed = with_prefix({name: value.double() for name, value in candidate.variables.items()}, UNKNOWN)
        fixed |= with_prefix(_evidence(observation), EVIDENCE) | {"labels": candidate.targets.to(observation.learner.device)}

        def evaluate(inputs: Tensor) -> tuple[Tensor, Tensor]:
            found = recorded({"inputs": inputs.detach(), **fixed})
            return found["value"], found["slope"]

        return evaluate

    def _weighted(self, residuals: Named, observed: Named) -> Tensor:
        terms, weights = [], []
        for name, residual in residuals.items():
            size = _energies(observed[name])
            weight = torch.where(size > 0, 1.0 / (self.arrival.get(name, 0.0) ** 2 + 1e-4), 0.0)
            terms.append(weight * _energies(residual) / size.clamp_min(1e-300))
            weights.append(weight)
        return torch.stack(terms).sum(0) / torch.stack(weights).sum(0).clamp_min(1e-300)

    def select(self, observation: Observation, candidates: Sequence[Reconstruction]) -> Verdict:
        """Return the candidate an attacker without the truth would keep."""
        scores = self.scores(observation, candidates)
        tied = [i for i, value in enumerate(scores) if value <= self._as_rehearsed(candidates[i])]
        if not tied:
            tied = [i for i, value in enumerate(scores) if value <= min(scores)] or [0]
        rehearsed = [self.rehearsal.get(recipe_key(candidate), float("-inf")) for candidate in candidates]
        standing = [(psnr, -score) for psnr, score in zip(rehearsed, scores, strict=True)]
        best = max(tied, key=lambda i: standing[i])
        # Under a defense that draws what it hides, a good recipe can go worse than rehearsed and still explain the update better
        # than a poor one that went as poorly as rehearsed.
        ahead = [i for i in range(len(candidates)) if scores[i] <= scores[best] and rehearsed[i] > rehearsed[best]]
        return Verdict(max(ahead, key=lambda i: standing[i], default=best), scores, tied)

    def _as_rehearsed(self, candidate: Reconstruction) -> float:
        """Return the score up to which a candidate counts as having gone as rehearsed.

        Counted from what a truth scores: under noise that is far from zero, and twice it would excuse any failure.
        """
        rehearsed = self.rehearsal_score.get(recipe_key(candidate), self.truth_score)
        as_rehearsed = self.truth_score + TIE_FACTOR * (rehearsed - self.truth_score)
        return max(TRUTH_SLACK * self.truth_score, as_rehearsed, ROUNDING)


def _key(observation: Observation, candidate: Reconstruction) -> Hashable:
    """Return what a score depends on, by content; and whose the candidate is, since equal ones may be rounded differently."""
    learners = tuple(learner.content for learner in observation.learners)
    compared = candidate.inputs if candidate.unfinished is None else candidate.unfinished
    tensors = digest({"inputs": compared, "targets": candidate.targets}, candidate.variables)
    whose = candidate.recipe, candidate.stance, candidate.restart, candidate.target
    return observation.content, learners, repr(observation.adversary), tensors, *whose


def _energies(value: Tensor) -> Tensor:
    """Return the squared norm per candidate; what is compared may be a single number each."""
    return value.square().reshape(value.shape[0], -1).sum(1)


def _rehearsal_psnr(originals: Sequence[Tensor], candidates: Sequence[Sequence[Reconstruction]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for inputs, many in zip(originals, candidates, strict=True):
        for candidate in many:
            error = _batch_error(candidate.inputs, inputs)
            found.setdefault(recipe_key(candidate), []).append(-10 * float(torch.log10(error.clamp_min(1e-6))))
    return {key: sum(values) / len(values) for key, values in found.items()}


def _batch_error(left: Tensor, right: Tensor) -> Tensor:
    """Mean over examples of the error to the nearest reconstruction: batches come back in any order."""
    distance = (right[:, None] - left[None]).square().flatten(2).mean(2)
    return distance.min(1).values.mean()


def compare_candidates(
    observation: Observation, inputs: Tensor, labels: Tensor, variables: list[Named], *, refit: bool = True
) -> tuple[Named, Named, int]:
    """Return residuals and observed tensors of all candidates (leading axis), and how many entries each candidate compares.

    Args:
        observation: What was seen.
        inputs: (C, B, ...) in double precision.
        labels: (C, B, ...).
        variables: The defense's unknowns of each candidate, as far as they were fitted.
        refit: Whether to fit the unknowns to each candidate.
    """
    adversary, both = observation.adversary, _comparing(observation)
    inputs = inputs.to(observation.learner.device)
    unknowns = _started(observation, adversary, variables)
    if refit:
        unknowns = _refit(observation, adversary, inputs, labels, unknowns, both)
    found = [both(x, y, u) for x, y, u in zip(inputs, labels, unknowns, strict=True)] if len(inputs) == 1 else None
    if found is not None:
        residuals, observed = ({n: v[None] for n, v in side.items()} for side in found[0])
    else:
        stacked = {n: torch.stack([u[n] for u in unknowns]) for n in unknowns[0]}
        residuals, observed = vmap(both, in_dims=(0, 0, 0 if stacked else None), chunk_size=16)(inputs, labels, stacked)
    count = sum(value[0].numel() for value in residuals.values())
    return {n: v.detach() for n, v in residuals.items()}, {n: v.detach() for n, v in observed.items()}, count


def _comparing(observation: Observation) -> _Both:
    """Return what compares one candidate with an observation in double precision, round by round, differentiably."""
    both, evidence = _both(_doubled(observation), observation.adversary), _evidence(observation)
    return lambda x, y, unknown: both(x, y, unknown, evidence)


def _doubled(observation: Observation) -> tuple[Learner, ...]:
    return tuple(quicker(learner.to(torch.float64), observation.input_shape) for learner in observation.learners)


def _evidence(observation: Observation) -> Named:
    evidence: Named = {}
    for index in range(len(observation.updates)):
        seen = observation.adversary.evidence(observation, index).items()
        evidence |= with_prefix({n: v.double() if v.is_floating_point() else v for n, v in seen}, f"{index}|")
    return evidence


def _both(
    learners: tuple[Learner, ...], adversary: AdversaryModel
) -> Callable[[Tensor, Tensor, Named, Named], tuple[Named, Named]]:
    """Return ``(inputs, labels, unknowns, evidence) -> (residuals, observed)``."""

    def both(x: Tensor, y: Tensor, unknown: Named, evidence: Named) -> tuple[Named, Named]:
        left: Named = {}
        right: Named = {}
        for index, learner in enumerate(learners):
            comparison = adversary.compare(prefixed(evidence, f"{index}|"), adversary.replay(learner, x, y, unknown), unknown)
            left |= with_prefix(comparison.residuals(), f"{index}|")
            right |= with_prefix(comparison.observed, f"{index}|")
        return left, right

    return both


def _started(observation: Observation, adversary: AdversaryModel, variables: list[Named]) -> list[Named]:
    """Return the unknowns of each candidate as they were fitted, else as the adversary draws them."""
    drawn = {n: v.double() for n, v in adversary.variables(observation, torch.Generator().manual_seed(0)).items()}
    return [{n: own.get(n, drawn[n]).to(drawn[n]) for n in drawn} for own in variables]


def _refit(
    observation: Observation, adversary: AdversaryModel, inputs: Tensor, labels: Tensor, starts: list[Named], both: _Both
) -> list[Named]:
    """Fit the defense's unknowns to each candidate with its inputs held fixed."""
    drawn = starts[0]
    if not drawn:
        return starts

    def misfit(leaves: Named, constants: Named) -> Tensor:
        residuals, observed = both(constants["inputs"], constants["labels"], leaves)
        size = torch.stack([v.square().sum() for v in observed.values()]).sum().clamp_min(1e-300)
        return torch.stack([r.square().sum() for r in residuals.values()]).sum() / size

    def loss(leaves: Named, constants: Named) -> Tensor:
        return misfit(leaves, constants) + adversary.penalty(leaves)

    leaves, constants = {n: torch.stack([s[n] for s in starts]) for n in drawn}, {"inputs": inputs, "labels": labels}
    # Double precision takes twice the memory of the parameters that the choice is made for.
    parameters, examples = 2 * observation.learner.parameters, 2 * observation.examples
    execution = choose_execution("auto", inputs.device, parameters, len(starts), examples, REFIT_STEPS)
    first = optimise(Problem(misfit, leaves, constants), Adam(learning_rate=0.05), 1, execution.once())
    if not bool(first.gradient_norm.any()):  # the defense reads its unknowns off the update, and nothing is left to fit
        return starts
    outcome = optimise(Problem(loss, leaves, constants), Adam(learning_rate=0.05), REFIT_STEPS, execution)
    return [{n: v[row] for n, v in outcome.leaves.items()} for row in range(len(starts))]
