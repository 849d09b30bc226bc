"""InvRE and its companions of each record of a user, per defense: the score of the paper, without running an attack.

What a defense does enters in three ways, all taken from the attacker who knows it (`Defense.adversary`):

* what he compares with (masks, projections, clipped and adapted gradients) decides whose Jacobian is taken;
* Gaussian noise of known strength on what is sent, or on the data, enters by the error it adds to a linear attacker's inverse;
  where it has directions, as that of the InvL defenses, by its variance along each singular vector;
* what he cannot see is not counted, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.defenses import Defense, spell_defense
from gradveil.learning import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.defended import DefendedRelease, Releases, defended_release
from gradveil.risk.fisher import diagonal_leakage, fisher_leakage
from gradveil.risk.invre import BETA, risk_score
from gradveil.spectra.jacobians import Jacobian
from gradveil.spectra.spectrum import GRAM_INPUTS, Spectrum, choose_mode, records_at_once, spectra_of
from gradveil.study.risks import Assessment, RecordRisk, RiskScore

__all__ = ["Assessment", "DefendedRelease", "RecordRisk", "assess", "defended_release"]


def assess(
    learner: Learner,
    batch: Batch,
    defense: Defense,
    *,
    alpha: float,
    beta: float = BETA,
    mode: str | Callable[[Jacobian], str] = "auto",
    gap_rule: str = "merge",
    noise_form: str = "inverse",
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
        noise_form: inverse or paper; see `gradveil.risk.invre.risk_score`.
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
    return Assessment(model=model, defense=spell_defense(defense), records=tuple(found))


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
    noisy = bool(release.data_noise or release.shared_noise or release.directed)
    if mode == "auto" and chosen == "leading" and noisy and release.jacobian.inputs <= GRAM_INPUTS:
        chosen = "gram"  # leading values say nothing about noise
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
        **vars(score),
        row=row,
        label=int(target) if target.ndim == 0 else None,
        fisher=fisher_leakage(measured, release.shared_noise),
        diagonal=diagonal_leakage(measured, release.shared_noise),
        mode=measured.mode,
        seconds=round(measured.seconds, 3),
        notes=(*release.notes, *measured.notes, *([flat] if measured.energy == 0 else [])),
    )
