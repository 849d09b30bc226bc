"""Which labels are plausible, how sure that is, and so with which labels a search should run.

A plain attacker reads one label off the update and knows no better. One who knows the defense and finds the last layer touched
learns from releases of its own making: public pictures with every label, sent through the defended client. Two looks at them
are put together by one small model whose sureness is that on releases held out (`gradveil.attacks.engine.label_rows`): how the
row of each class looks beside the others, and, where that is not enough, how near the whole release is to those made with each
label. A bias that arrived as it was says its label without any of this, and costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.label_counts import plausible_counts
from gradveil.attacks.engine.label_rows import RowModel, features_of_rows, fit_counts, fit_rows, places_of, standardised
from gradveil.attacks.engine.labels import (
    as_labels,
    classifier_layer,
    label_scores,
    largest_remainders,
    mean_prediction,
    plainly_certain,
    recover_labels,
    wanted_counts,
)
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.records import Knowledge, Observation

__all__ = ["LOOKED_AT", "MOST_HYPOTHESES", "Belief", "informed_belief", "label_hypotheses", "uses_labels_of_defense"]

T = TypeVar("T")

SURE = 0.99
MOST_HYPOTHESES = 8
RELEASES = 64
"""Simulated releases that teach what a label's row looks like; fewer where rows are so large that they would fill the memory."""
MOST_ROW_ENTRIES = 2**25
LEAST_RELEASES = 16
MOST_CLASSES = 1024
"""With more classes, releases of every class are not made: rows alone tell."""
WITH_EACH = 192
"""Releases over all classes together, where there are few of them; with each class at least two, to hold one out."""
MOST_PICTURES = 8
SKETCH = 1024
"""Entries of each tensor that stand for it when releases are compared."""
TINY = 1e-300
LOOKED_AT = 8
"""Releases that must bear out that a bias which looks untouched is."""
FIRST_DRAW = 10_000_000
"""Draws of the client's randomness beyond those that searches make."""


@dataclass(frozen=True)
class Belief:
    """What is known about the labels of one update.

    Attributes:
        hypotheses: (H, B) labels in the order of `as_labels`, the most probable first.
        probabilities: (H,) of those among everything considered; together at least 0.99 where that fits into the cap.
    """

    hypotheses: Tensor
    probabilities: Tensor

    @property
    def best(self) -> Tensor:
        """The most probable labels."""
        return self.hypotheses[0]

    @classmethod
    def certain(cls, labels: Tensor) -> Belief:
        """Return the belief that nothing else is possible."""
        return cls(labels[None], torch.ones(1, dtype=torch.float64, device=labels.device))


def uses_labels_of_defense(stance: str, observation: Observation) -> bool:
    """Whether an attacker of this stance may use what the defense lets it know about labels."""
    return stance != "plain" and Knowledge.DEFENSE in observation.threat.knows


def label_hypotheses(observation: Observation, stance: str, context: AttackContext) -> Tensor:
    """Return (H, B) labels to search with, the most probable first: those given, one plain reading, or all plausible ones."""
    if Knowledge.LABELS in observation.threat.knows and observation.labels is not None:
        return observation.labels[None]
    if not uses_labels_of_defense(stance, observation):
        return recover_labels(observation)[None]
    return informed_belief(observation, context).hypotheses


