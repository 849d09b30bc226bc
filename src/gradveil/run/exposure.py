"""How exposed each record is, without running an attack: what ``gradveil risk`` computes, as a function.

found = assess_risk(Cell(data="scans.npz", model="net.py:make", records=32), defenses=["gaussian_noise(std=0.01)"])
found.result.exposures[0].mean
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from gradveil.attacks.kernel_regression import KernelRegression
from gradveil.audit.attained import attained
from gradveil.audit.materials import Materials
from gradveil.audit.party import own_data
from gradveil.audit.scene import build_learner, build_subject
from gradveil.audit.state import order_of_records
from gradveil.data import Dataset
from gradveil.errors import GradveilError, UsageError
from gradveil.randomness import Seed
from gradveil.risk.calibration import Calibration, calibrate, read_alpha
from gradveil.risk.exposure import assess
from gradveil.risk.invloss import MEANING
from gradveil.risk.invre import BLIND_TO_NOISE
from gradveil.risk.oracle import expose
from gradveil.run.public_records import PRIORS, PublicSource
from gradveil.run.vertical_grid import fitting_cells
from gradveil.study.cell import HORIZONTAL, Cell
from gradveil.study.checks import check_choice
from gradveil.study.exposures import Exposure
from gradveil.study.risks import RiskData, RiskResult
from gradveil.tensors import find_device

__all__ = ["MODES", "RiskRun", "assess_risk"]

REGRESSION = KernelRegression(records=400, seconds=5.0)
"""At most three times as long for all labels together."""
MODES = ("auto", "dense", "gram", "leading", "off")
Told = Callable[[str, int], None]


class _About(TypedDict):
    """What both scores of a batch are told beside it."""

    model: str
    rows: Sequence[int]
    seed: Seed
    progress: Callable[[int], None] | None


@dataclass(frozen=True)
class RiskRun:
    """Scores, and what they are about.

    Attributes:
        result: One assessment per model, cut and defense; the undefended one of a model comes first.
        dataset: Whose records were scored.
        cell: What was asked.
    """

    result: RiskResult
    dataset: Dataset
    cell: Cell

    def calibration(self) -> Calibration:
        """Return the mean undefended score with its provenance, for scores of other records to be centred at."""
        if not self.result.assessments:
            raise UsageError("α is the mean score of undefended records, and InvRE is off; leave --mode out")
        first, data, cell = self.result.assessments[0], self.dataset, self.cell
        return calibrate(first, data=data.name, digest=data.digest(), weights=cell.weights, seed=cell.seed)


def assess_risk(
    cell: Cell,
    *,
    models: Sequence[str] = (),
    cuts: Sequence[str] = (HORIZONTAL,),
    defenses: Sequence[str] = (),
    mode: str = "auto",
    noise_form: str = "inverse",
    alpha: float | None = None,
    prior: str = "auto",
    rank: int | None = None,
    learn: bool = True,
    ranked: bool = False,
    on_record: Told | None = None,
) -> RiskRun:
    """Score the records of a cell under every model, cut and defense; no defense is always among them.

    Args:
        cell: Data, model, weights, loss, local steps, parts, number of records, seed and device.
        models: Spellings to compare; the cell's own where none is named.
        cuts: Where models are cut; ``none`` is the update of the whole model.
        defenses: Spellings to compare with no defense.
        mode: How spectra are computed; ``off`` leaves InvRE out.
        noise_form: How noise counts.
        alpha: Centre of the score; None takes that of the package.
        prior: Where public records are from: ``same`` (the data that are not scored), ``other`` (built-in photographs), ``none``
            (draws of a law that says next to nothing), ``off`` for no exposure, ``auto`` for the first where there are enough.
        rank: Directions kept of the public records; None takes 256 where there are enough of them.
        learn: Whether a regression on the public records shows what an attacker attains; a few seconds a defense.
        ranked: Whether models and cuts are ranked, least exposed first.
        on_record: Told what is scored and how many records are done.

    Raises:
        UsageError: One sentence about what does not fit.
    """
    check_choice("", "mode", mode, MODES)
    check_choice("", "prior", prior, PRIORS)
    models = tuple(models) or (cell.model,)
    if cell.weights and len(models) > 1:
        raise UsageError("--weights belong to one model; score models with weights one at a time")
    places = _places(cuts, cell)
    cell, materials, centre = (
        cell.replace(device=find_device(cell.device)),
        Materials(),
        read_alpha(None) if alpha is None else alpha,
    )
    dataset = materials.dataset(cell)
    if cell.records > len(dataset):
        raise UsageError(f"--records is {cell.records} and {dataset.name!r} has {len(dataset)}; lower it")
    order = order_of_records(cell, dataset)
    rows = sorted(order[: cell.records])
    public = PublicSource(dataset, rows, order[cell.records :], prior, rank)
    grid = [
        cell.replace(model=model, defense=name, **place)
        for model in models
        for place in places
        for name in dict.fromkeys(["none", *defenses])
    ]
    found, exposures, notes = [], [], []
    for each in fitting_cells(grid, materials):
        defense = materials.defense(each.defense)
        name = f"{each.model} · {each.cut}" if each.cut else each.model
        learner, batch = build_learner(each, dataset, defense, materials), own_data(each, dataset).batch(rows)
        told = _counter(on_record, f"{name} · {each.defense}")
        about: _About = {"model": name, "rows": rows, "seed": Seed(cell.seed), "progress": told}
        if mode != "off":
            try:
                found.append(assess(learner, batch, defense, mode=mode, alpha=centre, noise_form=noise_form, **about))
            except UsageError as error:
                if mode != "auto" or str(error) != BLIND_TO_NOISE:
                    raise
                notes.append(f"no InvRE of {name} under {each.defense}: {error}")
        if prior != "off":
            known = public.prior(each)
            if known is None:
                notes.append(public.missing)
            else:
                scored = expose(learner, batch, defense, prior=known, others=public.others(each), **about)
                exposures.append(_told(scored, each, dataset, materials, public if learn else None))
    data = RiskData(name=dataset.name, digest=dataset.digest(), records=len(rows))
    result = RiskResult(
        meaning=MEANING,
        alpha=centre,
        data=data,
        assessments=tuple(found),
        exposures=tuple(exposures),
        notes=tuple(dict.fromkeys(notes)),
    )
    return RiskRun(result.ranked() if ranked or len(models) * len(places) > 1 else result, dataset, cell)


def _told(scored: Exposure, cell: Cell, dataset: Dataset, materials: Materials, public: PublicSource | None) -> Exposure:
    """Return exposures with the owners of the records, and with what a regression attains of them."""
    owners = dataset.owners
    records = [replace(each, owner=owners[each.row] if owners else None) for each in scored.records]
    known = None if public is None else public.records(cell)
    if known is None:
        return replace(scored, records=tuple(records))
    begun = time.perf_counter()
    try:
        subject = build_subject(cell.replace(known_labels=True), dataset, 0, materials)
        learned = attained(subject, subject.context(1), known, attack=REGRESSION)
    except GradveilError as error:
        return replace(scored, records=tuple(records), unattained=str(error))
    places = {row: place for place, row in enumerate(subject.indices)}
    each_took = (time.perf_counter() - begun) / len(records)
    found = tuple(
        replace(own, seconds=round(own.seconds + each_took, 3), **learned.of(places[own.row], own.null)) for own in records
    )
    return replace(scored, records=found, unattained=learned.reason)


def _places(cuts: Sequence[str], cell: Cell) -> list[dict[str, str | int]]:
    """Return what each cut sets in a cell; ``none`` is no cut, and then nobody owns a part."""
    if cell.party < 0:
        raise UsageError(f"--party is {cell.party}; count parties from 0")
    if (cell.parts != "whole" or cell.party) and not set(cuts) - {HORIZONTAL}:
        raise UsageError("--parts and --party are for cut models; add --cut, as in --cut cut1, or leave them out")
    return [{"cut": each} if each != HORIZONTAL else {"parts": "whole", "party": 0} for each in cuts]


def _counter(told: Told | None, name: str) -> Callable[[int], None] | None:
    return None if told is None else lambda done: told(name, done)
