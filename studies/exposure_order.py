"""Whether exposure orders what attacks get: rungs of a ladder by their means, and the records of one release given contrast.

No plan says it: exposure and attackers have the same public records, training pictures, while test pictures are attacked; and
both count from one null, the mean of public pictures of the record's label, or of all where an embedding tells no label. The
best attack of a release is the one with the largest mean gain over that null, by the truth.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from gradveil.attacks.base import Attack, AttackContext, PublicRecords, launch
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.attacks.kernel_regression import KernelRegression
from gradveil.attacks.linear_map import LinearMap
from gradveil.attacks.wiener import Wiener
from gradveil.audit.risks import correlate
from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.data import Dataset
from gradveil.errors import UsageError
from gradveil.metrics.mse import mean_squared_error
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk import Prior, public_prior
from gradveil.risk.oracle import expose
from gradveil.study.cell import Cell
from studies.shared import slug, table

RESAMPLES = 1000
WIDE = 2.0
"""Decibels between the tenth and the ninetieth of a hundred records above which a release can order them."""
OF_FILE = "trained-"
"""Before the name of a cut: with the weights of the file."""
NAMES = {"kernel_regression": "regression", "wiener": "Wiener", "linear_map": "map", "inverting_gradients": "search"}
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclasses.dataclass(frozen=True)
class Release:
    """What is sent, of which network, and how many records are looked at.

    Attributes:
        place: Name of a network in the settings.
        ladder: Which ladder it is a rung of; empty where records of the one release are ordered.
        defense: A spelling.
        cut: Of a model that is cut.
        trained: Whether the weights are those of the file.
        records: How many.
    """

    place: str
    ladder: str
    defense: str = "none"
    cut: str = ""
    trained: bool = False
    records: int = 0

    @property
    def unit(self) -> str:
        """Its name among the units."""
        what = f"{'trained-' * self.trained}{self.cut}" if self.cut else slug(self.defense)
        return "/".join([self.place, slug(self.ladder) or "records", what])


def _releases(settings: SimpleNamespace) -> dict[str, Release]:
    rungs = [
        Release(place, ladder, defense, records=settings.rung_records)
        for place in settings.laddered
        for ladder, defenses in settings.ladders.items()
        for defense in defenses
    ]
    cuts = [
        Release(place, "cuts", cut=cut.removeprefix(OF_FILE), trained=cut.startswith(OF_FILE), records=settings.rung_records)
        for place, own in settings.cuts.items()
        for cut in own
    ]
    single = [Release(ladder="", records=settings.records, **own) for own in settings.releases]
    return {each.unit: each for each in (*rungs, *cuts, *single)}


def units(settings: SimpleNamespace) -> list[str]:
    """Name every rung, and every release whose records are ordered."""
    return list(_releases(settings))


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Measure exposure and let every attacker try the records of one release."""
    release = _releases(settings)[unit]
    subject, public = _subject(release, settings)
    prior = _prior(public, settings.rank, tells_labels=not release.cut)
    records = torch.cat([target.batch.inputs for target in subject.targets])
    labels = torch.cat([target.batch.targets for target in subject.targets])
    begun = time.process_time()
    told = expose(subject.learner, Batch(records, labels), subject.defense, prior=prior, seed=Seed(settings.seed))
    spent = {"exposure": time.process_time() - begun}
    if told.reason:
        raise UsageError(f"{unit}: {told.reason}")
    nulls = np.array([record.null for record in told.records])
    scores = {name: np.array([getattr(record, name) for record in told.records]) for name in ("exposure", "linear")}
    # What is learned of public pictures alone is the same for all units.
    context = dataclasses.replace(subject.context(10**9), public=public, memory=dict(_learned))
    gains: dict[str, Numbers] = {}
    for attack in _attacks(subject, context, release, settings):
        begun = time.process_time()
        errors = _errors(attack, subject, context, records)
        spent[attack.card.name] = time.process_time() - begun
        gains[attack.card.name] = 10 * np.log10(nulls / errors)
    _learned.update({key: value for key, value in context.memory.items() if isinstance(key, tuple) and key[0] == "linear prior"})
    best = max(gains, key=lambda name: float(gains[name].mean()))
    found = {
        **{name: getattr(release, name) for name in ("place", "ladder", "defense", "cut", "trained")},
        "n": len(nulls),
        "null": _short(-10 * np.log10(nulls)),
        "scores": {name: _short(values) for name, values in scores.items()},
        "gains": {name: _short(values) for name, values in gains.items()},
        "best": best,
        "seconds": {name: round(value / len(nulls), 2) for name, value in spent.items()},
    }
    if release.ladder:
        return found
    low, high = np.quantile(gains[best], [0.1, 0.9])
    orders = {
        name: {**{kind: _order(values, own, nulls) for kind, values in scores.items()}, "contrast": _rank(nulls, own)}
        for name, own in gains.items()
    }
    return found | {"spread": round(float(high - low), 2), "orders": orders}


