"""Exposure without an attack, as values: decibels above knowing nothing, and success with a list, record by record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EXPOSURE_MEANING", "Decibels", "Exposure", "PublicRecords", "RecordExposure", "Summed"]

EXPOSURE_MEANING = (
    "Exposure is how far a linear attacker with public records, told the derivative at the record, gets below the error of "
    "knowing nothing: it orders defenses and cuts, and is no bound, since better priors get more; attacks decide."
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
    """

    exposure: float | None = None
    linear: float | None = None
    null: float
    listed: float | None = None


@dataclass(frozen=True, kw_only=True)
class RecordExposure(Decibels):
    """One record of ``gradveil risk``.

    Attributes:
        row: Its row in the data.
        label: Its class; None where targets are masks.
        error: Mean squared error behind ``exposure``.
        seconds: Time it took.
    """

    KEYS = ("row", "label", "exposure", "linear", "error", "null", "listed", "seconds")

    row: int
    label: int | None = None
    error: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Summed:
    """Several records under one defense.

    Attributes:
        public: What the attacker is taken to know.
        records: In order.
        reason: Why there are no decibels; empty where there are.
        unlisted: Why there is no number of a list; empty where there is.
    """

    public: PublicRecords = PublicRecords()
    records: tuple[Decibels, ...] = ()
    reason: str = ""
    unlisted: str = ""

    @property
    def mean(self) -> float | None:
        """Mean exposure in dB."""
        return _mean([record.exposure for record in self.records])

    @property
    def worst(self) -> float | None:
        """Exposure of the most exposed record."""
        return max((record.exposure for record in self.records if record.exposure is not None), default=None)

    @property
    def mean_linear(self) -> float | None:
        """Mean exposure of a release that is taken to be linear."""
        return _mean([record.linear for record in self.records])

    @property
    def mean_listed(self) -> float | None:
        """Mean chance to be named on a list."""
        return _mean([record.listed for record in self.records])

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
        *("public", "reason", "unlisted", "doubt", "seconds", "records"),
    )

    model: str
    defense: str
    records: tuple[RecordExposure, ...] = ()

    @property
    def seconds(self) -> float:
        """Time of all records."""
        return round(sum(record.seconds for record in self.records), 3)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
