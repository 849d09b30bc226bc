"""What is left of a picture in Refiner's robust one: de-blended and denoised, and through a filter learned on public pictures.

No plan says it: nothing is attacked; the last step of an attacker is given the picture that a perfect inversion would find.

No attack is run: the restorers are given x* as the client made it, which is what a perfect inversion of a single picture's update
would find. The filter is the one the informed attacker uses, learned on 32 crops of the public photograph; the pictures are
others. Beside it stands the same filter before it gets its contrast back. A picture counts as identified where it is the nearest
of all candidates. Seconds a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gradveil.client.update import run_client
from gradveil.data import load_data, public_images
from gradveil.defenses import build_defense
from gradveil.defenses.refiner.adversary import deblend
from gradveil.defenses.refiner.defense import Refiner
from gradveil.defenses.refiner.restorer import MOST, fit_restorer, public_pairs
from gradveil.learning import Learner, loss_by_name
from gradveil.metrics import median
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch
from studies.shared import table

FORMAT = "gradveil-refiner-filter-1"
ROWS = {
    "refiner": "defaults",
    "refiner(steps=20)": "ι = 20",
    "refiner(blend=0.7)": "α = 0.7",
    "refiner(blend=0.9)": "α = 0.9",
    "refiner(balance=100)": "β = 100",
    "refiner(balance=1000)": "β = 1000",
}
NULL = "null: public mean"
WAYS = {
    "robust": "x* itself",
    "deblended": "de-blended, denoised",
    "filtered, least error": "filter of least error",
    "filtered": "with its contrast",
}


def units(settings: SimpleNamespace) -> list[str]:
    """Name the rows."""
    return [_unit(spelling) for spelling in ROWS]


def _unit(spelling: str) -> str:
    return "_".join(re.findall(r"[\w.-]+", spelling))


def measure(unit: str, options: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Restore pictures from their robust ones in every way."""
    spelling = next(each for each in ROWS if _unit(each) == unit)
    defense = build_defense(spelling)
    assert isinstance(defense, Refiner)
    data = load_data(options.data)
    chosen = slice(options.first, options.first + options.candidates)
    candidates, labels = data.inputs[chosen], data.targets[chosen]
    shape = tuple(candidates.shape[1:])
    built = build_model(options.model, input_shape=shape, classes=data.classes, seed=Seed(options.seed))
    learner = Learner.of(built, loss_by_name("cross_entropy"))
    clean = candidates[: options.records]
    robust = torch.cat(
        [
            run_client(learner, Batch(x, labels[i : i + 1]), defense, Seed(options.seed).child("client", i)).trained_batch.inputs
            for i, x in enumerate(clean.split(1))
        ]
    )
    public = public_images(shape, MOST, Seed(options.seed).child("public"))
    made = public_pairs(defense, public, learner, 1, data.classes, labels[:1])
    restored = {
        "robust": robust,
        "deblended": deblend(robust, defense.blend),
        "filtered, least error": fit_restorer(public, made, most_contrast=1.0).clean(robust),
        "filtered": fit_restorer(public, made).clean(robust),
    }
    mean = public.mean(0, keepdim=True).expand_as(clean)
    return {
        "format": FORMAT,
        "defense": spelling,
        "model": options.model,
        "n": len(clean),
        "candidates": len(candidates),
        "public": len(public),
        **{name: figures(found, clean, candidates) for name, found in ({NULL: mean} | restored).items()},
    }


def figures(found: Tensor, clean: Tensor, candidates: Tensor) -> dict[str, float]:
    """Return the median PSNR, and how many are nearest to their own original among all candidates."""
    psnr = -10 * torch.log10((found - clean).square().mean((1, 2, 3)))
    nearest = torch.cdist(found.flatten(1), candidates.flatten(1)).argmin(1)
    right = nearest == torch.arange(len(clean))
    return {"psnr": median(psnr), "identified": int(right.sum())}


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show one row a setting, and the null, which is the same for all."""
    found = {each["defense"]: each for each in documents.values()}
    head = ["Refiner", *(text for title in WAYS.values() for text in (f"{title}: dB", "identified"))]
    rows = [
        [title, *(cell for way in WAYS for cell in (f"{found[row][way]['psnr']:.2f}", found[row][way]["identified"]))]
        for row, title in ROWS.items()
    ]
    null = next(iter(found.values()))[NULL]
    rows.append(["null: mean of the public pictures", f"{null['psnr']:.2f}", null["identified"], *[""] * (len(head) - 3)])
    return {"": table(head, rows)}
