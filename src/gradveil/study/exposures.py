"""Exposure without an attack, as values: decibels above knowing nothing, and success with a list, record by record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradveil.study.codec import OMITTED

__all__ = ["EXPOSURE_MEANING", "Decibels", "Exposure", "OwnerExposure", "PublicRecords", "RecordExposure", "Summed"]

EXPOSURE_MEANING = (
    "Exposure is how far a linear attacker with public records, told the derivative at the record, gets below the error of "
    "knowing nothing: it orders defenses and cuts, and is no bound, since better priors get more. Attained is what a regression "
    "on the same records got, told the label and nothing else; attacks decide."
)
"""Said wherever it is shown."""
WIDE = 6.0
"""Decibels between both numbers from which they are said to leave the answer open."""


@dataclass(frozen=True, kw_only=True)
class PublicRecords:
    """What the attacker is taken to know of the data.

    Attributes:
        source: Where public records are from.
        records: How many.
        rank: Directions kept of them.
        kept: Share of the variance of new records along these directions.
    """

    source: str = ""
    records: int = 0
    rank: int = 0
    kept: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Decibels:
    """How exposed one record is.

    Attributes:
        exposure: In dB above knowing nothing, the curvature of the release counted as noise.
        linear: The same of a release that is taken to be linear: where both differ, trust neither far.
        null: Mean squared error of knowing nothing but the mean of public records: the record's contrast.
        listed: Chance to be named first on a list of 256 candidates; None where the release is neither exact nor Gaussian.
        attained: What a regression on public records sent through the client got of it, in dB above that null.
        by_label: What the mean of the public records with its label gets, in the same dB: the null of ``attained``.
        rehearsed: What the regression got of public records left out, in dB above the mean of those sent with its label.
        owner: Whose it is; None where the data name no owners.
    """

    exposure: float | None = None
    linear: float | None = None
    null: float
    listed: float | None = None
    attained: float | None = field(default=None, metadata=OMITTED)
    by_label: float | None = field(default=None, metadata=OMITTED)
    rehearsed: float | None = field(default=None, metadata=OMITTED)
    owner: str | None = field(default=None, metadata=OMITTED)

    @property
    def beyond_label(self) -> float | None:
        """What the regression got beyond the better of both means: that a record is much like its class is no merit of it."""
        return None if self.attained is None else self.attained - max(0.0, self.by_label or 0.0)


@dataclass(frozen=True, kw_only=True)
class RecordExposure(Decibels):
    """One record of ``gradveil risk``.

    Attributes:
        row: Its row in the data.
        label: Its class; None where targets are masks.
        error: Mean squared error behind ``exposure``.
        seconds: Time it took.
    """

    KEYS = (
        *("row", "owner", "label", "exposure", "linear", "error", "null", "listed"),
        *("attained", "by_label", "rehearsed", "seconds"),
    )

    row: int
    label: int | None = None
    error: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OwnerExposure:
    """All records of one owner.

    Attributes:
        owner: Who.
        n: Records.
        mean: Mean exposure in dB.
        worst: Exposure of the most exposed record.
        mean_attained: Mean of what the regression got.
        worst_attained: The most it got.
    """

    owner: str
    n: int
    mean: float | None = None
    worst: float | None = None
    mean_attained: float | None = None
    worst_attained: float | None = None


@dataclass(frozen=True, kw_only=True)
class Summed:
    """Several records under one defense.

    Attributes:
        public: What the attacker is taken to know.
        records: In order.
        reason: Why there are no decibels; empty where there are.
        unlisted: Why there is no number of a list; empty where there is.
        unattained: Why nothing was learned from public records; empty where something was, or nobody asked.
    """

    public: PublicRecords = PublicRecords()
    records: tuple[Decibels, ...] = ()
    reason: str = ""
    unlisted: str = ""
    unattained: str = field(default="", metadata=OMITTED)

    @property
    def mean(self) -> float | None:
        """Mean exposure in dB."""
        return _mean([record.exposure for record in self.records])

    @property
    def worst(self) -> float | None:
        """Exposure of the most exposed record."""
        return _most([record.exposure for record in self.records])

    @property
    def mean_linear(self) -> float | None:
        """Mean exposure of a release that is taken to be linear."""
        return _mean([record.linear for record in self.records])

    @property
    def mean_listed(self) -> float | None:
        """Mean chance to be named on a list."""
        return _mean([record.listed for record in self.records])

    @property
    def mean_attained(self) -> float | None:
        """Mean of what the regression got, in dB above knowing nothing."""
        return _mean([record.attained for record in self.records])

    @property
    def worst_attained(self) -> float | None:
        """The most that the regression got of any record."""
        return _most([record.attained for record in self.records])

    @property
    def mean_by_label(self) -> float | None:
        """Mean of what labels alone give."""
        return _mean([record.by_label for record in self.records])

    @property
    def mean_rehearsed(self) -> float | None:
        """Mean of what the regression got of public records, over the labels of the records."""
        return _mean([record.rehearsed for record in self.records])

    @property
    def owners(self) -> tuple[OwnerExposure, ...]:
        """Every owner, the most exposed first; empty where the data name none."""
        found: dict[str, list[Decibels]] = {}
        for record in self.records:
            if record.owner is not None:
                found.setdefault(record.owner, []).append(record)
        owners = [_owner(name, own) for name, own in found.items()]
        return tuple(sorted(owners, key=lambda each: (-_rank(each.worst), -_rank(each.worst_attained), each.owner)))

    @property
    def range(self) -> str:
        """How far the regression stays behind the oracle, where that is so far that neither is the answer; else empty."""
        if self.mean is None or self.mean_attained is None or self.mean - self.mean_attained <= WIDE:
            return ""
        return (
            f"the range is wide: a regression attains {self.mean_attained:.1f} dB, and who is told the derivative at the record "
            f"{self.mean:.1f}; what attackers can do lies anywhere between, or above; attack it"
        )

    @property
    def doubt(self) -> str:
        """What a reader should know where both numbers lie far apart; empty where they do not."""
        if self.mean is None or self.mean_linear is None or self.mean_linear - self.mean <= WIDE:
            return ""
        return (
            f"the release bends: {self.mean:.1f} dB count that as noise, {self.mean_linear:.1f} not at all, and an attacker who "
            "searches near the truth may get anything between; attack it"
        )


@dataclass(frozen=True, kw_only=True)
class Exposure(Summed):
    """All records under one model and one defense.

    Attributes:
        model: Spelling.
        defense: Spelling.
        records: In the order of their rows.
    """

    KEYS = (
        *("model", "defense", "mean", "worst", "mean_linear", "mean_listed"),
        *("mean_attained", "worst_attained", "mean_by_label", "mean_rehearsed"),
        *("public", "reason", "unlisted", "unattained", "range", "doubt", "seconds", "owners", "records"),
    )

    model: str
    defense: str
    records: tuple[RecordExposure, ...] = ()

    @property
    def seconds(self) -> float:
        """Time of all records."""
        return round(sum(record.seconds for record in self.records), 3)


def _owner(name: str, own: Sequence[Decibels]) -> OwnerExposure:
    exposures, attained = [record.exposure for record in own], [record.attained for record in own]
    return OwnerExposure(
        owner=name,
        n=len(own),
        mean=_mean(exposures),
        worst=_most(exposures),
        mean_attained=_mean(attained),
        worst_attained=_most(attained),
    )


def _rank(value: float | None) -> float:
    return -math.inf if value is None else value


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
