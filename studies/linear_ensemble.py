"""Whether attackers with a linear prior from public records beat searches, and whether the ensemble's referee knows when.

No plan says it: signals are brought to [0, 1] channel by channel, windows that overlap are left out, and `linear_map`, which is
not in `quick-5`, stands beside that ensemble. Its searches are those of `quick-4`, each with what its own referee would choose;
what the referee of all chose, without the truth, is compared with the better of searches and linear priors, by the truth.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gradveil.attacks.base import launch
from gradveil.attacks.linear_map import LinearMap
from gradveil.audit.cell import run_cell
from gradveil.audit.judge import score
from gradveil.audit.scene import build_subject, load_cell_data
from gradveil.data import Dataset
from gradveil.metrics import median
from gradveil.study.cell import Cell
from gradveil.study.measures import Summary
from gradveil.study.results import CellResult
from studies.shared import MISSING, slug, table

LINEAR = ("kernel_regression", "wiener")
"""Recipes of the ensemble that learn from public records; all others are those of the one before."""
PHOTOS = "photos"
TAILS = (0.5, 99.5)
"""Percentiles of a channel of signals that become 0 and 1; values beyond are clipped."""
APART = 3
"""Every so many windows of one recording are kept: neighbours share half of their samples."""


def _rows(settings: SimpleNamespace) -> dict[str, tuple[str, str, str]]:
    """Return data, ladder and defense by unit."""
    return {
        f"{data}/{slug(defense)}": (data, ladder, defense)
        for data in settings.models
        for ladder, defenses in settings.ladders.items()
        for defense in defenses
    }


def units(settings: SimpleNamespace) -> list[str]:
    """Name every rung on both data."""
    return list(_rows(settings))


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Attack one rung with the whole ensemble, and with the search among the directions of the prior."""
    data, ladder, defense = _rows(settings)[unit]
    common = {"model": settings.models[data], "defense": defense, "records": settings.records, "device": settings.device}
    cell = Cell(data=PHOTOS, ensemble=settings.ensemble, lists="off", risk="off", known_labels=True, seed=settings.seed, **common)
    dataset = None if data == PHOTOS else _signals(settings.data)
    begun = time.process_time()
    result = run_cell(cell, dataset).result
    spent = time.process_time() - begun
    found = _best(result)
    return {
        "data": data,
        "ladder": ladder,
        "defense": defense,
        "n": result.n,
        "public_mean": round(_psnr(result.nulls["public_mean"]), 2),
        "null": round(max(_psnr(null) for null in result.nulls.values()), 2),
        **found,
        "selected": round(_psnr(result.selected), 2),
        "identified": [found["identified"], result.selected.identified.count],
        "linear_map": round(_map(cell, dataset, settings), 2),
        "seconds": round(spent, 1),
    }


def _best(result: CellResult) -> dict[str, Any]:
    """Return the best search and the best linear prior of the ensemble: name, PSNR, and hits of both."""
    found: dict[str, Any] = {"identified": {}}
    for kind in ("search", "linear"):
        rows = [row for row in result.attackers if (row.recipe in LINEAR) == (kind == "linear") and row.summary is not None]
        best = max(rows, key=lambda row: _psnr(row.summary))
        assert best.summary is not None
        found[kind] = {
            "who": f"{best.recipe}, {best.stance}",
            "psnr": round(_psnr(best.summary), 2),
            "rehearsed": round(best.rehearsal_psnr or 0.0, 2),
            "chosen": sum(row.chosen or 0 for row in rows),
        }
        found["identified"][kind] = best.summary.identified.count
    return found


def _psnr(summary: Summary | None) -> float:
    assert summary is not None and summary.psnr is not None
    return summary.psnr.median


def _map(cell: Cell, dataset: Dataset | None, settings: SimpleNamespace) -> float:
    subject = build_subject(cell, dataset or load_cell_data(cell), 0)
    attack = LinearMap(stance="informed", steps=settings.map_steps)
    found = launch(attack, [target.observation for target in subject.targets], subject.context(10**9))
    psnr = score(subject, [each for each in found if each.hypothesis == 0]).values["psnr"]
    assert isinstance(psnr, torch.Tensor)
    return median(psnr)


@functools.cache
def _signals(path: str) -> Dataset:
    """Return windows of inertial signals that share no samples, each channel stretched to [0, 1]."""
    with np.load(path, allow_pickle=False) as archive:
        signals, labels, names = archive["x"], archive["y"].astype(np.int64), archive["label_names"]
        subjects, devices = archive["subject"], archive["device"]
    recording = np.cumsum(
        np.r_[True, (subjects[1:] != subjects[:-1]) | (labels[1:] != labels[:-1]) | (devices[1:] != devices[:-1])]
    )
    starts = np.r_[0, np.flatnonzero(np.diff(recording)) + 1]
    place = np.arange(len(labels)) - starts[recording - 1]
    low, high = np.percentile(signals, TAILS, axis=(0, 2), keepdims=True)
    kept = np.flatnonzero(place % APART == 0)
    inputs = np.clip((signals[kept] - low) / (high - low), 0, 1).astype(np.float32)
    return Dataset(
        name="inertial signals",
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(labels[kept]),
        classes=len(names),
        class_names=tuple(str(name) for name in names),
        records=tuple(str(row) for row in kept),
    )


def tables(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return one row a rung, and what the gate asks."""
    rows = [
        [
            found["data"],
            f"`{found['defense']}`",
            found["n"],
            *(f"{found[kind]['psnr']:.1f} ({found[kind]['who']})" for kind in ("search", "linear")),
            f"{found['linear_map']:.1f}",
            f"{found['selected']:.1f}",
            f"{found['selected'] - _better(found):+.1f}",
            f"{found['linear']['chosen']} of {found['n']}",
            f"{found['search']['rehearsed']:.1f} / {found['linear']['rehearsed']:.1f}",
            f"{found['identified'][0]['search']} / {found['identified'][0]['linear']} / {found['identified'][1]}",
            f"{found['public_mean']:.1f}",
        ]
        for found in documents.values()
    ]
    head = "data | defense | n | best search, PSNR | best linear prior of the ensemble | `linear_map` | chosen by the referee"
    more = "against the better | linear prior chosen | rehearsed: search / linear, PSNR | identified: search / linear / chosen"
    whole = f"{head} | {more} | null: public mean"
    return {"rungs": table(whole, rows), "gate": _gate(list(documents.values()))}


def _better(found: Mapping[str, Any]) -> float:
    return float(max(found["search"]["psnr"], found["linear"]["psnr"]))


def _gate(documents: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for data, ladder in dict.fromkeys((found["data"], found["ladder"]) for found in documents):
        own = [found for found in documents if (found["data"], found["ladder"]) == (data, ladder)]
        ahead = max(own, key=lambda found: found["linear"]["psnr"] - found["search"]["psnr"])
        lead = ahead["linear"]["psnr"] - ahead["search"]["psnr"]
        behind = min(found["selected"] - _better(found) for found in own)
        rows.append([data, ladder, len(own), f"{lead:+.1f} (`{ahead['defense']}`)" if own else MISSING, f"{behind:+.1f}"])
    return table("data | ladder | rungs | linear prior over best search at most, dB | referee's worst choice, dB", rows)
