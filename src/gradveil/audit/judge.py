"""From candidates to numbers: per-record metrics, the attacker's selection, and the null baselines beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.matching import Recipe, run_recipe
from gradveil.attacks.ensembles import Ensemble
from gradveil.attacks.gradient_matching import GradientMatching
from gradveil.attacks.referee import Referee, Verdict, recipe_key
from gradveil.audit.scene import Subject
from gradveil.metrics import among_nearest, assign, label_hits, measure, ranks, summarise
from gradveil.metrics.base import Unavailable
from gradveil.metrics.identification import IIP
from gradveil.randomness import Seed
from gradveil.records import Reconstruction
from gradveil.study.measures import Summary
from gradveil.study.results import Attacker

__all__ = ["Scored", "best_by_truth", "null_rows", "per_recipe", "score", "select"]

NAMES = ("mse", "psnr", "ssim", "lpips", "noise_fraction", "rdlv_nvflare")
PRIOR_STEPS = 60
MOST_PRIOR_TRIES = 8


@dataclass(frozen=True)
class Scored:
    """One reconstruction per record, in the order of the records, with its metrics."""

    images: Tensor
    values: dict[str, Tensor | Unavailable]
    rank: Tensor
    labels: Tensor | None

    def summary(self, seed: Seed) -> Summary:
        """Return the metrics of all records with their intervals."""
        rows: dict[str, Any] = {"identified": (self.rank == 1).double(), **self.values}
        rows |= {f"iip_{k}": among_nearest(self.rank, k).double() for k in IIP}
        if self.labels is not None:
            rows["label_accuracy"] = self.labels
        return summarise(rows, seed, Summary)

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
    return _scored(subject, torch.cat(images), torch.cat(hits) if hits else None)


def _scored(subject: Subject, images: Tensor, labels: Tensor | None = None) -> Scored:
    truth = originals(subject)
    rank = ranks(images, torch.tensor(subject.positions), subject.candidates)
    return Scored(images, _measured(subject, images, truth), rank, labels)


def _measured(subject: Subject, images: Tensor, truth: Tensor) -> dict[str, Tensor | Unavailable]:
    """Measure beside the mean of the candidates, which is what anyone could guess without the update."""
    return measure(images, truth, NAMES, {"prior": subject.candidates.mean(0)})


def select(
    subject: Subject, candidates: Sequence[Sequence[Reconstruction]], referee: Referee, stances: Sequence[str] | None = None
) -> tuple[list[Reconstruction], list[Verdict]] | None:
    """Return, per target, what an attacker restricted to ``stances`` would keep; None where it has no candidate."""
    kept, verdicts = [], []
    for target, many in zip(subject.targets, candidates, strict=True):
        allowed = [c for c in many if stances is None or c.stance in stances]
        if not allowed:
            return None
        verdict = referee.select(target.observation, allowed)
        kept.append(allowed[verdict.chosen])
        verdicts.append(verdict)
    return kept, verdicts


def best_by_truth(subject: Subject, candidates: Sequence[Sequence[Reconstruction]]) -> list[Reconstruction]:
    """Return, per target, the candidate nearest to the truth: an upper limit no attacker can be sure to reach."""
    best = []
    for target, many in zip(subject.targets, candidates, strict=True):
        truth = target.batch.inputs
        errors = [float((c.inputs.cpu().float()[assign(c.inputs.cpu().float(), truth)] - truth).square().mean()) for c in many]
        best.append(many[int(np.argmin(errors))])
    return best


def null_rows(subject: Subject, ensemble: Ensemble, context: AttackContext, tries: int, selected: Scored) -> dict[str, Scored]:
    """Return the null baselines: what anyone gets without looking at the update.

    Prior-only gets as many tries as the attackers had (at most eight; they hardly differ) and keeps the best by truth, which is
    generous to the null. Derangement scores every selected reconstruction against another record, of the same label where there
    is one.
    """
    truth = originals(subject)
    grey = torch.full_like(truth, 0.5)
    mean = subject.candidates.mean(0, keepdim=True).expand_as(truth).contiguous()
    return {
        "grey": _scored(subject, grey),
        "data_mean": _scored(subject, mean),
        "prior_only": _prior_only(subject, ensemble, context, min(tries, MOST_PRIOR_TRIES)),
        "derangement": _derangement(subject, selected),
    }


def _prior_only(subject: Subject, ensemble: Ensemble, context: AttackContext, tries: int) -> Scored:
    """Run the ensemble's recipes with the matching term switched off."""
    searches = [member.attack for member in ensemble.members if isinstance(member.attack, GradientMatching)]
    recipes = [attack.recipe() for attack in searches] or [Recipe(name="prior", tv=1e-2)]
    observations = [target.observation for target in subject.targets]
    quiet = AttackContext(seed=context.seed.child("prior only"), budget=PRIOR_STEPS, execution="batched")
    found: list[list[Reconstruction]] = [[] for _ in observations]
    for index, recipe in enumerate(recipes):
        share = tries // len(recipes) + (index < tries % len(recipes))
        if share == 0:
            continue
        changes = {"matching": 0.0, "restarts": share, "steps": PRIOR_STEPS, "relative": False, "stance": "plain"}
        start = "noise" if index % 2 == 0 else recipe.start
        bare = Recipe(**{**recipe.__dict__, **changes, "start": start, "tv": recipe.tv or 1e-4, "name": f"{recipe.name}:{index}"})
        for candidate in run_recipe(bare, observations, quiet):
            found[candidate.target].append(candidate)
    chosen = best_by_truth(subject, found)
    scored = score(subject, chosen)
    return Scored(scored.images, scored.values, scored.rank, None)


def _derangement(subject: Subject, selected: Scored) -> Scored:
    # Masks are no labels that two records could share.
    dense = subject.dataset.dense
    labels = [0] * len(selected.images) if dense else torch.cat([t.batch.targets for t in subject.targets]).tolist()
    # A single record has no other attacked one; the candidates have.
    rows = torch.tensor([subject.positions[j] for j in deranged(labels)] if len(labels) > 1 else [len(subject.candidates) - 1])
    images = selected.images
    truth = subject.candidates[rows]
    return Scored(images, _measured(subject, images, truth), ranks(images, rows, subject.candidates), None)


def deranged(labels: Sequence[int]) -> list[int]:
    """Return for every record another one, of the same label where there is one.

    >>> deranged([0, 0, 1])
    [1, 0, 0]
    """
    count = len(labels)
    other = []
    for index, label in enumerate(labels):
        later = [(index + step) % count for step in range(1, count)]
        same = [j for j in later if labels[j] == label]
        other.append((same or later or [index])[0])
    return other


def per_recipe(
    subject: Subject,
    candidates: Sequence[Sequence[Reconstruction]],
    referee: Referee,
    chosen: Sequence[Reconstruction],
    seed: Seed,
) -> list[Attacker]:
    """Return one row per recipe and stance: tries, how often it was selected, and its own summary."""
    rows = []
    keys = list(dict.fromkeys(recipe_key(c) for c in candidates[0]))
    for key in keys:
        own = [[c for c in many if recipe_key(c) == key] for many in candidates]
        kept = [many[referee.select(t.observation, many).chosen] for t, many in zip(subject.targets, own, strict=True)]
        rows.append(
            Attacker(
                recipe=kept[0].recipe,
                stance=kept[0].stance,
                tries=max(len(many) for many in own),
                chosen=sum(recipe_key(c) == key for c in chosen),
                rehearsal_psnr=referee.rehearsal.get(key),
                summary=score(subject, kept).summary(seed.child(key)),
            )
        )
    return rows
