"""Maximum a posteriori under a linear prior from public records: a search over the prior's coordinates, from its mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.adversary import prefixed, with_prefix
from gradveil.attacks.adaptive import DRAWS, REFRESH_EVERY, STANCES
from gradveil.attacks.base import ATTACKS, Attack, AttackCard, AttackContext, Cost
from gradveil.attacks.engine.execution import COARSE_FROM, Execution, choose_execution
from gradveil.attacks.engine.label_belief import label_hypotheses
from gradveil.attacks.engine.loop import Problem, Refresh, optimise
from gradveil.attacks.engine.matrix_convolution import quicker
from gradveil.attacks.engine.optimisers import LBFGS
from gradveil.attacks.generic.probe import MOST_ENTRIES
from gradveil.attacks.generic.stances import renewed, renewing_of
from gradveil.attacks.linear_evidence import Evidence, at_once, entries, evidence_of, held_batches, values
from gradveil.attacks.linear_noise import Release, learn_release, spread_of
from gradveil.attacks.pca_prior import LinearPrior, prior_for, refused
from gradveil.errors import UsageError
from gradveil.learning.autograd import one_at_a_time
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.study.checks import check_flag, check_whole
from gradveil.tensors import Named, matrix_products

__all__ = ["LinearMap"]

SETTLED = 0.9
"""Share of the steps after which what is read off the dummies is held, so that losses can be compared."""
FEWEST = 4
"""Public records on which what lies outside the directions is measured, however large the network."""
ROUNDING = 1e-10
"""Variance that is never doubted away, as a share of the signal's in a tensor."""
WEIGHT, GAIN, SHIFT, UNKNOWN = "weight/", "gain/", "shift/", "unknown/"


