"""Who owns which record: five ways to deal a data set out to clients.

A partition is a frozen dataclass that is its own configuration, ``dirichlet(alpha=0.5)``. `split` gives one list of record
indices per client; no record appears twice, no client is left without records, and equal seeds give equal splits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gradveil.data.base import Dataset
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.registry import Card, Registry
from gradveil.study.checks import is_number, is_whole

__all__ = ["IID", "PARTITIONS", "ByOwner", "ClassBalance", "Dirichlet", "Partition", "Sizes"]

TRIES = 200
HOSPITALS = (8, 32, 128, 512, 8, 32, 128, 512, 1)
"""Records of the nine clients in Hatamizadeh et al. and the shadow paper."""


@dataclass(frozen=True)
class Partition(ABC):
    """How records are dealt out to clients."""

    card: ClassVar[Card]

    def split(self, dataset: Dataset, clients: int, seed: Seed) -> list[list[int]]:
        """Return the record indices of each client, ascending.

        Args:
            dataset: Its targets and owners decide; inputs are not looked at.
            clients: How many, at least 1.
            seed: Equal seeds give equal splits.

        Raises:
            UsageError: If some client would get nothing.
        """
        if clients < 1:
            raise UsageError(f"{clients} clients cannot share data; ask for at least 1")
        if clients > len(dataset):
            raise UsageError(f"{clients} clients cannot share {len(dataset)} records; ask for at most {len(dataset)} clients")
        return [sorted(int(row) for row in rows) for rows in self.deal(dataset, clients, seed.numpy("partition"))]

    @abstractmethod
    def deal(self, dataset: Dataset, clients: int, random: np.random.Generator) -> Sequence[Sequence[int] | NDArray[np.int64]]:
        """Return the indices of each client; ``clients`` is already checked."""


PARTITIONS: Registry[type[Partition], Card] = Registry("partition", "gradveil.data")


@PARTITIONS.register(Card(name="iid", summary="Records are shuffled and dealt out evenly."))
@dataclass(frozen=True)
class IID(Partition):
    """Shuffle, then deal out; sizes differ by at most one."""

    def deal(self, dataset: Dataset, clients: int, random: np.random.Generator) -> list[NDArray[np.int64]]:
        """Return the shuffled rows in equal parts."""
        return np.array_split(random.permutation(len(dataset)), clients)


@PARTITIONS.register(
    Card(
        name="dirichlet",
        summary="Each class is divided among the clients in proportions drawn from Dirichlet(α); small α, one-sided clients.",
        paper=(
            "Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual "
            "Classification, 2019"
        ),
        url="https://arxiv.org/abs/1909.06335",
        weakness="With small α, few records and many clients no draw leaves every client enough records; it then says so.",
    )
)
@dataclass(frozen=True)
class Dirichlet(Partition):
    """For each class c draw p ~ Dirichlet(α, …, α) over clients, and cut the shuffled records of c at the cumulated p.

    The draw is repeated until every client has ``min_size`` records, as is usual; the result is thus conditioned on that.

    Attributes:
        alpha: Concentration; the SVDefense paper uses 0.5, and infinity would be even.
        min_size: Fewest records of a client.
    """

    alpha: float = 0.5
    min_size: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        if not (is_number(self.alpha) and self.alpha > 0):
            raise UsageError(f"dirichlet: alpha is {self.alpha}; give a positive number")
        if not (is_whole(self.min_size) and self.min_size >= 1):
            raise UsageError(f"dirichlet: min_size is {self.min_size}; a client needs at least 1 record")

    def deal(self, dataset: Dataset, clients: int, random: np.random.Generator) -> list[NDArray[np.int64]]:
        """Draw until no client is too small."""
        classes = [rows for rows in _rows_by_class(dataset) if len(rows)]
        for _ in range(TRIES if clients * self.min_size <= len(dataset) else 0):
            shares = random.dirichlet([self.alpha] * clients, size=len(classes))  # (classes, clients)
            cuts = [
                (np.cumsum(share)[:-1] * len(rows)).round().astype(np.int64) for share, rows in zip(shares, classes, strict=True)
            ]
            sizes = sum(np.diff(cut, prepend=0, append=len(rows)) for cut, rows in zip(cuts, classes, strict=True))
            if np.min(sizes) >= self.min_size:
                parts = [np.split(random.permutation(rows), cut) for rows, cut in zip(classes, cuts, strict=True)]
                return [np.concatenate(part) for part in zip(*parts, strict=True)]
        raise UsageError(
            f"no Dirichlet({self.alpha:g}) split of {len(dataset)} records leaves each of {clients} clients at "
            f"least {self.min_size}; raise alpha, or ask for fewer clients"
        )


@PARTITIONS.register(
    Card(
        name="sizes",
        summary="Client i gets sizes[i] records, drawn at random; by default the nine hospitals of the shadow paper.",
        paper="Hatamizadeh et al., Do Gradient Inversion Attacks Make Federated Learning Unsafe?, 2023",
        url="https://arxiv.org/abs/2202.06924",
        weakness="Records beyond the sum of the sizes are left out, unless they are scaled to the data.",
    )
)
@dataclass(frozen=True)
class Sizes(Partition):
    """Shuffle, then deal out as many records as each client is said to have.

    Attributes:
        sizes: Records of each client.
        scaled: True keeps the proportions and deals out all records, at least one to each client.
    """

    sizes: tuple[int, ...] = HOSPITALS
    scaled: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        asked: Any = self.sizes  # spelled by people, so of any type
        given = asked if isinstance(asked, (tuple, list)) else (asked,)
        if not given or not all(is_whole(size) and size >= 1 for size in given):
            raise UsageError(f"sizes: sizes is {self.sizes!r}; give whole numbers above 0, as in sizes(sizes=[8, 32, 128])")
        object.__setattr__(self, "sizes", tuple(given))

    def deal(self, dataset: Dataset, clients: int, random: np.random.Generator) -> list[NDArray[np.int64]]:
        """Cut the shuffled rows at the cumulated sizes."""
        if clients != len(self.sizes):
            raise UsageError(f"sizes: there are {len(self.sizes)} sizes for {clients} clients; ask for {len(self.sizes)} clients")
        total = sum(self.sizes)
        if total > len(dataset) and not self.scaled:
            raise UsageError(
                f"sizes: they add up to {total} and {dataset.name!r} has {len(dataset)} records; set scaled=True, or lower them"
            )
        counts = self._scaled(len(dataset)) if self.scaled else np.array(self.sizes)
        return np.split(random.permutation(len(dataset))[: counts.sum()], np.cumsum(counts)[:-1])

    def _scaled(self, records: int) -> NDArray[np.int64]:
        """Return sizes in proportion that sum to ``records``: one each, and the others by largest remainders."""
        wanted = (records - len(self.sizes)) * np.array(self.sizes) / sum(self.sizes)
        counts = 1 + np.floor(wanted).astype(np.int64)
        remainders = np.argsort(-(wanted - np.floor(wanted)), kind="stable")
        counts[remainders[: records - int(counts.sum())]] += 1
        return counts


@PARTITIONS.register(Card(name="by_owner", summary="One natural owner (patient, writer, subject) is one client."))
@dataclass(frozen=True)
class ByOwner(Partition):
    """One owner is one client; where there are more owners than clients, a random choice of owners takes part.

    Attributes:
        grouped: True deals all owners out to the clients instead, several to each, as patients to hospitals; none is left out
            or divided.
        min_size: Owners with fewer records take no part.
    """

    grouped: bool = False
    min_size: int = 1

    def deal(self, dataset: Dataset, clients: int, random: np.random.Generator) -> list[NDArray[np.int64]]:
        """Choose or group the owners."""
        if dataset.owners is None:
            raise UsageError(
                f"{dataset.name!r} does not say who owns which record; add an owner or patient column, or use iid or "
                "dirichlet(alpha=0.5)"
            )
        _, owner_of, sizes = np.unique(np.array(dataset.owners), return_inverse=True, return_counts=True)
        able = np.flatnonzero(sizes >= self.min_size)
        if clients > len(able):
            raise UsageError(
                f"{dataset.name!r} has {len(able)} owners with at least {self.min_size} records, too few for {clients} clients; "
                f"ask for at most {len(able)}"
            )
        shuffled = random.permutation(able)
        groups = np.array_split(shuffled, clients) if self.grouped else [np.array([owner]) for owner in shuffled[:clients]]
        return [np.flatnonzero(np.isin(owner_of, group)) for group in groups]


@PARTITIONS.register(
    Card(
        name="class_balance",
        summary=(
            "Each client keeps N·ρ^c records of its c-th class, in an order of classes of its own; ρ = 1 is "
            "balanced, 0 one class."
        ),
        paper="SVDefense: Effective Defense against Gradient Inversion Attacks via Singular Value Decomposition",
        weakness="Records are left out on purpose: with small ρ most of the data is unused.",
    )
)
@dataclass(frozen=True)
class ClassBalance(Partition):
    """The class balance ratio of the SVDefense paper, section V-A.

    Records are first dealt out evenly, class by class. Then each client puts its classes into a random order c = 0, 1, … and
    keeps ⌊N_c ρ^c⌋ of the N_c records it has of class c. The paper describes one pool; with ``clients=1`` this is that pool.
    It does not say how to round; we round down. Classes of which a client has no records take no place in the order, so that
    it keeps at least the whole of its first class.

    Attributes:
        rho: Ratio in [0, 1].
    """

    rho: float = 0.5

    def __post_init__(self) -> None:
        """Check the setting."""
        if not (is_number(self.rho) and 0 <= self.rho <= 1):
            raise UsageError(f"class_balance: rho is {self.rho}; give a ratio from 0 (one class) to 1 (balanced)")

    def deal(self, dataset: Dataset, clients: int, random: np.random.Generator) -> list[list[int]]:
        """Deal evenly, then thin out."""
        ordered = np.concatenate([random.permutation(rows) for rows in _rows_by_class(dataset)])
        # Dealing on from class to class keeps both the sizes and the classes of clients even to within one record.
        hands = [ordered[client::clients] for client in range(clients)]
        return [self._thin(hand, dataset.targets.numpy()[hand], random) for hand in hands]

    def _thin(self, rows: NDArray[np.int64], labels: NDArray[np.int64], random: np.random.Generator) -> list[int]:
        kept: list[int] = []
        for place, label in enumerate(random.permutation(np.unique(labels))):
            own = rows[labels == label]
            # 1e-9: ten records at ρ = 0.1 keep one, whatever 10 * 0.1 rounds to in binary.
            kept.extend(own[: math.floor(len(own) * self.rho**place + 1e-9)])
        return kept


def _rows_by_class(dataset: Dataset) -> list[NDArray[np.int64]]:
    if dataset.dense:
        raise UsageError(f"{dataset.name!r} has masks and no classes to divide by; use iid, sizes or by_owner")
    targets = dataset.targets.numpy()
    return [np.flatnonzero(targets == label) for label in range(dataset.classes)]
