"""Risk without an attack, as values: one score per record, with and without a defense.

`RiskResult` is what ``gradveil risk`` finds and risk.json holds; `CellRisk` is the part of an audited cell, with the error of its
attacks beside the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from gradveil.study.codec import OMITTED, Malformed, named
from gradveil.study.exposures import EXPOSURE_MEANING, Exposure

__all__ = [
    "Assessment",
    "CellRisk",
    "Coefficient",
    "Correlation",
    "RecordRisk",
    "RiskRecord",
    "RiskResult",
    "RiskScore",
    "RiskSide",
]

RISK_FORMAT = "gradveil-risk-1"
MEANING = (
    "InvRE averages the errors of linear attackers who know nothing of the data: a high score warns, a low one does not acquit, "
    "and it orders neither cuts nor records."
)
"""Said wherever a score is shown; a folder may say it in its own words."""
NO_BAND = "no value of InvRE separates hidden from exposed: it moves with α, and a defense that attacks break can score low"
"""Said wherever somebody sets a limit on it."""


@dataclass(frozen=True)
class RiskScore:
    """The risk of one record.

    Attributes:
        invre: In [0, 1]; higher is more exposed.
        score: Σ P_k τ_k with the noise terms: the expected bound on the relative squared error; lower is more exposed.
        signal: Its part without noise.
        noise_total: The expected noise term of the inverse itself, not divided by m or p.
        relative: The fixed-model variant of Appendix C: 1 / score, for comparing records under one model only.
        low: Least InvRE that what was not computed allows, where only leading singular values are known.
        high: Most.
        rank: Number of singular values above the tolerance.
        merged: Near-ties among them.
        alpha: Centre of the logistic.
        beta: Its steepness.
        gap_rule: merge, clamp or strict.
    """

    invre: float
    score: float
    signal: float
    noise_total: float
    relative: float
    low: float
    high: float
    rank: int
    merged: int
    alpha: float
    beta: float
    gap_rule: str


@dataclass(frozen=True, kw_only=True)
class RecordRisk(RiskScore):
    """One record.

    Attributes:
        row: Its row in the data.
        label: Its class; None where targets are masks.
        fisher: Fisher information leakage σ_1 / s; infinite without noise on what is sent.
        diagonal: dFIL; the same.
        mode: How the spectrum was computed.
        seconds: Time the spectrum took; of records that went together, an equal part of the time of all.
        notes: Sentences.
    """

    KEYS = (
        *("row", "label", "invre", "score", "signal", "noise_total", "relative", "low", "high", "rank", "merged"),
        *("alpha", "beta", "gap_rule", "fil", "dfil", "mode", "seconds", "notes"),
    )

    row: int
    label: int | None = None
    fisher: float = field(default=math.inf, metadata=named("fil"))
    diagonal: float = field(default=math.inf, metadata=named("dfil"))
    mode: str
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """All records under one model and one defense.

    Attributes:
        model: Spelling.
        defense: Spelling.
        records: In the order of their rows.
    """

    KEYS = (
        *("model", "defense", "mean_invre", "mean_score", "worst_invre", "most_exposed", "least_exposed"),
        *("seconds", "notes", "records"),
    )

    model: str
    defense: str
    records: tuple[RecordRisk, ...]

    @property
    def mean_invre(self) -> float:
        """Mean InvRE."""
        return sum(record.invre for record in self.records) / len(self.records)

    @property
    def mean_score(self) -> float:
        """Mean of Σ P_k τ_k, from which α is calibrated."""
        return sum(record.score for record in self.records) / len(self.records)

    @property
    def worst_invre(self) -> float:
        """The highest InvRE of any record."""
        return max(record.invre for record in self.records)

    @property
    def high(self) -> float:
        """The most that any record may score."""
        return max(record.high for record in self.records)

    @property
    def mode(self) -> str:
        """How the spectra were computed."""
        return "+".join(sorted({record.mode for record in self.records}))

    @property
    def ranked(self) -> tuple[RecordRisk, ...]:
        """Most exposed first; ties in the order of rows."""
        return tuple(sorted(self.records, key=lambda record: (-record.invre, record.row)))

    @property
    def most_exposed(self) -> list[int]:
        """Rows of the five most exposed records."""
        return [record.row for record in self.ranked[:5]]

    @property
    def least_exposed(self) -> list[int]:
        """Rows of the five least exposed records."""
        return [record.row for record in self.ranked[::-1][:5]]

    @property
    def seconds(self) -> float:
        """Time of all records."""
        return round(sum(record.seconds for record in self.records), 3)

    @property
    def notes(self) -> tuple[str, ...]:
        """Every note once."""
        return tuple(dict.fromkeys(note for record in self.records for note in record.notes))


@dataclass(frozen=True, kw_only=True)
class RiskData:
    """Whose records were scored."""

    name: str = ""
    digest: str = ""
    records: int = 0


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One model under one defense, in the order of mean exposure in dB; InvRE stands beside it and orders nothing."""

    model: str
    defense: str
    exposure: float | None = None
    mean_invre: float | None = None


