"""From candidates to numbers: per-record metrics, and what every attacker's own referee would choose."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks.referee import Referee, Verdict, recipe_key
from gradveil.audit.scene import Subject
from gradveil.metrics import among_nearest, assign, label_hits, measure, ranks, share_of, summarise
from gradveil.metrics.base import Unavailable
from gradveil.metrics.identification import IIP
from gradveil.randomness import Seed
from gradveil.records import Observation, Reconstruction
from gradveil.significance import effective_number
from gradveil.study.headline import IGNORES
from gradveil.study.measures import Share, Summary
from gradveil.study.results import Attacker

__all__ = ["Referees", "Scored", "best_by_truth", "per_recipe", "score", "scored_images", "select", "select_plain"]

NAMES = ("mse", "psnr", "ssim", "lpips", "noise_fraction", "rdlv_nvflare")


@dataclass(frozen=True)
class Scored:
    """One reconstruction per record, in the order of the records, with its metrics."""

    images: Tensor
    values: dict[str, Tensor | Unavailable]
    rank: Tensor
    labels: Tensor | None
    clusters: tuple[tuple[Hashable, ...], ...] = ()

    @property
    def hits(self) -> list[bool]:
        """Which records were identified."""
        return (self.rank == 1).tolist()

    @property
    def share(self) -> Share:
        """How many were."""
        hits = self.hits
        return share_of(sum(hits), len(hits), effective_number([float(hit) for hit in hits], *self.clusters))

    def summary(self, seed: Seed) -> Summary:
        """Return the metrics of all records with their intervals."""
        rows: dict[str, Any] = {"identified": (self.rank == 1).double(), **self.values}
        rows |= {f"iip_{k}": among_nearest(self.rank, k).double() for k in IIP}
        if self.labels is not None:
            rows["label_accuracy"] = self.labels
        return summarise(rows, seed, Summary, self.clusters)

    def column(self, name: str) -> list[float | None]:
        """Return one metric per record, None where it is not available."""
        value = self.values[name]
        return [None] * len(self.rank) if isinstance(value, Unavailable) else [float(v) for v in value]


def originals(subject: Subject) -> Tensor:
    """Return the attacked records, in order."""
    return torch.cat([target.batch.inputs for target in subject.targets])


def score(subject: Subject, chosen: Sequence[Reconstruction]) -> Scored:
    """Score one reconstruction per target: match batches to originals by assignment, then measure record by record."""
    images, hits = [], []
    for target, candidate in zip(subject.targets, chosen, strict=True):
        inputs = candidate.inputs.detach().cpu().float()
        order = assign(inputs, target.batch.inputs)
        images.append(inputs[order])
        if not subject.dataset.dense and subject.cell.tells_labels:
            hits.append(label_hits(candidate.targets.detach().cpu(), target.batch.targets, order=order))
    return scored_images(subject, torch.cat(images), torch.cat(hits) if hits else None)


def scored_images(subject: Subject, images: Tensor, labels: Tensor | None = None) -> Scored:
    """Score images that are in the order of the records."""
    rank = ranks(images, torch.tensor(subject.positions), subject.candidates, copies=subject.copies)
    return Scored(images, measured(subject, images, originals(subject)), rank, labels, clusters(subject))


def clusters(subject: Subject) -> tuple[tuple[Hashable, ...], ...]:
    """Return how records belong together: by update, where one holds several, and by owner, where one has several."""
    size, owners = len(subject.targets[0].batch), subject.dataset.owners
    updates = tuple(place // size for place in range(len(subject.indices)))
    named = tuple(owners[index] for index in subject.indices) if owners else ()
    return tuple(names for names in (updates, named) if len(set(names)) < len(names))


def measured(subject: Subject, images: Tensor, truth: Tensor) -> dict[str, Tensor | Unavailable]:
    """Measure beside the mean of the candidates, which is what anyone could guess without the update."""
    return measure(images, truth, NAMES, {"prior": subject.candidates.mean(0)})


@dataclass(frozen=True)
class Referees:
    """Who chooses: one who knows the defense, and one who compares as if there were none."""

    informed: Referee
    plain: Referee

    @classmethod
    def rehearsed(cls, subject: Subject, candidates: Sequence[Sequence[Reconstruction]]) -> Referees:
        """Let both learn from the attacker's own public images.

        Args:
            subject: The cell, with its rehearsals.
            candidates: What the recipes made of the rehearsals.
        """
        device, rehearsals = subject.cell.device, subject.rehearsals
        images = [r.batch.inputs.to(device) for r in rehearsals]
        labels = [r.batch.targets.to(device) for r in rehearsals]
        replayed = [(r.replayed_inputs, y) for r, y in zip(rehearsals, labels, strict=True)]
        informed = Referee.rehearsed([r.observation for r in rehearsals], replayed, images, candidates)
        if not _defended(subject):
            return cls(informed, informed)
        own = [[candidate for candidate in many if candidate.stance == IGNORES] for many in candidates]
        raw = list(zip(images, labels, strict=True))
        return cls(informed, Referee.rehearsed([undefended(r.observation) for r in rehearsals], raw, images, own))

    def choose(self, observation: Observation, candidates: Sequence[Reconstruction]) -> Verdict:
        """Return what an attacker who has these candidates would keep; who has plain ones alone ignores the defense."""
        if all(candidate.stance == IGNORES for candidate in candidates):
            return self.plain.select(undefended(observation), candidates)
        return self.informed.select(observation, candidates)


def undefended(observation: Observation) -> Observation:
    """Return an observation as one who ignores the defense takes it."""
    return observation if type(observation.adversary) is OpenAdversary else observation.replace(adversary=OpenAdversary())


def _defended(subject: Subject) -> bool:
    return type(subject.targets[0].observation.adversary) is not OpenAdversary


def select(
    subject: Subject, candidates: Sequence[Sequence[Reconstruction]], referee: Referee
) -> tuple[list[Reconstruction], list[Verdict]]:
    """Return, per target, what an attacker who knows the defense and has all candidates would keep."""
    verdicts = [referee.select(target.observation, many) for target, many in zip(subject.targets, candidates, strict=True)]
    return [many[verdict.chosen] for many, verdict in zip(candidates, verdicts, strict=True)], verdicts


def select_plain(
    subject: Subject, candidates: Sequence[Sequence[Reconstruction]], referees: Referees
) -> list[Reconstruction] | None:
    """Return, per target, what an attacker who ignores the defense would keep; None where none was tried."""
    kept = []
    for target, many in zip(subject.targets, candidates, strict=True):
        allowed = [candidate for candidate in many if candidate.stance == IGNORES]
        if not allowed:
            return None
        verdict = referees.choose(target.observation, allowed)
        kept.append(allowed[verdict.chosen])
    return kept


def best_by_truth(subject: Subject, candidates: Sequence[Sequence[Reconstruction]]) -> list[Reconstruction]:
    """Return, per target, the candidate nearest to the truth: an upper limit no attacker can be sure to reach."""
    best = []
    for target, many in zip(subject.targets, candidates, strict=True):
        truth = target.batch.inputs
        errors = [float((c.inputs.cpu().float()[assign(c.inputs.cpu().float(), truth)] - truth).square().mean()) for c in many]
        best.append(many[int(np.argmin(errors))])
    return best


def per_recipe(
    subject: Subject,
    candidates: Sequence[Sequence[Reconstruction]],
    referees: Referees,
    chosen: Sequence[Reconstruction],
    seed: Seed,
) -> list[tuple[Attacker, Scored]]:
    """Return one row per recipe and stance: tries, how often it was selected, and its own summary; with what it found."""
    rows = []
    keys = list(dict.fromkeys(recipe_key(c) for c in candidates[0]))
    for key in keys:
        own = [[c for c in many if recipe_key(c) == key] for many in candidates]
        kept = [many[referees.choose(t.observation, many).chosen] for t, many in zip(subject.targets, own, strict=True)]
        scored = score(subject, kept)
        row = Attacker(
            recipe=kept[0].recipe,
            stance=kept[0].stance,
            tries=max(len(many) for many in own),
            chosen=sum(recipe_key(c) == key for c in chosen),
            rehearsal_psnr=referees.informed.rehearsal.get(key),
            summary=scored.summary(seed.child(key)),
        )
        rows.append((row, scored))
    return rows
