"""How exposed each record of a user is, without running an attack: InvRE and its companions, per record and defense.

What a defense does enters in three ways, all taken from the attacker who knows it (`Defense.adversary`):

* what he compares with (masks, projections, clipped and adapted gradients) decides whose Jacobian is taken;
* Gaussian noise of known strength on what is sent enters by Theorem 3, noise on the data by Theorem 2; where it has directions,
  as that of the InvL defenses, by its variance along each singular vector;
* what he cannot see is not counted, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradveil.defenses import Defense, spell_defense
from gradveil.learning import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.defended import DefendedRelease, Releases, defended_release
from gradveil.risk.fisher import diagonal_leakage, fisher_leakage
from gradveil.risk.invre import BETA, RiskScore, risk_score
from gradveil.spectra.jacobians import Jacobian
from gradveil.spectra.spectrum import Spectrum, choose_mode, records_at_once, spectra_of

__all__ = ["Assessment", "DefendedRelease", "RecordRisk", "assess", "defended_release"]


@dataclass(frozen=True)
class RecordRisk:
    """One record.

    Attributes:
        row: Its row in the data.
        label: Its class; None where targets are masks.
        risk: InvRE with its parts.
        fisher: Fisher information leakage σ_1 / s; infinite without noise on what is sent.
        diagonal: dFIL; the same.
        mode: How the spectrum was computed.
        seconds: Time the spectrum took; of records that went together, an equal part of the time of all.
        notes: Sentences.
    """

    row: int
    label: int | None
    risk: RiskScore
    fisher: float
    diagonal: float
    mode: str
    seconds: float
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values; leakage without noise, which is infinite, becomes None."""
        finite = {
            name: value if math.isfinite(value) else None for name, value in (("fil", self.fisher), ("dfil", self.diagonal))
        }
        told = {"mode": self.mode, "seconds": round(self.seconds, 3), "notes": list(self.notes)}
        return {"row": self.row, "label": self.label, **asdict(self.risk), **finite, **told}


