"""What is left of a picture in Refiner's robust one: de-blended and denoised, and through a filter learned on public pictures.

No study: nothing is attacked; the last step of an attacker is given the picture that a perfect inversion would find.

    python benchmarks/refiner_filter.py --data cifar10_12k.npz --row refiner 'refiner(balance=1000)' --out DIR

No attack is run: the restorers are given x* as the client made it, which is what a perfect inversion of a single picture's update
would find. The filter is the one the informed attacker uses, learned on 32 crops of the public photograph; the pictures are
others. Beside it stands the same filter before it gets its contrast back. A picture counts as identified where it is the nearest
of all candidates. Seconds a row; one JSON file each.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil import __version__
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

FORMAT = "gradveil-refiner-filter-1"


def measure(spelling: str, options: argparse.Namespace) -> dict[str, Any]:
    """Restore pictures from their robust ones in every way."""
    defense = build_defense(spelling)
    if not isinstance(defense, Refiner):
        raise SystemExit(f"{spelling!r} is not Refiner alone")
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
        **{name: figures(found, clean, candidates) for name, found in ({"null: public mean": mean} | restored).items()},
        "version": __version__,
        "torch": torch.__version__,
        "data": Path(options.data).name,
        "seed": options.seed,
        "first": options.first,
    }


def figures(found: Tensor, clean: Tensor, candidates: Tensor) -> dict[str, float]:
    """Return the median PSNR, and how many are nearest to their own original among all candidates."""
    psnr = -10 * torch.log10((found - clean).square().mean((1, 2, 3)))
    nearest = torch.cdist(found.flatten(1), candidates.flatten(1)).argmin(1)
    right = nearest == torch.arange(len(clean))
    return {"psnr": median(psnr), "identified": int(right.sum())}


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--row", nargs="+", default=["refiner"], help="spellings")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--candidates", type=int, default=256)
    parser.add_argument("--first", type=int, default=6000, help="first picture, counted in the file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("refiner_filter"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for spelling in options.row:
        record = measure(spelling, options)
        name = "_".join(re.findall(r"[\w.-]+", spelling))
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        ways = {way: value for way, value in record.items() if isinstance(value, dict)}
        told = ", ".join(f"{way} {value['psnr']:.2f} dB {value['identified']}" for way, value in ways.items())
        sys.stdout.write(f"{spelling}: {told}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
