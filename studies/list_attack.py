"""How many of our published defenses fall to an attacker who holds a list, and how near that attacker comes to certificates.

No plan says it: nothing is reconstructed here. One release of each of 256 records is ranked against all 256 by the attacker
who only runs the client and by the one with the defense's own adversary model (docs/levels.md). Certificates are compared with
many releases of every candidate, which an audit does not make.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gradveil.attacks.listing import own_evidence
from gradveil.audit.certified import certificate_of_cell
from gradveil.audit.list_level import measure_lists
from gradveil.audit.lists import Pool, list_seed
from gradveil.audit.scene import build_subject, load_cell_data
from gradveil.audit.sensitivity import first_among
from gradveil.defenses.base import ClientView
from gradveil.metrics import wilson
from gradveil.records import Update
from gradveil.study.cell import Cell
from gradveil.study.codec import encode
from studies.shared import MISSING, short, slug, table

FALLS = 0.5
"""Share named on a list of 256 from which a defense counts as fallen to it."""
CONFIDENCE = 0.999


def _rows(settings: SimpleNamespace) -> dict[str, tuple[str, str]]:
    """Return data set and defense by unit."""
    return {f"{Path(data).stem}/{slug(spelling)}": (data, spelling) for data in settings.data for spelling in settings.defenses}


def units(settings: SimpleNamespace) -> list[str]:
    """Name every defense on every data set, and every strength of noise that has a certificate."""
    return [*_rows(settings), *(f"certificate/{std}" for std in settings.noise)]


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Measure one unit."""
    if unit.startswith("certificate/"):
        return _certificate(float(unit.partition("/")[2]), settings)
    data, spelling = _rows(settings)[unit]
    own = {"records": settings.records} | settings.fewer.get(spelling, {})
    cell = Cell(data=data, model=settings.model, defense=spelling, device=settings.device, **own)
    found = measure_lists(build_subject(cell, load_cell_data(cell), 0), settings.size)
    return {"name": settings.defenses[spelling], "data": Path(data).stem, "spelling": spelling, "list": encode(found)}


def _certificate(std: float, settings: SimpleNamespace) -> dict[str, Any]:
    """Let the attacker who knows the noise rank many releases of every candidate, whose gradient is taken once."""
    spelling = f"clipping(bound=1) + gaussian_noise(std={std})"
    cell = Cell(data=settings.certified, model=settings.certified_model, defense=spelling, device=settings.device, records=1)
    subject = build_subject(cell, load_cell_data(cell), 0)
    pool, learner, seed = Pool.of(subject, settings.size), subject.learner, list_seed(subject).child("releases")
    observed = subject.targets[0].observation
    seen = []
    for row, (inputs, labels) in enumerate(zip(pool.inputs.split(1), pool.labels.split(1), strict=True)):
        raw = Update(learner.update(inputs.to(cell.device), labels.to(cell.device)), examples=1)
        for draw in range(settings.releases):
            view = ClientView(learner=learner, seed=seed.child(row, draw))
            sent, _ = subject.defense.protect_update(raw, view, {})
            seen.append(observed.replace(updates=(sent,)))
    evidence = own_evidence(seen, pool.hypotheses(seed, 1), subject.context(1), own=0)
    truth = torch.arange(len(pool)).repeat_interleave(settings.releases)
    everyone = torch.ones(len(pool), len(pool), dtype=torch.bool)
    scores = evidence.ranking(everyone[truth], everyone).scores
    hits = (scores >= scores.gather(1, truth[:, None])).sum(1) == 1
    bound = certificate_of_cell(subject).identified
    return {"std": std, "bound": bound, "candidates": len(pool), "count": int(hits.sum()), "n": len(hits)}


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show one table a data set, one of certificates, and who falls."""
    rows = [each for each in documents.values() if "list" in each]
    sets = dict.fromkeys(each["data"] for each in rows)
    found = {name: _table([each for each in rows if each["data"] == name]) for name in sets}
    certified = sorted((each for each in documents.values() if "std" in each), key=lambda each: float(each["std"]))
    return {**found, "certificates": _certificates(certified), "falls": _falls(rows)}


def _table(rows: list[dict[str, Any]]) -> str:
    head = "defense | list of | generic | own | null | same label, nearest | is it there? | d′"
    body = []
    for row in rows:
        listed, level = row["list"]["lists"]["random"], row["list"]
        reached = {each["attacker"]: each["share"] for each in listed["reached"]}
        others = [_percent(level["lists"][kind]["share"]["value"]) for kind in ("same_label", "nearest")]
        body.append(
            [
                *(row["name"], listed["size"], _share(reached.get("generic")), _share(reached.get("own"))),
                *(_percent(listed["null"]["value"], 1), " · ".join(others)),
                *(_percent(level["presence"]["share"]["value"]), _sensitivity(listed["sensitivity"])),
            ]
        )
    return table(head, body)


def _share(share: Mapping[str, Any] | None) -> str:
    if share is None:
        return MISSING
    return f"{share['count']} of {share['n']} ({_percent(share['low'])[:-2]}–{_percent(share['high'])})"


def _percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def _sensitivity(found: Mapping[str, Any]) -> str:
    return f"above {found['low']:.1f}" if found["d"] is None else f"{found['d']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def _certificates(rows: list[dict[str, Any]]) -> str:
    head = f"σ | no attacker exceeds | orthogonal | list | {_percent(CONFIDENCE, 1)} interval | releases"
    body = []
    for row in rows:
        low, high = wilson(row["count"], row["n"], CONFIDENCE)
        share = row["count"] / row["n"]
        interval = f"{_percent(low, 1)[:-2]}–{_percent(high, 1)}"
        orthogonal = first_among(row["candidates"], 1 / row["std"])
        shares = [_percent(each, 1) for each in (row["bound"], orthogonal, share)]
        body.append([short(row["std"], 1), *shares, interval, row["n"]])
    return table(head, body)


def _falls(rows: list[dict[str, Any]]) -> str:
    """Say how many defenses lose at least half of the records on every data set, to anyone and to the generic attacker alone."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["name"] != "none":
            by_name.setdefault(row["name"], []).append(row["list"]["lists"]["random"])
    fallen = [name for name, each in by_name.items() if all(one["share"]["value"] >= FALLS for one in each)]
    alone = [name for name, each in by_name.items() if all(one["reached"][0]["share"]["value"] >= FALLS for one in each)]
    held = ", ".join(name for name in by_name if name not in fallen)
    return (
        f"Of {len(by_name)} defenses {len(fallen)} fall to a list: at least half of the records are named on every data set "
        f"({len(alone)} to the generic attacker alone). Not fallen: {held}.\n"
    )