def informed_belief(observation: Observation, context: AttackContext, *, ask_author: bool = True) -> Belief:
    """Return what an attacker who can run the defended client believes about the labels.

    Cost: eight updates of the client where the last bias arrived as it was; else up to 64 more and, where rows do not tell, two
    per class (about 192 in all with few classes), once for all updates of one client.

    Args:
        observation: What was seen.
        context: Its ``simulate`` is used; without one, what the defense's attacker reads off is believed.
        ask_author: Whether the defense's own attacker is asked too.
    """
    if observation.classes == 0 or isinstance(observation.learner, EmbeddingLearner):
        return Belief.certain(recover_labels(observation))
    alone = observation.clearest
    told, certain = label_scores(observation, informed=ask_author), plainly_certain(alone)
    if told is None or context.simulate is None:
        ask = ask_author and not certain
        return Belief.certain(recover_labels(observation if ask else alone, informed=ask))
    lessons = _simulated(observation, context)
    if certain and lessons.plain_is_right():
        return Belief.certain(recover_labels(alone))
    if observation.examples > 1:
        return lessons.belief_in_counts(alone)
    device = next(iter(alone.update.weights.values())).device
    belief = _narrowed(lessons.by_rows(alone, ask_author=ask_author).to(device))
    if len(belief.hypotheses) == 1 or observation.classes > MOST_CLASSES:
        return belief
    return _narrowed(lessons.by_releases(alone, ask_author=ask_author).to(device))


def _narrowed(log_probabilities: Tensor) -> Belief:
    """Return the smallest set of labels that holds 99 %, or as many as the cap allows."""
    ordered = log_probabilities.sort(descending=True, stable=True)
    cumulative = ordered.values.exp().cumsum(0)
    count = min(int((cumulative < SURE).sum()) + 1, MOST_HYPOTHESES, len(cumulative))
    return Belief(ordered.indices[:count, None], ordered.values[:count].exp())


def _simulated(observation: Observation, context: AttackContext) -> _Simulated:
    """Return what was learned of this client, which serves every update of it."""
    adversary, learner = observation.adversary, observation.learner
    settings = (observation.examples, learner.settings, observation.input_shape, observation.classes)
    key = ("labels", learner.content, repr(adversary), len(observation.updates), *settings)
    if key not in context.memory:
        context.memory[key] = _Simulated(observation, context)
    found = context.memory[key]
    assert isinstance(found, _Simulated)
    return found


@dataclass(frozen=True)
class _Row:
    """How the last layer of one release looks: (C, K) features of its rows, and its bias."""

    features: Tensor
    bias: Tensor | None