def _short(values: Numbers) -> float:
    return round(float(values.mean()), 3)


def _rank(first: Numbers, second: Numbers) -> float:
    return round(float(stats.spearmanr(first, second).statistic), 3)


def _order(scores: Numbers, gains: Numbers, nulls: Numbers) -> dict[str, float]:
    """Return the partial rank correlation given contrast, with a bootstrap interval over records, and the plain one."""

    def partial(rows: Any) -> float:
        found = correlate(scores[rows].tolist(), gains[rows].tolist(), contrasts=nulls[rows].tolist()).partial
        return 0.0 if found is None else found.value

    generator = Seed(0).numpy("records drawn again")
    drawn = [partial(generator.integers(0, len(scores), len(scores))) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {
        "partial": round(partial(slice(None)), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "plain": _rank(scores, gains),
    }


def _subject(release: Release, settings: SimpleNamespace) -> tuple[Subject, PublicRecords]:
    place = settings.places[release.place]
    data = next(path for path in settings.data if Path(path).stem == place["data"])
    given: dict[str, Any] = {"weights": settings.weights, "state": "given"} if release.trained else {}
    given |= {"cut": release.cut} if release.cut else {}
    cell = Cell(
        data=data,
        model=place["model"],
        defense=release.defense,
        read="split=test",
        records=release.records,
        known_labels=not release.cut,
        seed=settings.seed,
        device=settings.device,
        lists="off",
        **given,
    )
    return build_subject(cell, _data(data, "test"), 0), _public(data, settings.per_class)


@functools.cache
def _data(path: str, split: str) -> Dataset:
    return load_cell_data(Cell(data=path, read=f"split={split}"))


@functools.cache
def _public(path: str, per_class: int) -> PublicRecords:
    """Return as many training pictures of every class, drawn by a seed."""
    train = _data(path, "train")
    order = torch.from_numpy(Seed(0).numpy("public pictures").permutation(len(train)))
    rows = torch.cat([order[train.targets[order] == label][:per_class] for label in range(train.classes)])
    rows = rows[torch.from_numpy(Seed(0).numpy("order").permutation(len(rows)))]  # a prior keeps every tenth from the fit
    return PublicRecords(train.inputs[rows], train.targets[rows], "same")


_learned: dict[Hashable, Any] = {}
_priors: dict[tuple[int, int, bool], tuple[PublicRecords, Prior]] = {}


def _prior(public: PublicRecords, rank: int, *, tells_labels: bool) -> Prior:
    key = (id(public), rank, tells_labels)
    if key not in _priors:
        labels = public.targets if tells_labels else None
        found = public_prior(public.inputs, like=public.inputs, rank=rank, source="training pictures", labels=labels)
        _priors[key] = (public, found)
    return _priors[key][1]


def _attacks(subject: Subject, context: AttackContext, release: Release, settings: SimpleNamespace) -> Sequence[Attack]:
    """Return the attackers, each in the stance that knows the defense."""
    known = "plain" if context.simulate is None else "informed"
    search: dict[str, Any] = {"steps": settings.search_steps, "signed": False, "schedule": "cosine", "start": "grey"}
    search |= {"tv": 0.25, "tv_end": 0.0025, "relative": True, "smooth_relu": True}
    search |= {"objective": "l2"} if release.cut else {}
    attacks: list[Attack] = [
        KernelRegression(records=200, stance="plain" if context.simulate is None else "simulated"),
        Wiener(stance=known),
        LinearMap(stance=known, steps=settings.map_steps),
        InvertingGradients(stance=known, **search),
    ]
    seen = subject.targets[0].observation
    return [each for each in attacks if each.applies(seen) is None and each.lacks(seen, context) is None]


def _errors(attack: Attack, subject: Subject, context: AttackContext, records: Tensor) -> Numbers:
    found = launch(attack, [target.observation for target in subject.targets], context)
    first = {each.target: each.inputs.cpu() for each in found if each.hypothesis == 0}
    guesses = torch.cat([first[place] for place in range(len(records))])
    errors: Numbers = mean_squared_error(guesses, records).double().numpy()
    return errors


def tables(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return ladders in one line each, their rungs, and how records of one release are ordered."""
    ladders: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for found in documents.values():
        if found["ladder"]:
            ladders.setdefault((found["place"], found["ladder"]), []).append(found)
    single = [found for found in documents.values() if not found["ladder"]]
    shown = {"ladders": _ladders(ladders), "rungs": _rungs(ladders)} if ladders else {}
    return shown | ({"records": _records(single)} if single else {})


def _ladders(ladders: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> str:
    rows = []
    for (place, ladder), found in ladders.items():
        gains = [each["gains"][each["best"]] for each in found]
        told = [f"{stats.spearmanr([each['scores'][kind] for each in found], gains).statistic:.2f}" for kind in _KINDS]
        off = max(abs(each["scores"]["exposure"] - gain) for each, gain in zip(found, gains, strict=True))
        rows.append([place, ladder, len(found), found[0]["n"], *told, f"{off:.1f}"])
    return table("network, data | ladder | rungs | records | rank correlation | of `linear` | farthest apart, dB", rows)


_KINDS = ("exposure", "linear")


def _rungs(ladders: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> str:
    rows = []
    for (place, ladder), found in ladders.items():
        names = [("trained, " * each["trained"] + each["cut"]) or f"`{each['defense']}`" for each in found]
        told = [" / ".join(f"{each['scores'][kind]:.1f}" for each in found) for kind in _KINDS]
        gains = " / ".join(f"{each['gains'][each['best']]:.1f}" for each in found)
        best = " / ".join(NAMES[each["best"]] for each in found)
        rows.append([place, ladder, f"{names[0]} … {names[-1]}", *told, gains, best])
    return table("network, data | ladder | rungs | exposure, dB | `linear`, dB | best attack's gain, dB | which", rows)


def _records(single: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for found in single:
        best = found["orders"][found["best"]]
        what = " ".join([found["place"], *([f"{'trained ' * found['trained']}{found['cut']}"] if found["cut"] else [])])
        told = [f"{own['partial']:+.2f} ({own['low']:+.2f} to {own['high']:+.2f})" for own in (best[kind] for kind in _KINDS)]
        others = ", ".join(
            f"{NAMES[name]} {found['gains'][name]:.1f} dB {own['exposure']['partial']:+.2f}"
            for name, own in found["orders"].items()
            if name != found["best"]
        )
        wide = f"{found['spread']:.1f}" + ("" if found["spread"] >= WIDE else " (narrow)")
        null = f"{best['contrast']:+.2f}"
        gain = f"{NAMES[found['best']]} {found['gains'][found['best']]:.1f}"
        rows.append(
            [what, f"`{found['defense']}`", found["n"], f"{found['scores']['exposure']:.1f}", gain, wide, *told, null, others]
        )
    head = "network, data | defense | n | exposure, dB | best attack's gain, dB | spread, dB | given contrast (95 %) | `linear`"
    return table(f"{head} | contrast alone | others: gain, given contrast", rows)
