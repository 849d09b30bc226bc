"""The Wiener step: the posterior mean of a linear-Gaussian model of what the client sends, with public records as the prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack, AttackCard, AttackContext, Cost
from gradveil.attacks.engine.label_belief import label_hypotheses
from gradveil.attacks.linear_evidence import entries, evidence_of, held_batches, rehearsed
from gradveil.attacks.linear_model import LinearModel, Read
from gradveil.attacks.linear_noise import Release, learn_release
from gradveil.attacks.pca_prior import LinearPrior, prior_for, refused
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.study.checks import check_flag, check_whole

__all__ = ["Wiener"]

STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Factors on the variance of everything that is no signal, of which one is chosen on held-out public records."""
MOST_NUMBERS = 2**28
"""Derivatives of one update that are held at once; of larger networks so many entries stand for all."""
MOST_WORK = 2**30
"""Derivatives of one update, and errors of its model, that are taken at all: it is done anew for every update and rehearsal."""
NEAREST = (0.05, 1.0)
"""Least and most, in units of the prior's deviation, that an estimate is taken to be off."""


_Plan = tuple[tuple[float, float], ...]
"""Per iteration: the strength, and how far off the estimate is before it."""


@ATTACKS.register(
    AttackCard(
        name="wiener",
        summary="Reads the input off what is shared in one linear step: the posterior mean under a prior from public records.",
        cost="for each label about as many replays of the client as the prior has directions, and for each update two matrices "
        "of that size: seconds, no search",
        weakness="one straight line about the mean of public records: a client that bends is read as far as it is straight; "
        "records of one batch that share a label are not told apart",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES, Knowledge.PUBLIC_DATA}),
        home="sigmoid LeNet, default initialisation, one 3×16×16 picture, 400 public pictures of the same photograph",
        floor_psnr=24.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class Wiener(Attack):
    """``z = -(I + Gᵀ C⁻¹ G)⁻¹ Gᵀ C⁻¹ rho``, and the input is mu + V diag(s) z.

    mu, V and s are mean, principal directions and deviations of public records (`gradveil.attacks.pca_prior`). rho(x) is what the
    adversary model of the stance would simulate for x minus what was seen, after masks and projections; rho is its value and G
    its derivative by z at the mean. C is the covariance of everything else:

    * what of rho is not linear in z (curvature, and inputs outside the directions), measured on held-out public records under
      the very evidence compared; its mean moves rho, half of its covariance is taken as those records show it, half entry by
      entry;
    * noise of known size; or, where the client's code can be run, what arrives of the attacker's own records beyond what
      comparing undoes, as a gain and an uncorrelated error of every entry (`gradveil.attacks.linear_noise`).

    The factor on C is chosen on further held-out public records, each sent through the client and read as the update under
    attack will be; never on that update. Every plausible label is tried (`gradveil.attacks.engine.label_belief`). With more
    than one of ``iterations`` the model is taken again at the estimate (Gauss-Newton), with its error measured on public
    records drawn as near to the estimate as the step before was wrong about its rehearsals.

    Departs from the paper: there is none to depart from; the mathematics is Wiener's, and for a linear client with Gaussian
    noise and inputs this is the posterior mean exactly. The defense's unknowns stay at their starting values.

    Cost: rank + errors replays of the client per label, ``rehearsals`` runs of its code, and a solve per update. Every further
    iteration costs as much again for every update and rehearsal. Known weakness: a ReLU network's embedding is far from straight
    (`linear_map` searches instead); at the mean equal labels of a batch have equal derivatives, so their inputs come out alike.

    Attributes:
        rank: Directions of the prior, at most; for a batch, of every example.
        iterations: Steps; 1 needs no look at the client that other updates with the same label do not share.
        errors: Held-out public records on which the model's error is measured.
        rehearsals: Held-out public records sent through the client to choose the strength.
        by_class: Begin at the mean of the label's class where public records have enough of it.
        stance: How the defense is treated.
    """

    card: ClassVar[AttackCard]
    rank: int = 256
    iterations: int = 1
    errors: int = 128
    rehearsals: int = 16
    by_class: bool = True
    stance: str = "plain"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        for name, least in (("rank", 1), ("iterations", 1), ("errors", 2), ("rehearsals", 3)):
            check_whole("wiener", name, getattr(self, name), least)
        check_flag("wiener", "by_class", self.by_class)

    @property
    def stances(self) -> tuple[str, ...]:
        """Those that compare in one way throughout."""
        return ("plain", "informed", "zero_mask", "magnitudes", "learned")

    def lacks(self, observation: Observation, context: AttackContext) -> str | None:
        """Return what is missing, unless there are public records that teach something and the model can be afforded."""
        work = (self.rank * observation.examples + self.errors) * entries(observation)
        if work > MOST_WORK:
            return f"a linear model of this update has {work:.0e} numbers, more than the {MOST_WORK:.0e} that are computed"
        return refused(lambda: prior_for(observation, context, self.rank, by_class=self.by_class, name=self.card.name))

    def cost(self) -> Cost:
        """Return its steps; runs of the client are once for all updates."""
        return Cost(self.iterations)

    def hypotheses(self, observation: Observation, context: AttackContext) -> int:
        """Return the number of plausible labels."""
        return len(label_hypotheses(observation, self.stance, context))

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Read all updates, those with one label after one another's model."""
        prior = prior_for(observations[0], context, self.rank, by_class=self.by_class, name=self.card.name)
        attack = replace(self, iterations=context.steps(self.iterations))
        places = [
            (index, hypothesis, labels)
            for index, observation in enumerate(observations)
            for hypothesis, labels in enumerate(label_hypotheses(observation, self.stance, context))
        ]
        found: dict[int, Reconstruction] = {}
        # Those with the same labels in a row: they share what is large.
        for place in sorted(range(len(places)), key=lambda place: places[place][2].flatten().tolist()):
            index, hypothesis, labels = places[place]
            read = _Reader(attack, prior, context, labels).read(observations[index])
            found[place] = self._reconstruction(observations[index], prior, labels, read).replace(
                target=index, hypothesis=hypothesis, steps=attack.iterations - 1
            )
            if context.progress is not None:
                context.progress(attack.iterations)
        return [found[place] for place in range(len(places))]

    def _reconstruction(self, observation: Observation, prior: LinearPrior, labels: Tensor, read: Read) -> Reconstruction:
        return Reconstruction(
            inputs=prior.decode(read.point, prior.mean_of(labels)),
            targets=labels,
            recipe=self.card.name,
            stance=self.stance,
            first_loss=read.first_loss,
            best_loss=read.loss,
            gradient_norm=read.slope,
            oracle_labels=observation.labels is not None and Knowledge.LABELS in observation.threat.knows,
        )


