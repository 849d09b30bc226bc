"""Nulls: what anyone gets without looking at the update, tried as often as the attackers tried.

The headline is the largest count of K attackers, so beside it stands the largest of K draws: each attacker's reconstructions,
scored once against other records. Where labels are known or recovered, the others have the same label; batches are matched to the
records of the draw by assignment, as they were to their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext, PublicRecords
from gradveil.attacks.engine.matching import Recipe, run_recipe
from gradveil.attacks.ensembles import Ensemble
from gradveil.attacks.gradient_matching import GradientMatching
from gradveil.audit.judge import Scored, best_by_truth, measured, originals, score, scored_images
from gradveil.audit.scene import Subject
from gradveil.metrics import assign, median, ranks, share_of
from gradveil.randomness import Seed
from gradveil.records import Knowledge, Reconstruction
from gradveil.significance import effective_number
from gradveil.study.measures import Bar
from gradveil.study.results import Bars

__all__ = ["Deranged", "bars", "deranged", "derangements", "largest_of", "null_rows", "public_means"]

PRIOR_STEPS = 60
MOST_PRIOR_TRIES = 8
DERANGEMENT = "derangement"
PUBLIC_MEAN = "public_mean"
ENOUGH_OF_LABEL = 16


@dataclass(frozen=True)
class Deranged:
    """As many draws as there were attackers: the one with most hits, and how many each had."""

    largest: Scored
    counts: tuple[int, ...]


def null_rows(subject: Subject, ensemble: Ensemble, context: AttackContext, tries: int, deranged: Deranged) -> dict[str, Scored]:
    """Return the null baselines, by name.

    Prior-only gets as many tries as the attackers had (at most eight; they hardly differ) and keeps the best by truth, which is
    generous to the null.
    """
    truth = originals(subject)
    grey = torch.full_like(truth, 0.5)
    mean = subject.candidates.mean(0, keepdim=True).expand_as(truth).contiguous()
    rows = {
        "grey": scored_images(subject, grey),
        "data_mean": scored_images(subject, mean),
        "prior_only": _prior_only(subject, ensemble, context, min(tries, MOST_PRIOR_TRIES)),
        DERANGEMENT: deranged.largest,
    }
    learns = any(Knowledge.PUBLIC_DATA in member.attack.card.needs for member in ensemble.members)
    if learns and context.public is not None:
        rows[PUBLIC_MEAN] = scored_images(subject, public_means(subject, context.public))
    return rows


def public_means(subject: Subject, public: PublicRecords) -> Tensor:
    """Return what attackers who learn from public records answer without the update: the mean of those with the record's label.

    The label is the true one, which is generous to the null. Where few public records have it, or labels mean nothing, all count.
    """
    truth, labels = originals(subject), torch.cat([target.batch.targets for target in subject.targets])
    means = public.inputs.mean(0, keepdim=True).expand_as(truth).clone()
    if public.source == "same" and not subject.dataset.dense and subject.cell.tells_labels:
        for label in labels.unique():
            own = public.inputs[public.targets == label]
            if len(own) >= ENOUGH_OF_LABEL:
                means[labels == label] = own.mean(0)
    return means


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
    scored = score(subject, best_by_truth(subject, found))
    return Scored(scored.images, scored.values, scored.rank, None, scored.clusters)


def derangements(subject: Subject, attackers: Sequence[Scored], seed: Seed) -> Deranged:
    """Score every attacker's reconstructions against other records, each attacker by a draw of its own."""
    draws = []
    for place, attacker in enumerate(attackers):
        rows = _other_rows(subject, attacker, seed.child("derangement", place).numpy("rows"))
        images = _matched(subject, attacker.images, rows)
        rank = ranks(images, rows, subject.candidates, copies=subject.copies)
        draws.append((images, rows, rank))
    counts = tuple(int((rank == 1).sum()) for _, _, rank in draws)
    images, rows, rank = draws[counts.index(max(counts))]
    values = measured(subject, images, subject.candidates[rows])
    return Deranged(Scored(images, values, rank, None, attackers[0].clusters), counts)