class _Simulated:
    """Releases of the attacker's own making, and what they teach; made when first asked for."""

    def __init__(self, observation: Observation, context: AttackContext) -> None:
        self._seen, self._context = observation, context
        self._learner = observation.clearest.learner
        self._round = next(i for i, learner in enumerate(observation.learners) if learner is self._learner)
        self._layer = classifier_layer(observation.update.weights, observation.classes) or ""
        self._prediction = mean_prediction(observation.clearest)
        self._pictures = _pictures(observation)
        self._read = observation.adversary.arrives(observation.clearest).label_evidence
        self._known: dict[object, Any] = {}

    def _once(self, name: object, make: Callable[[], T]) -> T:
        if name not in self._known:
            self._known[name] = make()
        found: T = self._known[name]
        return found

    def _release(self, start: int, labels: Tensor, draw: int) -> Observation:
        """Send public pictures with these labels through the client."""
        rows = torch.arange(start, start + len(labels)) % len(self._pictures)
        assert self._context.simulate is not None
        sent = self._context.simulate(self._pictures[rows], labels.to(self._pictures.device), FIRST_DRAW + draw)[self._round]
        update = dataclasses.replace(self._seen.updates[self._round], weights=sent)
        return self._seen.clearest.replace(updates=(update,))

    def plain_is_right(self) -> bool:
        """Whether a bias that leaves no doubt tells the label, in a few releases whose labels are known."""
        return self._once("plain", self._look)

    def _look(self) -> bool:
        labels = torch.randint(self._seen.classes, (LOOKED_AT, 1), generator=torch.Generator().manual_seed(0))
        for index, own in enumerate(labels):
            sent = self._release(index, own, index)
            if plainly_certain(sent) and int(recover_labels(sent)) != int(own):
                return False
        return True

    # One example: which row is the label's.

    def by_rows(self, observation: Observation, *, ask_author: bool) -> Tensor:
        """Return (C,) log-probabilities from the rows of the last layer."""
        model = self._once(("rows", ask_author), lambda: self._fit_rows(ask_author))
        return model.log_posterior(self._features(self._row(observation), ask_author))

    def _fit_rows(self, ask_author: bool) -> RowModel:
        releases, labels = self._releases()
        features = torch.stack([self._features(self._row(each), ask_author) for each in releases])
        return fit_rows(features, labels, range(len(labels)))

    def _releases(self) -> tuple[list[Observation], Tensor]:
        """Return releases of one example each with labels drawn at random; of their tensors, the last layer's alone."""
        return self._once("releases", self._make_releases)

    def _make_releases(self) -> tuple[list[Observation], Tensor]:
        size = math.prod(self._seen.updates[self._round].weights[self._layer].shape)
        count = max(LEAST_RELEASES, min(RELEASES, MOST_ROW_ENTRIES // size))
        examples = self._seen.examples
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(self._seen.classes, (count, examples), generator=generator)
        sent = [self._release(index * examples, own, index) for index, own in enumerate(labels)]
        return [self._last_layer(each) for each in sent], labels[:, 0] if examples == 1 else labels

    def _last_layer(self, observation: Observation) -> Observation:
        keep = (self._layer, self._layer.removesuffix("weight") + "bias")
        update = observation.update
        return observation.replace(updates=(update.replace(weights={n: update.weights[n] for n in keep if n in update.weights}),))

    def _direction(self) -> Tensor:
        return self._once("direction", self._find_direction)

    def _find_direction(self) -> Tensor:
        """Return the unit vector along which rows of present classes stand out of the others, in the mean over releases."""
        releases, labels = self._releases()
        total = torch.zeros_like(releases[0].update.weights[self._layer][0].flatten(), dtype=torch.float64)
        for each, own in zip(releases, labels, strict=True):
            weight = each.update.weights[self._layer].double().flatten(1)
            rows = own.reshape(-1) if self._seen.examples == 1 else self._places()[own]
            apart = weight[rows.to(weight.device)].mean(0) - weight.mean(0)
            total = total + apart / weight.norm().clamp_min(TINY)
        found: Tensor = total / total.norm().clamp_min(TINY)
        return found

    def _row(self, observation: Observation) -> _Row:
        update = observation.update.weights
        bias = update.get(self._layer.removesuffix("weight") + "bias")
        found = features_of_rows(update[self._layer].flatten(1), bias, self._direction(), self._prediction)
        return _Row(found.cpu(), bias)

    def _features(self, row: _Row, ask_author: bool) -> Tensor:
        """Return (C, K) features, where it is asked with what the defense's own attacker says of the bias."""
        if self._read is None or row.bias is None or not ask_author:
            return row.features
        own = self._read(row.bias, lambda: self._prediction)
        told = torch.zeros_like(row.features[:, 0]) if own is None else standardised(-own).cpu()
        return torch.cat([row.features, told[:, None]], 1)

    # One example: which class's releases are nearest.

    def by_releases(self, observation: Observation, *, ask_author: bool) -> Tensor:
        """Return (C,) log-probabilities from rows and from the distance to releases made with every label."""
        model = self._once(("both", ask_author), lambda: self._fit_both(ask_author))
        near = standardised(-torch.cdist(self._sketch(observation)[None], self._bank()[0].mean(0))[0])
        return model.log_posterior(torch.cat([self._features(self._row(observation), ask_author), near[:, None]], 1))

    def _fit_both(self, ask_author: bool) -> RowModel:
        bank, seen = self._bank()
        pictures, classes = bank.shape[:2]
        others = (bank.sum(0) - bank) / (pictures - 1)
        near = torch.stack([standardised(-torch.cdist(own, rest)) for own, rest in zip(bank, others, strict=True)])
        rows = torch.stack([self._features(each, ask_author) for each in seen])
        labels = torch.arange(classes).repeat(pictures)
        folds = torch.arange(pictures).repeat_interleave(classes).tolist()
        return fit_rows(torch.cat([rows, near.flatten(0, 1)[..., None]], 2), labels, folds)

    def _bank(self) -> tuple[Tensor, list[_Row]]:
        """Return sketches (P, C, D) of releases of the same P pictures with every label, and the looks of their last layers."""
        return self._once("bank", self._make_bank)

    def _make_bank(self) -> tuple[Tensor, list[_Row]]:
        classes = self._seen.classes
        pictures = max(2, min(MOST_PICTURES, WITH_EACH // classes))
        sketches, rows = [], []
        for index in range(pictures * classes):
            sent = self._release(index // classes, torch.tensor([index % classes]), RELEASES + index)
            sketches.append(self._sketch(sent))
            rows.append(self._row(sent))  # not the layer itself: a thousand of them would fill the memory
        return torch.stack(sketches).reshape(pictures, classes, -1), rows

    def _sketch(self, observation: Observation) -> Tensor:
        """Return some entries of every tensor, which count alike together whatever the tensors' sizes."""
        parts = []
        for place, value in enumerate(observation.update.weights.values()):
            entries = value.detach().flatten()
            if len(entries) > SKETCH:
                chosen = torch.randint(len(entries), (SKETCH,), generator=torch.Generator().manual_seed(place))
                entries = entries[chosen.to(entries.device)]
            size = entries.norm()
            parts.append((entries / torch.where(size > 0, size, 1.0)).cpu().float())
        return torch.cat(parts)

    # Several examples: how many there are of each class.

    def belief_in_counts(self, observation: Observation) -> Belief:
        """Return the plausible labels of a batch."""
        coefficients, spread = self._once("counts", self._fit_counts)
        features = self._batch_features(observation)
        expected = features @ coefficients[:-1] + coefficients[-1]
        counts, probabilities = plausible_counts(expected, spread, observation.examples, SURE, MOST_HYPOTHESES)
        device = next(iter(observation.update.weights.values())).device
        return Belief(torch.stack([as_labels(each, observation) for each in counts]).to(device), probabilities)

    def _fit_counts(self) -> tuple[Tensor, float]:
        releases, _ = self._releases()
        return fit_counts(torch.stack([self._batch_features(each) for each in releases]), self._counts())

    def _counts(self) -> Tensor:
        """Return (N, C) how many examples of each class were sent."""
        _, labels = self._releases()
        return torch.stack([torch.bincount(own, minlength=self._seen.classes) for own in labels]).double()

    def _places(self) -> Tensor:
        """Return (C,) the row in which a class of a batch shows: a defense may have moved them."""
        return self._once("places", self._find_places)

    def _find_places(self) -> Tensor:
        releases, _ = self._releases()
        return places_of(torch.stack([_wanted(each).double().cpu() for each in releases]), self._counts())

    def _batch_features(self, observation: Observation) -> Tensor:
        """Return features of rows, and the counts that a plain attacker would read, before and after rounding."""
        wanted = _wanted(observation)
        plain = torch.stack([wanted, largest_remainders(wanted, observation.examples).to(wanted)], 1).double().cpu()
        return torch.cat([self._row(observation).features, plain], 1)[self._places()]


def _wanted(observation: Observation) -> Tensor:
    """Return (C,) counts that a plain attacker would read, before rounding."""
    scores = label_scores(observation)
    assert scores is not None  # there is a classifier layer
    return wanted_counts(scores, observation)


def _pictures(observation: Observation) -> Tensor:
    """Return public pictures to send, or grey noise where none are known."""
    reference = next(iter(observation.learner.weights.values()))
    if observation.pictures is not None and len(observation.pictures):
        return observation.pictures.to(reference)
    noise = torch.randn((32, *observation.input_shape), generator=torch.Generator().manual_seed(0))
    return (0.5 + 0.2 * noise).clamp(0, 1).to(reference)
