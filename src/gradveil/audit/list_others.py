"""Attackers who know all other records of an update, and have a list for the one they do not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradveil.attacks.base import AttackContext
from gradveil.attacks.listing import Evidence, Hypotheses, ListClient, generic_evidence, own_evidence
from gradveil.audit.list_counts import Try, counted
from gradveil.audit.lists import Pool, list_seed, ranks_of
from gradveil.audit.scene import Subject
from gradveil.study.levels import Listed

__all__ = ["others_known"]

SECONDS = 20.0
SIZE, UPDATES, OWN = 32, 16, 16
LEAST_SIZE, LEAST_UPDATES = 16, 4
RUNS = 5
"""Client runs of a candidate, those of the attacker who knows the defense included."""


def others_known(subject: Subject, context: AttackContext, pool: Pool) -> Listed:
    """Rank candidates for the first record of each update, whose other records the attacker knows.

    Every update has a list of its own, so the client runs for each; lists are shorter and fewer updates are tested.
    """
    size, updates = _affordable(subject, context, pool)
    rows = [_Row.of(subject, context, pool, index, size) for index in range(updates)]
    sizes = [row.size for row in rows]
    if max(sizes) == 1:
        return Listed(reason="no list of this kind has a second candidate")
    owners = pool.owners
    together = ([owners[batch[0]] for batch in pool.batches[:updates]],) if owners else ()
    tries = []
    for place, each in enumerate(rows[0].evidence):
        ranks, rehearsed = [row.ranks[place] for row in rows], _mean([row.rehearsed[place] for row in rows])
        tries.append(Try(each.name, each.informed, ranks, sizes, rehearsed, together))
    return counted(tries)


def _affordable(subject: Subject, context: AttackContext, pool: Pool) -> tuple[int, int]:
    each = len(pool.batches[0])
    client = ListClient(subject.targets[0].observation, pool.hypotheses(list_seed(subject), each), context)
    size, updates, cost = min(SIZE, len(pool) - each + 1), min(UPDATES, len(pool.batches)), client.seconds() * RUNS
    while size * updates * cost > SECONDS and (size > LEAST_SIZE or updates > LEAST_UPDATES):
        size, updates = (max(LEAST_SIZE, size // 2), updates) if size > LEAST_SIZE else (size, max(LEAST_UPDATES, updates // 2))
    return size, updates


@dataclass(frozen=True)
class _Row:
    """One update: what attackers said, where the truth ranked, and of how many candidates."""

    evidence: Sequence[Evidence]
    ranks: Sequence[int]
    rehearsed: Sequence[float | None]
    size: int

    @classmethod
    def of(cls, subject: Subject, context: AttackContext, pool: Pool, index: int, size: int) -> _Row:
        own, *others = pool.batches[index]
        outside = [row for row in range(len(pool)) if row not in pool.batches[index]]
        seed = list_seed(subject).child("others known", index)
        taken = seed.numpy("list").permutation(outside)[: size - 1].tolist()
        rows = [taken[i] for i in range(len(taken))]
        place = int(seed.numpy("place").integers(len(rows) + 1))
        rows.insert(place, own)
        hypotheses = Hypotheses(
            inputs=pool.inputs[rows],
            labels=pool.labels[rows],
            size=len(others) + 1,
            others=(pool.inputs[others], pool.labels[others]),
            seed=seed,
        )
        seen = [subject.targets[index].observation]
        evidence = [
            generic_evidence(seen, hypotheses, context),
            own_evidence(seen, hypotheses, context, own=min(OWN, len(rows))),
        ]
        around = torch.ones(len(rows), len(rows), dtype=torch.bool)
        listed = around[:1]
        if subject.cell.known_labels:
            around = hypotheses.labels[:, None] == hypotheses.labels[None]
            listed = around[place : place + 1]
        rankings = [each.ranking(listed, around) for each in evidence]
        alike = pool.groups[rows] == pool.groups[own]
        ranks = [ranks_of(ranking.scores, alike[None])[0] for ranking in rankings]
        return cls(evidence, ranks, [each.rehearsed for each in rankings], 1 + int((listed[0] & ~alike).sum()))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
