"""The lists that an audit hands to attackers: who is on them, around which record, and where the truth ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.listing.hypotheses import Hypotheses
from gradveil.attacks.listing.joint import Sketch, single_updates
from gradveil.audit.scene import Subject
from gradveil.audit.state import order_of_records
from gradveil.learning.learner import Learner
from gradveil.metrics import duplicate_groups
from gradveil.randomness import Seed

__all__ = ["NEAREST", "Pool", "list_seed", "neighbours", "ranks_of"]

NEAREST = 32
"""Size of the list of those whose updates are nearest."""


@dataclass(frozen=True)
class Pool:
    """All candidates, in an order that tells nothing, and which of them are behind which update.

    Attributes:
        inputs: (N, ...).
        labels: (N, ...).
        groups: (N,) the first candidate it is a copy of, exactly or nearly, whatever their labels: they are one record.
        owners: (N,) whose they are; None where data have no owners.
        batches: For every update that is attacked, the candidates behind it, in their order.
    """

    inputs: Tensor
    labels: Tensor
    groups: Tensor
    owners: tuple[str, ...] | None
    batches: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, subject: Subject, size: int) -> Pool:
        """Take the attacked records, as many as fit, and others until the list has its size; exact duplicates are listed once."""
        order = order_of_records(subject.cell, subject.dataset)
        each = subject.cell.batch_size * subject.cell.clients
        attacked = order[: each * min(len(subject.targets), max(1, size // each))]
        same = _same_as(subject, [*attacked, *order[len(subject.indices) :]], attacked, size)
        kept = list(dict.fromkeys(same.values()))
        rows = [kept[i] for i in list_seed(subject).numpy("order").permutation(len(kept))]
        place = {row: new for new, row in enumerate(rows)}
        owners, inputs = subject.dataset.owners, subject.own.inputs[rows]
        return cls(
            inputs=inputs,
            labels=subject.dataset.targets[rows],
            groups=duplicate_groups(inputs),
            owners=tuple(owners[row] for row in rows) if owners else None,
            batches=tuple(
                tuple(place[same[row]] for row in attacked[start : start + each]) for start in range(0, len(attacked), each)
            ),
        )

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.inputs)

    @property
    def records(self) -> list[tuple[int, int]]:
        """Every attacked record as its update and its candidate."""
        return [(update, own) for update, batch in enumerate(self.batches) for own in batch]

    def hypotheses(self, seed: Seed, size: int) -> Hypotheses:
        """Return the list as the attacker gets it, who knows no other record of the update."""
        return Hypotheses(inputs=self.inputs, labels=self.labels, size=size, seed=seed)

    def lists(self, around: Tensor) -> Tensor:
        """Return (records, N) the list for each attacked record: those around it, but no other record of its update.

        Args:
            around: (N, N) which candidates are on the list of each.
        """
        found = torch.stack([around[own] for _, own in self.records]).clone()
        for row, (update, own) in enumerate(self.records):
            found[row, [other for other in self.batches[update] if other != own]] = False
        return found

    def alike(self) -> Tensor:
        """Return (records, N) which candidates are the attacked record itself: it and its copies."""
        own = torch.tensor([record for _, record in self.records])
        return self.groups[own][:, None] == self.groups[None]

    def ranks(self, scores: Tensor) -> list[int]:
        """Return the rank of each attacked record among the candidates on its list; ties count against the attacker.

        Args:
            scores: (records, N), of the first records or of all; minus infinity where a candidate is not on the list.
        """
        return ranks_of(scores, self.alike()[: len(scores)])

    def clusters(self, count: int) -> tuple[list[Hashable], ...]:
        """Return how the first records belong together: by update, and by owner where there are some."""
        records = self.records[:count]
        updates: list[Hashable] = [update for update, _ in records]
        return (updates, [self.owners[own] for _, own in records]) if self.owners else (updates,)

    def owner_hits(self, scores: Tensor) -> dict[str, bool]:
        """Return for every attacked owner whether any of their records has only candidates of theirs at the highest score."""
        assert self.owners is not None
        top = scores >= scores.amax(1, keepdim=True)
        hits: dict[str, bool] = {}
        for row, (_, own) in enumerate(self.records[: len(scores)]):
            hit = {self.owners[int(place)] for place in top[row].nonzero()} == {self.owners[own]}
            hits[self.owners[own]] = hits.get(self.owners[own], False) or hit
        return hits

    def owner_updates(self, count: int) -> list[int]:
        """Return the update of the first record of every owner, in the order of `owner_hits`."""
        assert self.owners is not None
        first: dict[str, int] = {}
        for update, own in self.records[:count]:
            first.setdefault(self.owners[own], update)
        return list(first.values())

    def commonest_owner(self, listed: Tensor) -> float:
        """Return how many owners are hit by who names the owner with most records on every list, as if each list were a try."""
        assert self.owners is not None
        missed: dict[str, float] = {}
        for row, (_, own) in zip(listed, self.records, strict=False):
            shown = Counter(self.owners[int(place)] for place in row.nonzero())
            missed[self.owners[own]] = missed.get(self.owners[own], 1.0) * (1 - max(shown.values()) / int(row.sum()))
        return 1 - sum(missed.values()) / len(missed)


def ranks_of(scores: Tensor, alike: Tensor) -> list[int]:
    """Return the rank of each truth; what is no number is a tie with everybody, and ties count against the attacker.

    >>> ranks_of(torch.tensor([[2.0, 1.0, float("-inf")], [float("nan"), 1.0, 2.0]]), torch.tensor([[True, False, False]] * 2))
    [1, 3]
    """
    listed = scores != float("-inf")
    own = scores.masked_fill(~alike, float("-inf")).amax(1, keepdim=True)
    ahead = ~(scores < own) & ~alike & listed
    return (1 + ahead.sum(1)).tolist()


def _same_as(subject: Subject, order: Sequence[int], attacked: Sequence[int], size: int) -> dict[int, int]:
    """Return attacked rows and others, ``size`` distinct ones, each with the first row of the same input and label."""
    first: dict[bytes, int] = {}
    found: dict[int, int] = {}
    for place, row in enumerate(order):
        if place >= len(attacked) and len(first) >= size:
            break
        key = _key(subject.own.inputs[row]) + _key(subject.dataset.targets[row])
        found[row] = first.setdefault(key, row)
    return found


def _key(value: Tensor) -> bytes:
    return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).digest()


def neighbours(learners: Sequence[Learner], pool: Pool, count: int, seed: Seed) -> Tensor:
    """Return (N, N) for every candidate itself and those whose undefended updates are nearest to its own, ``count`` in all.

    Distances are those of random sketches of the updates, true to a few parts in a hundred, so that no two updates of a large
    network need be held at once.
    """
    sketch = Sketch()
    each = zip(pool.inputs, pool.labels, strict=True)
    found = torch.stack([sketch.of(single_updates(learners, inputs, labels), seed) for inputs, labels in each])
    nearest = torch.cdist(found, found).fill_diagonal_(-1.0).topk(min(count, len(pool)), largest=False).indices
    return torch.zeros(len(pool), len(pool), dtype=torch.bool).scatter(1, nearest, True)


def list_seed(subject: Subject) -> Seed:
    """Return the root of all that lists of a cell draw."""
    return Seed(subject.cell.seed).child("list")
