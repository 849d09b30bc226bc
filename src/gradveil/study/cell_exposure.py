"""Exposure of the records of an audited cell, beside what its attacks got of them above their own nulls."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradveil.study.exposures import EXPOSURE_MEANING, Decibels, Summed
from gradveil.study.risks import Correlation

__all__ = ["CellExposure", "ExposedRecord"]


@dataclass(frozen=True, kw_only=True)
class ExposedRecord(Decibels):
    """One attacked record.

    Attributes:
        pseudonym: Its name.
        gain: What the best attack got of it, in dB above its own null: above the mean of public records.
    """

    KEYS = (*("pseudonym", "owner", "exposure", "linear", "null", "listed", "attained", "by_label", "rehearsed", "gain"),)

    pseudonym: str = ""
    gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class CellExposure(Summed):
    """The exposure of a cell's records, or why there is none.

    Attributes:
        meaning: What it means, in a sentence.
        records: In the order of the cell's records.
        correlation: Of exposure and gain: positive as it should be; its null is the gain with the contrast alone.
        notes: What the setting means for the numbers, in sentences.
    """

    KEYS = (
        *("meaning", "mean", "worst", "mean_linear", "mean_listed", "mean_gain"),
        *("mean_attained", "worst_attained", "mean_by_label", "mean_rehearsed"),
        *("public", "reason", "unlisted", "unattained", "range", "doubt", "owners", "records", "correlation", "notes"),
    )

    meaning: str = EXPOSURE_MEANING
    records: tuple[ExposedRecord, ...] = ()
    correlation: Correlation = field(default_factory=Correlation)
    notes: tuple[str, ...] = ()

    @property
    def mean_gain(self) -> float | None:
        """Mean gain of the best attack above the records' own nulls."""
        known = [record.gain for record in self.records if record.gain is not None]
        return sum(known) / len(known) if known else None