@dataclass(frozen=True, eq=False)
class _Reader:
    """Reads updates with given labels (B,)."""

    attack: Wiener
    prior: LinearPrior
    context: AttackContext
    labels: Tensor

    def read(self, observation: Observation) -> Read:
        """Return the posterior mean of an update."""
        model, release = self._model(observation), self._release(observation)
        evidence = evidence_of(observation, self.attack.stance, self.context, share=self._share(observation))
        found: Read | None = None
        for strength, near in self._plan(observation):
            point = model.start if found is None else found.point
            now = model.posterior(evidence, release, point, near).mean(strength)
            found = now if found is None else replace(now, first_loss=found.first_loss, slope=found.slope)
        assert found is not None
        return found

    @property
    def _rehearsing(self) -> int:
        """How many held-out records are for rehearsals; the others measure errors of the model."""
        return max(1, len(self.prior.held) // 4)

    def _model(self, observation: Observation) -> LinearModel:
        count = min(self.attack.errors, len(self.prior.held) - self._rehearsing, MOST_NUMBERS // (8 * entries(observation)))
        return LinearModel(self.prior, self.labels, held_batches(self.prior, len(self.labels), 0, max(2, count)), self.context)

    def _share(self, observation: Observation) -> float:
        rows = len(self.labels) * self.prior.rank + self.attack.errors
        return min(1.0, MOST_NUMBERS / (rows * entries(observation)))

    def _own(self) -> Tensor:
        """Return the batches that rehearse; none of their records measures errors of the model."""
        first = len(self.prior.held) - self._rehearsing
        return held_batches(self.prior, len(self.labels), first, self.attack.rehearsals)

    def _client(self, observation: Observation) -> tuple[object, ...]:
        learners = tuple((learner.content, learner.settings) for learner in observation.learners)
        # The prior is in the memory itself, so no other can have its identity.
        return self.attack, id(self.prior), learners, repr(observation.adversary), len(self.labels)

    def _release(self, observation: Observation) -> Release:
        """Return how updates with these labels arrive."""
        key, memory = ("wiener release", *self._client(observation), str(self.labels.tolist())), self.context.memory
        if key not in memory:
            stance, share = self.attack.stance, self._share(observation)
            memory[key] = learn_release(observation, self.context, stance, self._own(), self.labels, share=share)
        release: Release = memory[key]
        return release

    def _plan(self, observation: Observation) -> _Plan:
        """Return strengths and distances; made with one label for all, so that it does not hang on who else is attacked."""
        key, memory = ("wiener plan", *self._client(observation)), self.context.memory
        if key not in memory:
            labels = self.labels if self.labels.is_floating_point() else torch.zeros_like(self.labels)
            memory[key] = replace(self, labels=labels)._planned(observation)
        plan: _Plan = memory[key]
        return plan

    def _planned(self, observation: Observation) -> _Plan:
        stance, share = self.attack.stance, self._share(observation)
        model, release, inputs = self._model(observation), self._release(observation), self._own()
        seen = rehearsed(observation, self.context, stance, inputs, self.labels)
        rehearsals = [evidence_of(each, stance, self.context, share=share) for each in seen]
        truths = self.prior.encode(inputs, model.mean)
        points, near, plan = list(torch.zeros_like(truths)), 1.0, []
        for _ in range(self.attack.iterations):
            posteriors = (model.posterior(each, release, own, near) for each, own in zip(rehearsals, points, strict=True))
            tried = torch.stack([torch.stack([each.mean(strength).point for strength in STRENGTHS]) for each in posteriors])
            wrong = torch.stack([self._wrong(each, own, model.mean) for each, own in zip(tried, inputs, strict=True)]).mean(0)
            best = int(torch.nan_to_num(wrong, nan=float("inf")).argmin())
            plan.append((STRENGTHS[best], near))
            points = list(tried[:, best])
            near = float((tried[:, best] - truths).square().mean().sqrt().clamp(*NEAREST))
        return tuple(plan)

    def _wrong(self, points: Tensor, truth: Tensor, mean: Tensor) -> Tensor:
        """Return the mean squared error of each of several estimates (S, B, r) of a batch."""
        found = torch.stack([self.prior.decode(point, mean).clamp(0, 1) for point in points])
        return (found - truth).square().flatten(1).mean(1).double()