@ATTACKS.register(
    AttackCard(
        name="linear_map",
        summary="Searches the coordinates of a prior from public records for the likeliest input behind what is shared.",
        cost="as many evaluations as steps, like any search with one restart, and two replays of the client for each of some "
        "public records and each label",
        weakness="what public records lack it cannot draw; a search from one start, which the kinks of a client can stop",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES, Knowledge.PUBLIC_DATA}),
        home="sigmoid LeNet, default initialisation, one 3×16×16 picture, 400 public pictures of one photograph, 200 steps",
        floor_psnr=24.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class LinearMap(Attack):
    """Minimise ``sum_i rho_i(mu + V diag(s) z)² / 2 c_i + |z|² / 2`` over z by L-BFGS, from z = 0.

    mu, V and s are mean, principal directions and deviations of public records (`gradveil.attacks.pca_prior`); rho is what the
    adversary model of the stance would simulate minus what was seen, after masks and projections. The variance c_i of an entry
    is that of the known noise, or of what the client's code is seen to do to public records beyond what comparing undoes
    (`gradveil.attacks.linear_noise`, with the gain it leaves), plus what inputs outside the directions do to it: the mean square,
    over held-out public records x, of rho(x) - rho(mu + V Vᵀ(x - mu)), drawn towards that of its tensor. So nothing is
    forgotten, and noise lowers the weight of the update against the prior as far as it should. The defense's unknowns are
    searched for too.

    Every plausible label is searched with, as in other searches. In stances that renew offsets or weights from the dummies these
    are held for the last tenth of the steps, of which the best is kept.

    Departs from the paper: there is none to depart from; for a linear client with Gaussian noise and inputs the minimum is the
    posterior mean. c_i leaves out how errors of entries go together, and the box [0, 1] is left to the end.

    Cost: ``steps`` evaluations per target and label. Known weakness: linear in what it draws; stops at kinks and in the valleys
    of networks that are far from straight; the examples of a batch start alike, apart by a hundredth.

    Attributes:
        rank: Directions of the prior, at most: many, since coordinates cost a search nothing and unlikely ones stay small.
        steps: Evaluations per candidate.
        errors: Held-out public records on which what lies outside the directions is measured.
        rehearsals: Held-out public records sent through the client where its noise is not known.
        by_class: Begin at the mean of the label's class where public records have enough of it.
        stance: How the defense is treated.
    """

    card: ClassVar[AttackCard]
    rank: int = 1024
    steps: int = 400
    errors: int = 64
    rehearsals: int = 32
    by_class: bool = True
    stance: str = "plain"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        for name, least in (("rank", 1), ("steps", 1), ("errors", 2), ("rehearsals", 3)):
            check_whole("linear_map", name, getattr(self, name), least)
        check_flag("linear_map", "by_class", self.by_class)

    @property
    def stances(self) -> tuple[str, ...]:
        """All of them."""
        return STANCES

    def lacks(self, observation: Observation, context: AttackContext) -> str | None:
        """Return what is missing, unless there are public records that teach something."""
        return refused(lambda: prior_for(observation, context, self.rank, by_class=self.by_class, name=self.card.name))

    def cost(self) -> Cost:
        """Return its steps, and how often the client is run for what is renewed."""
        runs = {"averaged": DRAWS + 1, "straight_through": 2, "robust": 1}.get(self.stance, 0)
        return Cost(self.steps, 1, runs / REFRESH_EVERY)

    def hypotheses(self, observation: Observation, context: AttackContext) -> int:
        """Return the number of plausible labels."""
        return len(label_hypotheses(observation, self.stance, context))

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Search for all updates with all their plausible labels at once."""
        learner = observations[0].learner
        with matrix_products(learner.device, coarse=learner.parameters >= COARSE_FROM):
            return self._run(observations, context)

    def _run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        first = observations[0]
        prior = prior_for(first, context, self.rank, by_class=self.by_class, name=self.card.name)
        places = [
            (index, hypothesis, labels)
            for index, observation in enumerate(observations)
            for hypothesis, labels in enumerate(label_hypotheses(observation, self.stance, context))
        ]
        rows = [self._row(observations[index], labels, prior, context) for index, _, labels in places]
        leaves = {name: torch.stack([row[0][name] for row in rows]) for name in rows[0][0]}
        constants = _stacked([row[1] for row in rows])
        steps, count = context.steps(self.steps), len(rows)
        device, parameters = prior.means.device, first.learner.parameters
        execution = choose_execution(context.execution, device, parameters, count, first.examples, steps)
        learners = tuple(quicker(learner, first.input_shape) for learner in first.learners)
        if execution.mode == "looped":
            learners = tuple(one_at_a_time(learner) for learner in learners)
        template = evidence_of(first.replace(learners=learners), self.stance, context)
        problem = Problem(
            loss=_loss(template, prior),
            leaves=leaves,
            constants=constants,
            refresh=_refresh(template, prior, first, context, steps),
            tracks=_tracks(template, context, steps),
        )
        outcome = optimise(problem, LBFGS(), steps, execution, progress=context.progress)
        # With what the end renewed, on both sides, and without the prior: whether the likelihood moved tells a search that works.
        ends = constants | _renew(template, first, outcome.leaves, constants, prior, context, steps - 1)
        slopes, first_loss = _measured(template, prior, leaves, ends, execution)
        _, best_loss = _measured(template, prior, outcome.leaves, ends, execution)
        return [
            Reconstruction(
                inputs=prior.decode(outcome.leaves["coordinates"][row], constants["mean"][row]),
                targets=labels,
                recipe=self.card.name,
                target=index,
                stance=self.stance,
                variables={n: v[row] for n, v in prefixed(outcome.leaves, UNKNOWN).items()},
                first_loss=float(first_loss[row]),
                best_loss=float(best_loss[row]),
                gradient_norm=float(slopes[row]),
                steps=int(outcome.steps[row]),
                status=outcome.status[row],
                oracle_labels=observations[index].labels is not None and Knowledge.LABELS in observations[index].threat.knows,
                hypothesis=hypothesis,
            )
            for row, (index, hypothesis, labels) in enumerate(places)
        ]

    def _row(self, seen: Observation, labels: Tensor, prior: LinearPrior, context: AttackContext) -> tuple[Named, Named]:
        """Return the start of one candidate and what it is compared with."""
        evidence, mean = evidence_of(seen, self.stance, context), prior.mean_of(labels)
        start = mean.new_zeros((len(labels), prior.rank))
        if len(labels) > 1:  # equal labels would stay equal for ever
            generator = context.seed.child(self.card.name).generator("start")
            start = 0.01 * torch.randn(start.shape, generator=generator).to(start)
        release = self._release(evidence, labels, prior, context)
        pairs = self._pairs(evidence, labels, prior, context)
        constants: Named = {"mean": mean, "labels": labels}
        for index, own in enumerate(evidence.seen):
            constants |= with_prefix(own, f"{index}|")
        constants |= with_prefix(self._weights(evidence, release, pairs), WEIGHT)
        constants |= with_prefix(release.gain, GAIN) | with_prefix(release.shift, SHIFT)
        return {"coordinates": start} | with_prefix(evidence.variables, UNKNOWN), constants

    def _weights(self, evidence: Evidence, release: Release, pairs: Sequence[tuple[Named, Named]]) -> Named:
        """Return 1 / c of every entry."""
        inside, apart = [], []
        for real, drawn in pairs:
            left, right = vmap(evidence.residuals)(real), vmap(evidence.residuals)(drawn)
            inside.append(release.scaled(right))
            apart.append(release.scaled({n: v - right[n] for n, v in left.items()}))
        joined = [{n: torch.cat([each[n] for each in many]) for n in many[0]} for many in (inside, apart)]
        whole = torch.stack([torch.isfinite(v.reshape(len(v), -1)).all(1) for many in joined for v in many.values()])
        finite = whole.all(0)
        if not bool(finite.any()):
            raise UsageError("what the client produces from public records is not finite; look at the model's weights")
        weights = {}
        for name in inside[0]:
            within = joined[0][name][finite]
            signal = (within - within.mean(0)).square().mean()
            least = ROUNDING * signal + (4 * torch.finfo(within.dtype).eps) ** 2 * within.square().mean()
            error = spread_of(joined[1][name][finite]) + release.error(name) + least
            weights[name] = 1 / error.clamp_min(torch.finfo(within.dtype).tiny ** 0.5)
        return weights

    def _pairs(self, evidence: Evidence, labels: Tensor, prior: LinearPrior, context: AttackContext) -> list[tuple[Named, Named]]:
        """Return what the client produces from held-out public records, and from what the prior can draw of them."""
        observation, mean = evidence.observation, prior.mean_of(labels)
        count = max(FEWEST, min(self.errors, len(prior.held) - _rehearsing(prior), MOST_ENTRIES // max(1, entries(observation))))

        def both(batch: Tensor) -> Named:
            drawn = prior.decode(prior.encode(batch, mean), mean)
            whole, part = evidence.simulate(batch, labels), evidence.simulate(drawn, labels)
            return with_prefix(whole, "whole/") | with_prefix(part, "part/")

        def make() -> list[tuple[Named, Named]]:
            found = values(both, held_batches(prior, len(labels), 0, count), max(1, at_once(evidence, mean) // 2))
            return [(prefixed(each, "whole/"), prefixed(each, "part/")) for each in found]

        key = ("linear_map pairs", *_client(evidence, prior), count, *_told(labels))
        if entries(observation) * count > MOST_ENTRIES:
            return make()
        # Of the last labels alone: a client of many classes would fill the memory.
        last = context.memory.get("linear_map pairs")
        if last is None or last[0] != key:
            last = context.memory["linear_map pairs"] = (key, prior, make())
        pairs: list[tuple[Named, Named]] = last[2]
        return pairs

    def _release(self, evidence: Evidence, labels: Tensor, prior: LinearPrior, context: AttackContext) -> Release:
        """Return what arrives of updates with these labels; who renews offsets or weights has that already."""
        if renewing_of(evidence.adversary, context) is not None:
            return Release()
        key = ("linear_map release", self.stance, *_client(evidence, prior), self.rehearsals, *_told(labels))
        if key not in context.memory:
            inputs = held_batches(prior, len(labels), len(prior.held) - _rehearsing(prior), self.rehearsals)
            context.memory[key] = (prior, learn_release(evidence.observation, context, self.stance, inputs, labels))
        release: Release = context.memory[key][1]
        return release


def _stacked(rows: Sequence[Named]) -> Named:
    """Stack what candidates are compared with; with labels for which everything arrives gains are one."""
    found: Named = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        other = WEIGHT + name.removeprefix(GAIN).removeprefix(SHIFT)
        makes = torch.ones_like if name.startswith(GAIN) else torch.zeros_like
        found[name] = torch.stack([row[name] if name in row else makes(row[other]) for row in rows])
    return found


def _rehearsing(prior: LinearPrior) -> int:
    return max(1, len(prior.held) // 4)


def _client(evidence: Evidence, prior: LinearPrior) -> tuple[object, ...]:
    learners = tuple((learner.content, learner.settings) for learner in evidence.observation.learners)
    return id(prior), learners, repr(evidence.adversary)


def _told(labels: Tensor) -> tuple[object, ...]:
    return tuple(labels.shape), tuple(labels.flatten().tolist())


def _loss(template: Evidence, prior: LinearPrior) -> Callable[[Named, Named], Tensor]:
    misfit = _misfit(template, prior)

    def loss(leaves: Named, constants: Named) -> Tensor:
        variables = prefixed(leaves, UNKNOWN)
        total = misfit(leaves, constants) + leaves["coordinates"].square().sum() / 2
        return total + template.adversary.penalty(variables) if variables else total

    return loss


def _misfit(template: Evidence, prior: LinearPrior) -> Callable[[Named, Named], Tensor]:
    """Return the negative log-likelihood alone."""
    rounds = range(len(template.seen))

    def misfit(leaves: Named, constants: Named) -> Tensor:
        variables, coordinates = prefixed(leaves, UNKNOWN), leaves["coordinates"]
        evidence = replace(template, seen=tuple(prefixed(constants, f"{r}|") for r in rounds), variables=variables)
        simulated = evidence.simulate(prior.decode(coordinates, constants["mean"]), constants["labels"])
        comparison = evidence.compare(simulated)
        release = Release(gain=prefixed(constants, GAIN), shift=prefixed(constants, SHIFT))
        weight, found = prefixed(constants, WEIGHT), release.shifted(comparison.residuals(), comparison.simulated)
        return torch.stack([(v.square() * weight[n]).sum() for n, v in found.items()]).sum() / 2

    return misfit


def _measured(
    template: Evidence, prior: LinearPrior, leaves: Named, constants: Named, execution: Execution
) -> tuple[Tensor, Tensor]:
    """Return, per candidate, the norm of the slope and the value of the likelihood alone."""
    misfit, points = _misfit(template, prior), leaves["coordinates"]
    others = with_prefix({n: v for n, v in leaves.items() if n != "coordinates"}, "leaf|")

    def one(row: Tensor, rest: Named) -> Tensor:
        own = {"coordinates": row.reshape(points.shape[1:]), **prefixed(rest, "leaf|")}
        return misfit(own, prefixed(rest, "constant|"))

    slopes, values = execution.once().prepare(one)(points.flatten(1), others | with_prefix(constants, "constant|"))
    return slopes.norm(dim=1), values


def _renew(
    template: Evidence, first: Observation, leaves: Named, constants: Named, prior: LinearPrior, context: AttackContext, step: int
) -> Named:
    """Return offsets or weights as the dummies ask for them; nothing where the stance has none."""
    renewing = renewing_of(template.adversary, context)
    if renewing is None:
        return {}
    inputs = vmap(prior.decode)(leaves["coordinates"], constants["mean"])
    return renewed(renewing, first.learners, {"inputs": inputs}, constants, context, step)


def _refresh(template: Evidence, prior: LinearPrior, first: Observation, context: AttackContext, steps: int) -> Refresh | None:
    """Return what renews constants before a step, or None where the stance has nothing to renew."""
    if renewing_of(template.adversary, context) is None:
        return None

    def refresh(step: int, leaves: Named, constants: Named) -> Named:
        if step % REFRESH_EVERY or step > SETTLED * steps:
            return constants
        return constants | _renew(template, first, leaves, constants, prior, context, step)

    return refresh


def _tracks(template: Evidence, context: AttackContext, steps: int) -> Callable[[int], bool] | None:
    """Losses are comparable once nothing is renewed any more."""
    if renewing_of(template.adversary, context) is None:
        return None
    last = REFRESH_EVERY * math.floor(SETTLED * steps / REFRESH_EVERY)
    return lambda step: step >= last