@dataclass(frozen=True)
class Assessment:
    """All records under one model and one defense.

    Attributes:
        model: Spelling.
        defense: Spelling.
        records: In the order of their rows.
    """

    model: str
    defense: str
    records: tuple[RecordRisk, ...]

    @property
    def mean(self) -> float:
        """Mean InvRE."""
        return sum(record.risk.invre for record in self.records) / len(self.records)

    @property
    def mean_score(self) -> float:
        """Mean of Σ P_k τ_k, from which α is calibrated."""
        return sum(record.risk.score for record in self.records) / len(self.records)

    @property
    def worst(self) -> RecordRisk:
        """The record with the highest InvRE."""
        return max(self.records, key=lambda record: record.risk.invre)

    @property
    def ranked(self) -> tuple[RecordRisk, ...]:
        """Most exposed first; ties in the order of rows."""
        return tuple(sorted(self.records, key=lambda record: (-record.risk.invre, record.row)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Every note once."""
        return tuple(dict.fromkeys(note for record in self.records for note in record.notes))

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        bands = [record.risk.band for record in self.records]
        return {
            "model": self.model,
            "defense": self.defense,
            "mean_invre": self.mean,
            "mean_score": self.mean_score,
            "worst_invre": self.worst.risk.invre,
            "bands": {name: bands.count(name) for name in ("minimal", "moderate", "high")},
            "most_exposed": [record.row for record in self.ranked[:5]],
            "least_exposed": [record.row for record in self.ranked[::-1][:5]],
            "seconds": round(sum(record.seconds for record in self.records), 3),
            "notes": list(self.notes),
            "records": [record.as_dict() for record in self.records],
        }


def assess(
    learner: Learner,
    batch: Batch,
    defense: Defense,
    *,
    alpha: float,
    beta: float = BETA,
    mode: str | Callable[[Jacobian], str] = "auto",
    gap_rule: str = "merge",
    noise_form: str = "paper",
    model: str = "",
    rows: Sequence[int] | None = None,
    seed: Seed | None = None,
    progress: Callable[[int], None] | None = None,
    known: MutableMapping[Hashable, Spectrum] | None = None,
) -> Assessment:
    """Return the risk of every record of a batch, each by itself; on a GPU several records go through one program.

    Args:
        learner: The client's training, with the model as the defense adapts it.
        batch: The records.
        defense: What protects them.
        alpha: Centre of the logistic; see `gradveil.risk.calibration`.
        beta: Its steepness.
        mode: auto, dense, gram or leading, or a function that chooses one for a Jacobian.
        gap_rule: merge, clamp or strict.
        noise_form: paper or inverse; see `gradveil.risk.invre.risk_score`.
        model: Spelling, for the record.
        rows: Rows of the records in their data set.
        seed: Root of all randomness.
        progress: Called with the number of finished records.
        known: Spectra of this learner's undefended updates, by row: read where one is there, filled where not. Defenses that
            only add noise leave the Jacobian as it is, so one decomposition serves all of them.
    """
    seed = seed or Seed(0)
    releases = Releases(learner, defense)
    known = {} if known is None else known
    found: list[RecordRisk] = []
    waiting: list[_Taken] = []
    at_once = 0
    for index in range(len(batch)):
        row = index if rows is None else rows[index]
        waiting.append(_take(releases, batch, index, row, seed.child("risk", index), mode))
        at_once = at_once or records_at_once(waiting[0].release.jacobian, waiting[0].mode)
        if len(waiting) < at_once and index + 1 < len(batch):
            continue
        for taken, measured in zip(waiting, _spectra(waiting, known), strict=True):
            score = risk_score(
                measured,
                alpha=alpha,
                beta=beta,
                gap_rule=gap_rule,
                data_noise=taken.release.noise_on("data", measured),
                shared_noise=taken.release.noise_on("shared", measured),
                noise_form=noise_form,
            )
            found.append(_record(taken.row, batch.targets[len(found)], taken.release, measured, score))
            if progress is not None:
                progress(len(found))
        waiting = []
    return Assessment(model, spell_defense(defense), tuple(found))


@dataclass(frozen=True, eq=False)
class _Taken:
    """A record's release, before its spectrum."""

    row: int
    seed: Seed
    release: DefendedRelease
    mode: str


def _take(releases: Releases, batch: Batch, index: int, row: int, seed: Seed, mode: str | Callable[[Jacobian], str]) -> _Taken:
    release = releases.of(batch.inputs[index], batch.targets[index], seed, torch.float64)
    chosen = mode(release.jacobian) if callable(mode) else choose_mode(release.jacobian) if mode == "auto" else mode
    if chosen == "leading":
        # Single precision suffices: what Lanczos needs of a product is far below the error of the extrapolated tail.
        release = releases.of(batch.inputs[index], batch.targets[index], seed, torch.float32)
    return _Taken(row, seed, release, chosen)


def _spectra(waiting: Sequence[_Taken], known: MutableMapping[Hashable, Spectrum]) -> list[Spectrum]:
    """Return the spectra of releases, those in ``known`` from there; undefended ones are added to it."""
    found = {
        place: known[each.row, each.mode]
        for place, each in enumerate(waiting)
        if each.release.plain and (each.row, each.mode) in known
    }
    for mode in dict.fromkeys(each.mode for each in waiting):
        places = [place for place, each in enumerate(waiting) if each.mode == mode and place not in found]
        chosen = [waiting[place] for place in places]
        if not places:
            continue
        measured = spectra_of([each.release.jacobian for each in chosen], mode=mode, seeds=[each.seed for each in chosen])
        found |= dict(zip(places, measured, strict=True))
        known.update({(each.row, mode): own for each, own in zip(chosen, measured, strict=True) if each.release.plain})
    return [found[place] for place in range(len(waiting))]


def _record(row: int, target: Tensor, release: DefendedRelease, measured: Spectrum, score: RiskScore) -> RecordRisk:
    flat = "the input is black: its energy is zero, so the score says nothing about it"
    return RecordRisk(
        row=row,
        label=int(target) if target.ndim == 0 else None,
        risk=score,
        fisher=fisher_leakage(measured, release.shared_noise),
        diagonal=diagonal_leakage(measured, release.shared_noise),
        mode=measured.mode,
        seconds=measured.seconds,
        notes=(*release.notes, *measured.notes, *([flat] if measured.energy == 0 else [])),
    )
