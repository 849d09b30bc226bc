"""Pictures counted by owner: for whoever has several records, another picture of the same person is a hit, not a miss."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gradveil.audit.judge import Scored
from gradveil.audit.nulls import deranged, largest_of
from gradveil.audit.scene import Subject
from gradveil.metrics import owner_hits, share_of
from gradveil.randomness import Seed
from gradveil.significance import effective_number
from gradveil.study.headline import IGNORES, PLAIN, headline_share
from gradveil.study.levels import Level, Reach
from gradveil.study.measures import Bar, Share

__all__ = ["owners_level"]


def owners_level(subject: Subject, attackers: Mapping[str, Scored], seed: Seed) -> Level | None:
    """Return how many owners were identified; None where the data name none.

    An owner is hit where the nearest of all candidates to what was rebuilt from any of their audited records is theirs. The null
    scores every attacker's reconstructions once against another owner, of a record of the same label as far as there is one, and
    takes the largest of these draws.

    Args:
        subject: The cell.
        attackers: What everybody whose count may be the headline found, by name.
        seed: Where the null draws from.
    """
    named = subject.dataset.owners
    if named is None:
        return None
    numbers = {owner: place for place, owner in enumerate(dict.fromkeys(named))}
    pool = torch.tensor([numbers[named[row]] for row in subject.pool])
    own = [numbers[named[row]] for row in subject.indices]
    labels = [() if subject.dataset.dense else subject.dataset.targets[row].item() for row in subject.indices]
    updates = _updates(own, len(subject.targets[0].batch))
    shares, counts = [], []
    for place, scored in enumerate(attackers.values()):
        shares.append(_share(_hits(subject, scored, own, own, pool), updates))
        drawn = _others(own, labels, pool.tolist(), seed.child("owners", place).numpy("draw"))
        if drawn is not None:
            counts.append(sum(_hits(subject, scored, own, drawn, pool)))
    top = max(range(len(shares)), key=lambda place: (shares[place].value, shares[place].low))
    names = list(attackers)
    return Level(
        share=headline_share(shares),
        attacker=names[top],
        null=_null(counts, len(updates), updates),
        reached=tuple(
            Reach(attacker=name, share=share, informed=name != PLAIN and not name.endswith(f"({IGNORES})"))
            for name, share in zip(names, shares, strict=True)
        ),
    )


def _updates(own: Sequence[int], size: int) -> list[int]:
    """Return for every owner, in order of appearance, the update of their first record."""
    first: dict[int, int] = {}
    for place, owner in enumerate(own):
        first.setdefault(owner, place // size)
    return list(first.values())


def _hits(subject: Subject, scored: Scored, own: Sequence[int], sought: Sequence[int], pool: Tensor) -> list[bool]:
    """Return for every owner whether any of their reconstructions is nearest to the owner that is sought for it."""
    found = owner_hits(scored.images, torch.tensor(sought), subject.candidates, pool, subject.copies).tolist()
    hits: dict[int, bool] = {}
    for owner, hit in zip(own, found, strict=True):
        hits[owner] = hits.get(owner, False) or hit
    return list(hits.values())


def _others(
    own: Sequence[int], labels: Sequence[Hashable], pool: Sequence[int], generator: np.random.Generator
) -> list[int] | None:
    """Return another owner for each record, the same for all of one owner; None where there is only one.

    An owner has the label of their first audited record: who reads the label alone names people of that label more often.
    """
    first: dict[int, Hashable] = {}
    for owner, label in zip(own, labels, strict=True):
        first.setdefault(owner, label)
    audited = list(first)
    if len(audited) == 1:
        audited += generator.permutation([owner for owner in dict.fromkeys(pool) if owner not in audited]).tolist()[:1]
    if len(audited) == 1:
        return None
    each = range(len(audited))
    drawn = deranged([first.get(owner) for owner in audited], each, each, generator)
    other = {owner: audited[place] for owner, place in zip(audited, drawn, strict=True)}
    return [other[owner] for owner in own]


def _share(hits: Sequence[bool], updates: Sequence[int]) -> Share:
    return share_of(sum(hits), len(hits), effective_number([float(hit) for hit in hits], updates))


def _null(counts: Sequence[int], n: int, updates: Sequence[int]) -> Bar | None:
    if not counts:
        return None
    return largest_of(counts, n, effective_number([0.0] * n, updates))
