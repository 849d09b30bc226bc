"""Figures 3 and 5 of the SVDefense paper: how class balance changes what leaks, and the entropy of the update's spectrum.

No plan says it: pools are thinned class by class before records are drawn, and the spectral entropy of the update is taken beside
the attack; a plan attacks records of the data as it is.

For each class balance ratio ρ, several pools are thinned with their own order of classes; batches of ten come from each pool.
The undefended update is attacked with one recipe and the true labels (recovered ones would be easier to get where one class
rules, and that is another question), and the spectral entropy of SVDefense is taken of every weight matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch

from gradveil.attacks import launch
from gradveil.attacks.ensembles import QUICK
from gradveil.audit.judge import originals, score
from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.data import Dataset
from gradveil.data.partitions import ClassBalance
from gradveil.defenses.svdefense.truncation import truncate
from gradveil.randomness import Seed
from gradveil.study.cell import Cell
from studies.shared import table

RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
BATCH = 10


def pool_of(dataset: Dataset, rho: float, pool: int) -> Dataset:
    """Return one thinned pool."""
    (kept,) = ClassBalance(rho=rho).split(dataset, 1, Seed(pool).child("pool"))
    return dataset.take(kept)


def nulls(subject: Subject) -> dict[str, list[float]]:
    """Return the PSNR of answers given without the update: constant grey, and the mean of the candidates."""
    truth = originals(subject)
    guesses = {"grey": torch.full_like(truth[:1], 0.5), "data_mean": subject.candidates.mean(0, keepdim=True)}
    return {
        name: [-10 * math.log10(max(float((guess - one).square().mean()), 1e-6)) for one in truth]
        for name, guess in guesses.items()
    }


def units(settings: SimpleNamespace) -> list[str]:
    """Name the ratios."""
    return [f"rho_{rho}" for rho in RATIOS]


def measure(unit: str, options: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Attack all batches of one ratio."""
    rho, dataset = float(unit.removeprefix("rho_")), load_cell_data(Cell(data=options.data))
    psnr: list[float] = []
    mse: list[float] = []
    classes: list[int] = []
    entropies: dict[str, list[float]] = {}
    without: dict[str, list[float]] = {}
    attack = replace(QUICK.members[0].attack, steps=options.steps)
    for pool in range(options.pools):
        cell = Cell(
            data=options.data,
            model=options.model,
            records=BATCH * options.batches,
            batch_size=BATCH,
            seed=pool,
            known_labels=True,
            device=options.device,
        )
        subject = build_subject(cell, pool_of(dataset, rho, pool), rehearsals=0)
        for name, found_psnr in nulls(subject).items():
            without.setdefault(name, []).extend(found_psnr)
        found = launch(attack, [target.observation for target in subject.targets], subject.context(options.steps))
        values = score(subject, sorted(found, key=lambda one: one.target))
        psnr += [value for value in values.column("psnr") if value is not None]
        mse += [value for value in values.column("mse") if value is not None]
        classes += [len(target.batch.targets.unique()) for target in subject.targets]
        for target in subject.targets:
            for name, tensor in target.observation.update.weights.items():
                if tensor.ndim > 1:
                    whole = truncate(tensor.flatten(1).cpu(), weights="squared", beta=0.3, threshold=None)
                    entropies.setdefault(name, []).append(whole.entropy)
    return {
        "rho": rho,
        "records": len(psnr),
        "classes_per_batch": mean(classes),
        "median_psnr": median(psnr),
        "mean_mse": mean(mse),
        "null_psnr": {name: median(found_psnr) for name, found_psnr in without.items()},
        "entropy": {name: mean(found) for name, found in entropies.items()},
    }


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show one row a ratio."""
    # Results from before provenance are one document with all rows.
    rows = sorted((row for each in documents.values() for row in each.get("rows", [each])), key=lambda row: float(row["rho"]))
    layers = list(rows[0]["entropy"])
    head = ["ρ", "classes per batch", "median PSNR, dB", "best null, dB", "mean MSE"]
    titles = [name.removesuffix(".weight") for name in layers]
    return {
        "": table(
            [*head, *(f"entropy, {title}" for title in titles)],
            (
                [
                    *(row["rho"], f"{row['classes_per_batch']:.1f}", f"{row['median_psnr']:.1f}"),
                    *(f"{max(row['null_psnr'].values()):.1f}", f"{row['mean_mse']:.4f}"),
                    *(f"{row['entropy'][name]:.2g}" for name in layers),
                ]
                for row in rows
            ),
        )
    }
