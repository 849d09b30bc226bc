"""The attacker no author can switch off: a regression from what public records send through the client to the records."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.adversary import with_prefix
from gradveil.attacks.adaptive import SIMULATED
from gradveil.attacks.base import ATTACKS, Attack, AttackCard, AttackContext, Cost, PublicRecords
from gradveil.attacks.engine.affordable import halved, seconds_of
from gradveil.attacks.engine.client_runs import run_clients
from gradveil.attacks.engine.execution import chunk_size
from gradveil.attacks.engine.label_belief import label_hypotheses
from gradveil.attacks.engine.public_batches import FOLDS, PublicBatches, by_brightness, public_batches
from gradveil.attacks.engine.regression import Regression, fit_regression
from gradveil.attacks.engine.sketches import ENTRIES, Sketcher
from gradveil.attacks.generic.probe import MOST_ENTRIES, raw_updates
from gradveil.errors import UsageError
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.study.checks import check_number, check_whole
from gradveil.tensors import Named, stack

__all__ = ["KernelRegression"]

LEAST = 16
"""Releases of a label with which anything is learned at all."""
OF_ALL = 3
"""Times as long as the releases of one label the releases of all labels may take."""
OF_BATCHES = 2
"""Hypotheses about the labels of a batch that are tried: every multiset of labels needs releases of its own."""
FIRST_DRAW = 20_000_000
"""Draws of the client's randomness beyond those that searches and readers of labels make."""
KEPT = 2**26
"""Numbers of what was learned that stay in memory, half a gigabyte at most; what came first goes first."""
MOST_VALUES = 2**24
"""Numbers in all public batches of a label; of large inputs and batches fewer are sent."""
SAME = 1e-12
"""Variance of public records that are all the same."""


