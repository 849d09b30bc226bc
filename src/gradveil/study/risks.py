"""Risk without an attack, as a results folder holds it: one score per record, with and without the defense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradveil.study.fields import Fields

__all__ = ["Coefficient", "MeanError", "Risk", "RiskRecord", "RiskSide", "load_mean_error", "load_risk"]

MEANING = (
    "The theorem bounds a linearised optimal attacker's error from above, so a high score warns and a low one does not acquit."
)
"""Said wherever a score is shown; a folder may say it in its own words."""


@dataclass(frozen=True, kw_only=True)
class RiskRecord:
    """One record's score.

    Attributes:
        pseudonym: Its name.
        invre: With the defense of the cell.
        low: Least that what was not computed allows.
        high: Most.
        undefended: Without a defense.
        error: Mean squared error of the best attack on it.
    """

    pseudonym: str
    invre: float
    low: float
    high: float
    undefended: float | None
    error: float | None


@dataclass(frozen=True, kw_only=True)
class RiskSide:
    """All records with a defense, or without."""

    mean: float
    worst: float | None
    high: float | None
    mode: str
    bands: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Coefficient:
    """A correlation with its two-sided p."""

    value: float
    p: float | None


@dataclass(frozen=True, kw_only=True)
class Risk:
    """The scores of a cell, or the reason why there are none.

    Attributes:
        reason: Why there are none; empty where there are.
        meaning: What a score means, in a sentence.
        defended: With the cell's defense.
        undefended: Without.
        records: In the order of the cell's records.
        attack: Whose error stands beside the scores: informed or plain attackers.
        pearson: Correlation of score and error.
        spearman: The same of their ranks.
        n: Records behind it.
        notes: Sentences.
    """

    reason: str = ""
    meaning: str = MEANING
    defended: RiskSide | None = None
    undefended: RiskSide | None = None
    records: tuple[RiskRecord, ...] = ()
    attack: str = ""
    pearson: Coefficient | None = None
    spearman: Coefficient | None = None
    n: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MeanError:
    """The least mean squared error that any attacker can have, with its interval; ``psnr`` is that of its lower end."""

    mse: float
    low: float | None
    high: float | None
    psnr: float | None
    n: int
    smoothing: float | None


def load_mean_error(found: Fields) -> MeanError | None:
    """Return the floor under the mean error of a certificate, or None."""
    mse = found.number("mse")
    if mse is None:
        return None
    low, high, psnr = found.number("low"), found.number("high"), found.number("psnr")
    return MeanError(mse=mse, low=low, high=high, psnr=psnr, n=found.whole("n", 0) or 0, smoothing=found.number("smoothing"))


def load_risk(found: Fields) -> Risk | None:
    """Return the scores of a cell; None where the folder has none and no reason for it."""
    meaning = found.text("meaning") or MEANING
    defended = _side(found.part("defended"))
    if defended is None:
        reason = found.text("reason")
        return Risk(reason=reason, meaning=meaning) if reason else None
    told = found.part("correlation")
    return Risk(
        meaning=meaning,
        defended=defended,
        undefended=_side(found.part("undefended")),
        records=tuple(record for each in found.parts("records") if (record := _record(each)) is not None),
        attack=told.text("attack"),
        pearson=_coefficient(told.part("pearson")),
        spearman=_coefficient(told.part("spearman")),
        n=told.whole("n", 0) or 0,
        notes=found.texts("notes"),
    )


def _record(record: Fields) -> RiskRecord | None:
    value = record.number("invre")
    if value is None:
        return None
    low, high = record.number("low"), record.number("high")
    return RiskRecord(
        pseudonym=record.text("pseudonym"),
        invre=value,
        low=value if low is None else low,
        high=value if high is None else high,
        undefended=record.number("undefended"),
        error=record.number("error"),
    )


def _side(side: Fields) -> RiskSide | None:
    mean = side.number("mean")
    if mean is None:
        return None
    counts = side.part("bands")
    bands = {name: counts.whole(name, 0) or 0 for name in ("minimal", "moderate", "high")}
    return RiskSide(mean=mean, worst=side.number("worst"), high=side.number("high"), mode=side.text("mode"), bands=bands)


def _coefficient(found: Fields) -> Coefficient | None:
    value = found.number("value")
    return None if value is None else Coefficient(value=value, p=found.number("p"))
