"""What an attacker who holds a list of candidates gets of a cell: who was in the update, whether anyone was, and whose it is.

Two attackers try (`gradveil.attacks.listing`): one that only runs the client, and one with the defense's own adversary model.
They get lists and releases, never the truth; this file builds the lists around the truth and counts. Whoever rebuilt a picture
can also look it up on the list, so who rebuilt pictures is the third: a list never says less than pictures do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.affordable import halved
from gradveil.attacks.listing import Evidence, ListClient, Ranking, affordable, generic_evidence, own_evidence
from gradveil.audit.list_counts import Try, best_guess, clustered, counted, of_the_strongest
from gradveil.audit.list_others import others_known
from gradveil.audit.lists import NEAREST, Pool, list_seed, neighbours
from gradveil.audit.scene import Subject
from gradveil.errors import GradveilError
from gradveil.metrics import share_of
from gradveil.records import Observation
from gradveil.study.levels import Level, Listed, ListLevel, Reach
from gradveil.study.measures import Share

__all__ = ["list_level", "matching_share", "measure_lists"]

REBUILT = "rebuilt pictures"
"""Who looks up on the list what was rebuilt without it."""
SIZE = 256
SECONDS = 120.0
"""Of client runs that one list may take; a dear defense gets shorter lists, of at least `LEAST` candidates."""
LEAST = 16
RUNS = 4
"""Client runs of a candidate."""
OWN_SECONDS = 60.0
"""Of the attacker who knows the defense, where its unknowns must be fitted pair by pair."""
OWN_RELEASES = 64
"""Releases of its own that the attacker who knows the defense learns from."""


def list_level(subject: Subject, pictures: Tensor | None = None) -> ListLevel | None:
    """Measure the lists that a cell asks for; None where it asks for none.

    Args:
        subject: The cell.
        pictures: What the choice among all attackers rebuilt, one per record; None where nobody tried.
    """
    asked = subject.cell.lists
    if asked == "off":
        return None
    return measure_lists(subject, SIZE if asked == "auto" else int(asked), pictures=pictures)


def measure_lists(subject: Subject, size: int, *, seconds: float = SECONDS, pictures: Tensor | None = None) -> ListLevel:
    """Let attackers with lists of up to so many candidates loose on the updates of a cell."""
    context = subject.context(1)
    size = min(size, len(subject.dataset))
    each = subject.cell.batch_size * subject.cell.clients
    if size <= each:
        return ListLevel(reason=f"a list needs more candidates than the {each} records of an update; there are {size}")
    try:
        pool = Pool.of(subject, _affordable(subject, context, size, seconds))
        if len(pool) <= each:  # copies are listed once
            return ListLevel(reason=f"a list needs more than {each} candidates, copies counted once; there are {len(pool)}")
        return _Lists(subject, context, pool, pictures).level()
    except GradveilError as error:
        return ListLevel(reason=f"no list could be tested: {error}")


def _affordable(subject: Subject, context: AttackContext, size: int, seconds: float) -> int:
    """Return the size, halved until the client runs of a list take no longer than they may."""
    each = subject.cell.batch_size * subject.cell.clients
    least = LEAST + each - 1  # the other records of an update are on no list
    few = Pool.of(subject, min(size, least)).hypotheses(list_seed(subject), each)
    client = ListClient(subject.targets[0].observation, few, context)
    cost = client.seconds() * (RUNS if client.varies() else 1)
    return halved(size, least, cost, seconds)


@dataclass
class _Lists:
    subject: Subject
    context: AttackContext
    pool: Pool
    pictures: Tensor | None = None

    @property
    def each(self) -> int:
        """Records behind one update."""
        return self.subject.cell.batch_size * self.subject.cell.clients

    def level(self) -> ListLevel:
        evidence = self._evidence()
        kinds = self._kinds()
        lists = {kind: self._listed(evidence, around) for kind, around in kinds.items()}
        if self.each > 1:
            lists["others_known"] = others_known(self.subject, self.context, self.pool)
        presence = self._presence(evidence, kinds["random"])
        return ListLevel(lists=lists, presence=presence, draws=max(each.draws for each in evidence))

    def _observations(self) -> list[Observation]:
        return [target.observation for target in self.subject.targets[: len(self.pool.batches)]]

    def _evidence(self) -> list[Evidence]:
        hypotheses = self.pool.hypotheses(list_seed(self.subject), self.each)
        found = [generic_evidence(self._observations(), hypotheses, self.context)]
        if not hypotheses.varies:  # the model tells the law of an update, not what unknown records add to it
            seen = self._observations()
            tested, own = affordable(seen, hypotheses, min(OWN_RELEASES, len(hypotheses)), OWN_SECONDS)
            found.append(own_evidence(seen[:tested], hypotheses, self.context, own=own))
        return found

    def _kinds(self) -> dict[str, Tensor]:
        """Return (N, N) per kind which candidates are on a list around each; who knows the label rules out all others."""
        pool, labels = self.pool, self.pool.labels
        everyone = torch.ones(len(pool), len(pool), dtype=torch.bool)
        if self.subject.dataset.dense:
            return {"random": everyone, "nearest": self._nearest()}
        same = labels[:, None] == labels[None]
        if self.subject.cell.known_labels:
            return {"random": same, "same_label": same, "nearest": self._nearest() & same}
        return {"random": everyone, "same_label": same, "nearest": self._nearest()}

    def _nearest(self) -> Tensor:
        return neighbours(self.subject.targets[0].observation.learners, self.pool, NEAREST, list_seed(self.subject))

    def _ranked(self, evidence: Evidence, listed: Tensor, around: Tensor) -> Ranking:
        """Rank for every attacked record whose update this attacker looked at; an update may hold several."""
        updates = torch.tensor([update for update, _ in self.pool.records if update < len(evidence.features)])
        return evidence.of(updates).ranking(listed[: len(updates)], around)

    def _listed(self, evidence: Sequence[Evidence], around: Tensor) -> Listed:
        pool, listed = self.pool, self.pool.lists(around)
        others = (listed & ~pool.alike()).sum(1)
        if int(others.max()) == 0:
            return Listed(reason="no list of this kind has a second candidate")
        rankings = [self._ranked(each, listed, around) for each in evidence]
        sizes = [int(count) + 1 for count in others]
        tries = []
        for each, ranking in zip(evidence, rankings, strict=True):
            n = len(ranking.scores)
            ranks, together = pool.ranks(ranking.scores), pool.clusters(n)
            tries.append(Try(each.name, each.informed, ranks, sizes[:n], ranking.rehearsed, together))
        found = [ranking.scores for ranking in rankings]
        if self.pictures is not None:
            found.append(self._looked_up(self.pictures, listed))
            tries.append(Try(REBUILT, True, pool.ranks(found[-1]), sizes, None, pool.clusters(len(listed))))
        return self._with_owners(counted(tries), found, listed)

    def _looked_up(self, pictures: Tensor, listed: Tensor) -> Tensor:
        """Return (records, N) how near each candidate is to the nearest picture of the update; nobody knows which is of which."""
        flat = self.pool.inputs.flatten(1).double().cpu()
        near = -torch.cdist(pictures.flatten(1).double().cpu(), flat).square()
        of_update: Tensor = near.unflatten(0, (-1, self.each)).amax(1)
        updates = torch.tensor([update for update, _ in self.pool.records])
        return of_update[updates].masked_fill(~listed, float("-inf"))

    def _with_owners(self, level: Listed, scores: Sequence[Tensor], listed: Tensor) -> Listed:
        pool = self.pool
        if pool.owners is None:
            return level
        shares = [clustered(list(pool.owner_hits(each).values()), pool.owner_updates(len(each))) for each in scores]
        top, _ = of_the_strongest(shares)
        null = best_guess("commonest owner", pool.commonest_owner(listed), top.n, len(scores))
        reached = tuple(replace(each, owners=share) for each, share in zip(level.reached, shares, strict=True))
        return replace(level, owners=top, owners_null=null, reached=reached)

    def _presence(self, evidence: Sequence[Evidence], around: Tensor) -> Level:
        """Take every second record off its list, by a coin, and ask whether it is there."""
        pool = self.pool
        listed = pool.lists(around)
        absent = torch.rand(len(listed), generator=list_seed(self.subject).generator("presence")) < 0.5
        shown = listed & ~(absent[:, None] & pool.alike())
        if int(shown.sum(1).min()) < 2:
            return Level(reason="lists are too short to take a record off them")
        reached = []
        for each in evidence:
            ranking = self._ranked(each, shown, around)
            right = ranking.presence.says(ranking.scores) != absent[: len(ranking.scores)]
            told = clustered(right.tolist(), *pool.clusters(len(right)))
            reached.append(Reach(attacker=each.name, share=told, informed=each.informed, rehearsed=ranking.presence.rehearsed))
        top, best = of_the_strongest([each.share for each in reached])
        null = best_guess("coin", 0.5, top.n, len(reached))
        return Level(share=top, attacker=reached[best].attacker, null=null, reached=tuple(reached))


def matching_share(subject: Subject) -> Share:
    """Return how many of its records an attacker with the cell's candidates names under the defense's adversary model.

    For one record in an update, and Gaussian noise on it, no attacker with this list does better.
    """
    pool = Pool.of(subject, len(subject.candidates))
    observations = [target.observation for target in subject.targets]
    told = observations[0].adversary.arrives(observations[0]).noise_std
    hypotheses = pool.hypotheses(list_seed(subject), 1)
    evidence = own_evidence(observations, hypotheses, subject.context(1), own=0 if told else min(LEAST, len(pool)))
    around = torch.ones(len(pool), len(pool), dtype=torch.bool)
    if subject.cell.known_labels:
        around = pool.labels[:, None] == pool.labels[None]
    ranks = pool.ranks(evidence.ranking(pool.lists(around), around).scores)
    return share_of(sum(rank == 1 for rank in ranks), len(ranks))