@ATTACKS.register(
    AttackCard(
        name="kernel_regression",
        summary="Sends public records through the same client and regresses pictures from what arrives: no search, no author.",
        cost="a few hundred runs of the client for each label, and two matrices of that size: seconds for all updates together",
        weakness="a straight line from update to picture, learned from few records: deep or trained networks bend it, strong "
        "noise drowns it, and what public records lack it cannot draw",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES, Knowledge.PUBLIC_DATA}),
        home="sigmoid LeNet, default initialisation, one 3×16×16 picture, 128 public pictures of one photograph",
        floor_psnr=18.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class KernelRegression(Attack):
    """``x = mu + k(g) (G + lambda I)^-1 (X - mu)``: ridge regression from decoded updates g of public records X to the records.

    G is the Gram matrix of the releases about their mean, k(g) their inner products with the one under attack, mu the mean of the
    public records. For Gaussian records and a client that is linear this is the posterior mean. It asks for no slope and no
    description of the defense, so it runs for any defense, random or not differentiable, any batch, several local steps, sums
    over clients, and embeddings; updates of several rounds are joined to one.

    Each plausible label (`gradveil.attacks.engine.label_belief`) has a fit of its own, which all updates of the client share: of
    public records with that label, and, where these are too few, of others sent with it. For a batch these are batches with the
    same labels in the same order; of equal labels pictures are told apart by their brightness, on both sides. A random defense
    draws anew for every release, or its noise would cancel between releases; a record can be sent several times. How entries
    are weighed and the strength lambda are chosen on releases left out (`gradveil.attacks.engine.regression`), never on an update
    under attack. Of large networks each release is kept as a sketch.

    Stances: ``plain`` sends public records through the client without its defense. ``simulated`` runs the defended client's
    own code. It is a stance of its own: ``averaged`` and ``straight_through`` correct a replay by what the code does near the
    candidate, and ``learned`` runs only where a probe recommends it, while this needs nothing but the code, which the author
    wrote for clients.

    Departs from the paper: there is none; learning the inverse from a client's updates is as in Learning to Invert (Wu et al.
    2023), with a ridge in place of a network. Cost: ``records`` runs of the client a label, fewer where the client is dear; two
    Gram matrices of as many rows. Known weakness: linear; blind to what public records lack.

    ``first_loss`` is the mean squared error on records left out of who answers with the mean of the others, ``best_loss`` that of
    the regression, both over the former; ``gradient_norm`` is how far the update moved the answer from the mean.

    Attributes:
        records: Releases a label, at most; halved until they take no more than ``seconds``.
        draws: Releases of every record where the defense is random; more pictures teach more than more draws of each.
        seconds: What the releases of one label may take; those of all labels may take three times as long.
        stance: ``plain`` or ``simulated``.
    """

    card: ClassVar[AttackCard]
    records: int = 400
    draws: int = 1
    seconds: float = 20.0
    stance: str = "plain"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_whole("kernel_regression", "records", self.records, LEAST)
        check_whole("kernel_regression", "draws", self.draws, 1)
        check_number("kernel_regression", "seconds", self.seconds, open_below=True)
        if self.stance not in self.stances:
            raise UsageError(f"kernel_regression has no stance {self.stance!r}; it takes {', '.join(self.stances)}")

    @property
    def stances(self) -> tuple[str, ...]:
        """Without the defense, or through the defended client."""
        return ("plain", SIMULATED)

    def cost(self) -> Cost:
        """Return one look; what releases take is spent once a label."""
        return Cost(per_label=True)

    def lacks(self, observation: Observation, context: AttackContext) -> str | None:
        """Return what is missing, unless there are public records that fit, and a client to send them through."""
        if self.stance == SIMULATED and context.simulate is None:
            return "there is no defended client to run; hand it in as the context's `simulate`"
        return _unfit(context.public, observation)

    def hypotheses(self, observation: Observation, context: AttackContext) -> int:
        """Return the number of labels that are tried."""
        return len(self._labels(observation, context))

    def _labels(self, observation: Observation, context: AttackContext) -> Tensor:
        found = label_hypotheses(observation, self.stance, context)
        return found if observation.examples == 1 else found[:OF_BATCHES]

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Fit every label that is plausible for some update, and answer for the updates it is plausible for."""
        wanted: dict[Hashable, list[tuple[int, int, Tensor]]] = {}
        for target, observation in enumerate(observations):
            for place, labels in enumerate(self._labels(observation, context)):
                told = tuple(labels.tolist()) if _told_by_labels(observation) else None
                wanted.setdefault(told, []).append((target, place, labels))
        client = _Client(self, observations[0], context, self.seconds * min(1.0, OF_ALL / len(wanted)))
        found = []
        for key, asked in wanted.items():
            fit = client.fit(asked[0][2] if key is not None else None)
            seen = client.features([observations[target] for target, _, _ in asked])
            answers = fit.predict(seen)
            for (target, place, labels), answer in zip(asked, answers, strict=True):
                found.append(self._answer(observations[target], target, place, labels, fit, answer))
                if context.progress is not None:
                    context.progress(1)
        return sorted(found, key=lambda each: (each.target, each.hypothesis))

    def _answer(
        self, seen: Observation, target: int, place: int, labels: Tensor, fit: Regression, answer: Tensor
    ) -> Reconstruction:
        reference = next(iter(seen.update.weights.values()))
        unit = max(fit.spread, SAME)
        return Reconstruction(
            inputs=answer.reshape(seen.examples, *seen.input_shape).to(reference),
            targets=labels,
            recipe=self.card.name,
            target=target,
            stance=self.stance,
            first_loss=fit.spread / unit,
            best_loss=fit.error / unit,
            gradient_norm=float((answer - fit.mean).norm()),
            oracle_labels=seen.labels is not None and Knowledge.LABELS in seen.threat.knows,
            hypothesis=place,
        )


def _told_by_labels(observation: Observation) -> bool:
    """Whether labels are classes on which what is sent depends."""
    learner = observation.learner
    embedding = isinstance(learner, EmbeddingLearner) and learner.top is None
    return observation.classes > 0 and not embedding


@dataclass
class _Client:
    """The client as one attacker sends public records through it."""

    attack: KernelRegression
    seen: Observation
    context: AttackContext
    seconds: float

    def __post_init__(self) -> None:
        assert self.context.public is not None  # `lacks` has checked
        self.public = self.context.public
        self.sketcher = Sketcher.of(_joined([update.weights for update in self.seen.updates]), ENTRIES)

    def features(self, observations: Sequence[Observation]) -> Tensor:
        """Return (T, D) what was seen."""
        return self.sketcher.rows(stack([_joined([update.weights for update in each.updates]) for each in observations]))

    def fit(self, labels: Tensor | None) -> Regression:
        """Return the regression for these labels, learned once for all attackers of this kind."""
        learners = tuple(learner.content for learner in self.seen.learners)
        settings = self.seen.learner.settings, self.seen.examples, repr(self.attack)
        told = None if labels is None else tuple(labels.tolist())
        memory = self.context.memory.setdefault("regressions", {})
        key = (learners, settings, told, id(self.public.inputs))
        if key not in memory:
            # The public records stay beside what was learned of them, or others could get their identity.
            memory[key] = (self._fit(labels), self.context.public)
            while len(memory) > 1 and sum(fit.entries for fit, _ in memory.values()) > KEPT:
                del memory[next(iter(memory))]
        found: Regression = memory[key][0]
        return found

    def _fit(self, labels: Tensor | None) -> Regression:
        draws = self.attack.draws if self._random else 1
        count = halved(self.attack.records, LEAST, self._cost(labels), self.seconds)
        most = MOST_VALUES // (self.seen.examples * math.prod(self.seen.input_shape) * draws)
        batches = self._batches(labels, max(LEAST, min(count // draws, most)))
        device = self.seen.learner.device
        inputs = batches.inputs.to(self.reference).repeat_interleave(draws, 0)
        targets = batches.targets.to(device).repeat_interleave(draws, 0)
        features = self._send(inputs, targets)
        # Records of an embedding stand where they stood; in an update nothing tells the order of equal labels.
        known = labels is None or self.seen.examples == 1 or isinstance(self.seen.learner, EmbeddingLearner)
        pictures = inputs if known or labels is None else by_brightness(inputs, labels.to(device))
        folds = batches.folds.to(device).repeat_interleave(draws, 0)
        return fit_regression(features, pictures.flatten(1), folds, self.sketcher.parts)

    @property
    def reference(self) -> Tensor:
        """A tensor on the client's device and in its precision."""
        return next(iter(self.seen.learner.weights.values()))

    @property
    def _random(self) -> bool:
        return self.attack.stance == SIMULATED and self.context.random_defense

    def _batches(self, labels: Tensor | None, count: int) -> PublicBatches:
        seed = self.context.seed.child("kernel regression")
        return public_batches(self.public, labels, self.seen.examples, count, seed)

    def _cost(self, labels: Tensor | None) -> float:
        """Return the seconds that one release takes, measured once for a client."""
        key = ("seconds of a release", self.attack.stance)
        if key not in self.context.memory:
            few = self._batches(labels, 1)
            inputs, targets = few.inputs.to(self.reference), few.targets.to(self.reference.device)
            self.context.memory[key] = seconds_of(lambda place: self._some(inputs, targets, place))
        found: float = self.context.memory[key]
        return found

    def _send(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return (R, D) releases as rows, a few at a time, since each is as large as the network."""
        few = 1 if self._random else self._together(inputs)
        pieces = zip(inputs.split(few), targets.split(few), strict=True)
        return torch.cat([self._some(x, y, few * place) for place, (x, y) in enumerate(pieces)])

    def _together(self, inputs: Tensor) -> int:
        learner, rounds = self.seen.learner, len(self.seen.learners)
        few = MOST_ENTRIES // max(1, learner.parameters * rounds)
        if inputs.device.type == "cuda":  # where one at a time would leave most of it idle
            few = max(few, chunk_size(inputs.device, learner.parameters * rounds, len(inputs), inputs.shape[1]))
        return max(1, few)

    def _some(self, inputs: Tensor, targets: Tensor, draw: int) -> Tensor:
        if self.attack.stance == SIMULATED:
            sent = run_clients(self.context, inputs, targets, FIRST_DRAW + draw)
        else:
            sent = tuple(raw_updates(learner, inputs, targets) for learner in self.seen.learners)
        return self.sketcher.rows(_joined(list(sent)))


def _joined(rounds: Sequence[Named]) -> Named:
    """Return the updates of all rounds as one set of tensors."""
    found: Named = {}
    for index, weights in enumerate(rounds):
        found |= with_prefix(weights, f"{index}|")
    return found


def _unfit(public: PublicRecords | None, seen: Observation) -> str | None:
    """Return why public records are of no use for what is attacked; None where they are."""
    if public is None:
        return "there are no public records to learn from; hand some in as the context's `public`"
    shape, count = tuple(public.inputs.shape[1:]), len(public.inputs)
    if shape != tuple(seen.input_shape):
        return f"public records have the shape {shape}, records under attack {tuple(seen.input_shape)}; bring them to one"
    if count < max(LEAST, FOLDS * seen.examples):
        return f"{count} public records are too few to learn from; hand in at least {max(LEAST, FOLDS * seen.examples)}"
    low, high = float(public.inputs.min()), float(public.inputs.max())
    if not (low >= 0 and high <= 1):
        return f"public records lie in [{low:.3g}, {high:.3g}], and inputs in [0, 1]; scale them"
    if float(public.inputs.double().var(0).mean()) < SAME:
        return "public records are all the same, and nothing can be learned from them; hand in different ones"
    return None