def _other_rows(subject: Subject, attacker: Scored, generator: np.random.Generator) -> Tensor:
    """Return for every record the row of another candidate."""
    attacked = list(subject.positions)
    # Of a single update there is no other attacked record; the rest of the candidates has some.
    spare = [row for row in range(len(subject.candidates)) if row not in set(attacked)] if len(subject.targets) == 1 else []
    rows = attacked + spare
    size = len(subject.targets[0].batch)
    updates = [place // size for place in range(len(attacked))] + [-1 - place for place in range(len(spare))]
    copies = subject.copies[torch.tensor(rows)].tolist()
    chosen = deranged(_labels(subject, attacker, rows), updates, copies, generator)[: len(attacked)]
    return torch.tensor([rows[place] for place in chosen])


def _labels(subject: Subject, attacker: Scored, rows: Sequence[int]) -> list[Hashable]:
    """Return the label of each candidate, None where the attacker did not know or find it: then any other record will do."""
    if subject.dataset.dense or not (subject.cell.known_labels or attacker.labels is not None):
        return [None] * len(rows)  # masks are no labels that two records could share
    told: list[Hashable] = subject.candidate_labels[torch.tensor(rows)].tolist()
    if subject.cell.known_labels or attacker.labels is None:
        return told
    lost = [place for place, hit in enumerate(attacker.labels.tolist()) if hit <= 0.5]
    return [None if place in set(lost) else label for place, label in enumerate(told)]


def _matched(subject: Subject, images: Tensor, rows: Tensor) -> Tensor:
    """Return the reconstructions of each update in the order that suits the records of the draw best."""
    size = len(subject.targets[0].batch)
    if size == 1:
        return images
    parts = []
    for start in range(0, len(images), size):
        own = images[start : start + size]
        parts.append(own[assign(own, subject.candidates[rows[start : start + size]])])
    return torch.cat(parts)


def deranged(
    labels: Sequence[Hashable], updates: Sequence[int], copies: Sequence[int], generator: np.random.Generator
) -> list[int]:
    """Return for every record another one: of the same label, of another update and no copy, as far as there is one.

    Args:
        labels: One per record.
        updates: Which update each is in; no two records of one update get the same other.
        copies: The first record each is a copy of.
        generator: Where the draw comes from.
    """
    order = generator.permutation(len(labels)).tolist()
    proposed: dict[int, int] = {}
    for label in dict.fromkeys(labels):
        alike = [place for place in order if labels[place] == label]
        proposed |= dict(zip(alike, [*alike[1:], *alike[:1]], strict=True))
    taken: dict[int, set[int]] = {update: set() for update in updates}
    found = []
    for place in range(len(labels)):

        def fits(other: int, place: int = place) -> bool:
            fresh = other not in taken[updates[place]]
            return fresh and updates[other] != updates[place] and copies[other] != copies[place]

        here = [proposed[place], *(each for each in order if labels[each] == labels[place]), *order]
        chosen = next((each for each in here if fits(each)), next((each for each in here if each != place), place))
        taken[updates[place]].add(chosen)
        found.append(chosen)
    return found


def bars(nulls: Mapping[str, Scored], deranged: Deranged) -> Bars:
    """Return the best null by the share identified, and by PSNR; of equal shares the derangement, which was tried most often."""
    n = len(deranged.largest.rank)
    shares = {name: int((null.rank == 1).sum()) for name, null in nulls.items()}
    top = max(shares, key=lambda name: (shares[name], name == DERANGEMENT))
    psnrs = {name: median(v) for name, null in nulls.items() if isinstance(v := null.values["psnr"], torch.Tensor)}
    best = max(psnrs, key=lambda name: psnrs[name])
    if top == DERANGEMENT:
        worth = effective_number([float(hit) for hit in deranged.largest.hits], *deranged.largest.clusters)
        identified = largest_of(deranged.counts, n, worth)
    else:
        identified = Bar(null=top, value=shares[top] / n, high=nulls[top].share.high)
    return Bars(identified=identified, psnr=Bar(null=best, value=psnrs[best]))


def largest_of(counts: Sequence[int], n: int, worth: float) -> Bar:
    """Return the largest of several draws; all of them together tell how often luck hits, which that one may be above."""
    value, draws = max(counts) / n, len(counts)
    high = share_of(sum(counts), draws * n, draws * worth).high
    return Bar(null=DERANGEMENT, value=value, high=max(value, high), draws=draws)