@dataclass(frozen=True, kw_only=True)
class RiskResult:
    """What ``gradveil risk`` finds, and risk.json holds.

    Attributes:
        meaning: What a score means, in a sentence.
        alpha: Centre of the logistic.
        data: Whose records were scored.
        assessments: InvRE, one per model and defense; empty where it was not asked for.
        exposures: Exposure, one per model and defense, with what it means.
        notes: What is missing, in sentences.
        ranking: Least exposed first, where models were compared; those without exposure are left out; empty where not.
    """

    KEYS = ("format", "meaning", "exposure_meaning", "alpha", "data", "assessments", "exposures", "notes", "ranking")
    format = RISK_FORMAT

    meaning: str = MEANING
    alpha: float
    data: RiskData = RiskData()
    assessments: tuple[Assessment, ...]
    exposures: tuple[Exposure, ...] = field(default=(), metadata=OMITTED)
    exposure_meaning: str = EXPOSURE_MEANING
    notes: tuple[str, ...] = field(default=(), metadata=OMITTED)
    ranking: tuple[Ranked, ...] = field(default=(), metadata=OMITTED)

    def ranked(self) -> RiskResult:
        """Return the result with models and defenses in the order of exposure."""
        scores = {(each.model, each.defense): each.mean_invre for each in self.assessments}
        known = [(each.mean, each) for each in self.exposures if each.mean is not None]
        ranking = tuple(
            Ranked(model=own.model, defense=own.defense, exposure=mean, mean_invre=scores.get((own.model, own.defense)))
            for mean, own in sorted(known, key=lambda pair: pair[0])
        )
        return replace(self, ranking=ranking)


@dataclass(frozen=True, kw_only=True)
class RiskRecord:
    """One record's score in an audit.

    Attributes:
        pseudonym: Its name.
        invre: With the defense of the cell.
        low: Least that what was not computed allows.
        high: Most.
        score: What InvRE is made of; lower is more exposed.
        undefended: Without a defense.
        error: Mean squared error of the best attack on it.
        contrast: Mean squared distance of the record from the mean of records that were not attacked: known without any model.
    """

    pseudonym: str = ""
    invre: float
    low: float
    high: float
    score: float | None = None
    undefended: float | None = None
    error: float | None = None
    contrast: float | None = field(default=None, metadata=OMITTED)

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Where nothing else is said, all of the spectrum was computed."""
        known = {name: value for name, value in values.items() if value is not None}
        return {"low": known.get("invre"), "high": known.get("invre"), **known}


@dataclass(frozen=True, kw_only=True)
class RiskSide:
    """All records with a defense, or without."""

    mean: float
    worst: float | None = None
    high: float | None = None
    mode: str = ""


@dataclass(frozen=True, kw_only=True)
class Coefficient:
    """A correlation with its two-sided p."""

    value: float
    p: float | None = None


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Whether the score foretold the error; None where one side does not vary.

    Attributes:
        attack: Whose error stands beside the scores: informed or plain attackers.
        pearson: Of score and error.
        spearman: Of their ranks.
        contrast: The null: Spearman of the error with the record's contrast about the mean, which takes no model to know.
        partial: What the score adds to it: the partial rank correlation of score and error given contrast.
        n: Records behind it.
    """

    attack: str = ""
    pearson: Coefficient | None = None
    spearman: Coefficient | None = None
    contrast: Coefficient | None = field(default=None, metadata=OMITTED)
    partial: Coefficient | None = field(default=None, metadata=OMITTED)
    n: int = 0


@dataclass(frozen=True, kw_only=True)
class CellRisk:
    """The scores of a cell, or the reason why there are none.

    Attributes:
        reason: Why there are none; empty where there are.
        meaning: What a score means, in a sentence.
        alpha: Centre of the score.
        beta: Its steepness.
        gap_rule: What is done about equal singular values.
        noise_form: How noise counts.
        defended: With the cell's defense.
        undefended: Without.
        records: In the order of the cell's records.
        correlation: Of score and error.
        notes: Sentences.
    """

    BRIEF = ("reason", "meaning")

    reason: str = ""
    meaning: str = MEANING
    alpha: float | None = None
    beta: float | None = None
    gap_rule: str = ""
    noise_form: str = ""
    defended: RiskSide | None = None
    undefended: RiskSide | None = None
    records: tuple[RiskRecord, ...] = ()
    correlation: Correlation = Correlation()
    notes: tuple[str, ...] = ()

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Refuse what has neither scores nor a reason: then nothing was asked."""
        if not values.get("defended") and not values.get("reason"):
            raise Malformed("has neither scores nor a reason")
        return values
