"""Figures 3 and 5 of the SVDefense paper: how class balance changes what leaks, and the entropy of the update's spectrum.

No study: pools are thinned class by class before records are drawn, and the spectral entropy of the update is taken beside
the attack; a plan attacks records of the data as it is.

    python benchmarks/class_balance.py --data mnist_with_writers.npz --pools 8 --batches 4 --device cpu --out FILE

For each class balance ratio ρ, several pools are thinned with their own order of classes; batches of ten come from each pool.
The undefended update is attacked with one recipe and the true labels (recovered ones would be easier to get where one class
rules, and that is another question), and the spectral entropy of SVDefense is taken of every weight matrix.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
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


def measure(dataset: Dataset, rho: float, options: argparse.Namespace) -> dict[str, Any]:
    """Attack all batches of one ratio."""
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


def main() -> None:
    """Measure every ratio and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pools", type=int, default=4)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = load_cell_data(Cell(data=options.data))
    rows = []
    for rho in RATIOS:
        rows.append(measure(dataset, rho, options))
        sys.stderr.write(json.dumps(rows[-1]) + "\n")
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items() if name != "out"}
    settings["data"] = Path(options.data).name
    text = json.dumps({"settings": settings, "torch": torch.__version__, "rows": rows}, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
