"""How much of every defense on updates is left for one who regresses public pictures on what they send through the client.

No plan says it: an audit learns from records of the split it attacks, here public pictures are training images and those under
attack test images. Of several plausible labels the most probable is answered with. Beside it stands the mean of the public
pictures of the record's own label, which is what the regression answers without an update.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gradveil.attacks import launch
from gradveil.attacks.base import PublicRecords
from gradveil.attacks.kernel_regression import KernelRegression
from gradveil.audit.judge import Scored, score, scored_images
from gradveil.audit.nulls import derangements
from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.data import Dataset
from gradveil.metrics import median
from gradveil.randomness import Seed
from gradveil.study.cell import Cell
from studies.shared import MISSING, short, slug, table


def units(settings: SimpleNamespace) -> list[str]:
    """Name every defense."""
    return [slug(spelling) for spelling in settings.defenses]


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Attack one defense, by who ignores it and by who runs it."""
    spelling = next(each for each in settings.defenses if slug(each) == unit)
    common = {"data": settings.data, "model": settings.model, "device": settings.device, "lists": "off"}
    cell = Cell(**common, defense=spelling, records=settings.records, read="split=test")
    subject = build_subject(cell, load_cell_data(cell), 0)
    public = _public(load_cell_data(cell.replace(read="split=train")), settings.per_class)
    context = dataclasses.replace(subject.context(1), public=public)
    stances = ("plain",) if context.simulate is None else ("plain", "simulated")
    return {
        "name": settings.defenses[spelling],
        "spelling": spelling,
        "stances": {stance: _attacked(subject, context, stance, settings) for stance in stances},
        "class_mean": _plain_numbers(_means(subject, public)),
        "public": len(public.inputs),
    }


def _public(train: Dataset, per_class: int) -> PublicRecords:
    """Return as many training images of every class, drawn by a seed."""
    order = torch.from_numpy(Seed(0).numpy("public pictures").permutation(len(train)))
    rows = torch.cat([order[train.targets[order] == label][:per_class] for label in range(train.classes)])
    return PublicRecords(train.inputs[rows], train.targets[rows], "same")


def _attacked(subject: Subject, context: Any, stance: str, settings: SimpleNamespace) -> dict[str, Any]:
    records = settings.per_class * (settings.draws if context.random_defense else 1)
    attack = KernelRegression(records=records, draws=settings.draws, seconds=float(settings.seconds))
    begun = time.process_time()
    found = launch(attack.with_stance(stance), [target.observation for target in subject.targets], context)
    seconds = time.process_time() - begun
    first = [each for each in found if each.hypothesis == 0]
    scored = score(subject, first)
    luck = derangements(subject, [scored], Seed(0)).counts[0]
    right = None if scored.labels is None else int((scored.labels > 0.5).sum())
    return _plain_numbers(scored) | {
        "luck": luck,
        "labels_right": right,
        "hypotheses": len(found) / len(first),
        "unexplained": sum(each.best_loss for each in first) / len(first),
        "processor_seconds": round(seconds, 1),
    }


def _means(subject: Subject, public: PublicRecords) -> Scored:
    labels = torch.cat([target.batch.targets for target in subject.targets])
    return scored_images(subject, torch.stack([public.inputs[public.targets == label].mean(0) for label in labels]))


def _plain_numbers(scored: Scored) -> dict[str, Any]:
    psnr, share = scored.values["psnr"], scored.share
    assert isinstance(psnr, torch.Tensor)
    return {"identified": share.count, "n": share.n, "low": share.low, "high": share.high, "psnr": median(psnr)}


def tables(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return one row a defense."""
    rows = []
    for found in documents.values():
        plain, known = found["stances"]["plain"], found["stances"].get("simulated")
        best = known or plain
        rows.append(
            [
                found["name"],
                _share(plain),
                MISSING if known is None else _share(known),
                f"{best['psnr']:.1f}",
                f"{found['class_mean']['psnr']:.1f} ({found['class_mean']['identified']})",
                best["luck"],
                short(best["unexplained"], 2),
            ]
        )
    return {"": table("defense | plain | defended client | PSNR | class mean (identified) | luck | unexplained", rows)}


def _share(found: Mapping[str, Any]) -> str:
    return f"{found['identified']} of {found['n']} ({100 * found['low']:.0f}–{100 * found['high']:.0f} %)"
