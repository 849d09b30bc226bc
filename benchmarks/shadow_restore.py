"""How much of the shadow's noise can be taken off by an attacker who found x + N exactly, with and without public pictures.

No study: nothing is attacked; the last step of an attacker is given x + N.

    python benchmarks/shadow_restore.py --data pneumoniamnist.npz --out FILE
    python benchmarks/shadow_restore.py --data pneumoniamnist.npz --out FILE --variant 'no codes' --count 9

No attack is run: this is the last step of an informed one alone. Held-out pictures get noise from the whole defense. The
attacker's public pictures (of the same collection, or crops of one photograph) get it from his own short run of the same code. A
switching median (a pixel that sticks out of its neighbours' median by more than a share of the known height becomes that median;
the share is tuned on the public pairs) and a linear filter stand beside the attacker's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil import __version__
from gradveil.data import load_data, public_images
from gradveil.defenses.base import ClientView
from gradveil.defenses.shadow import restorer as shadow_restorer
from gradveil.defenses.shadow.adversary import ShadowAdversary, public_pairs
from gradveil.defenses.shadow.defense import Shadow
from gradveil.defenses.shadow.noise import amplitude
from gradveil.defenses.shadow.restorer import fit_restorer
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

ROUNDS = 20
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "no codes": {"latent_steps": 0},
    "no fine-tuning": {"fit_steps": 0},
    "no equalisation": {"equalised": False},
    "no foreground": {"foreground": 0.0},
    "T = 1": {"temperature": 1.0},
}
"""The paper's ablations, and a colder softmax."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
PUBLIC = 64
SKIPPED = 400
"""Records of the shuffled collection to leave out: those of `shadow_xray.py`, and those the filter's settings were chosen on."""


def psnr(found: Tensor, truth: Tensor) -> list[float]:
    """Return PSNR per image."""
    errors = (found - truth).square().flatten(1).mean(1)
    return [round(float(value), 3) for value in -10 * torch.log10(errors.clamp_min(1e-12))]


def switched(noisy: Tensor, height: float, share: float) -> Tensor:
    """Return the switching median filter of 3 x 3 pixels."""
    channels, size = noisy.shape[1], noisy.shape[2:]
    cut = F.unfold(F.pad(noisy, (1, 1, 1, 1), mode="reflect"), 3).reshape(len(noisy), channels, 9, -1)
    middle = cut.median(2).values.reshape(len(noisy), channels, *size)
    limit = share * height * noisy.amax((1, 2, 3), keepdim=True)
    return torch.where((noisy - middle).mean(1, keepdim=True) > limit, middle, noisy)


def median_filter(clean: Tensor, noisy: Tensor, height: float) -> float:
    """Return the share that does best on public pairs."""
    return min(SHARES, key=lambda share: float((switched(noisy, height, share) - clean).square().mean()))


def filters(noisy: Tensor, height: float, pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return what filters that learned from each kind of public pairs make of noisy pictures."""
    found = {}
    for kind, (clean, dirty) in pairs.items():
        found[f"switching median, {kind}"] = switched(noisy, height, median_filter(clean, dirty, height))
        units = shadow_restorer.UNITS
        for name, count in (("linear filter", 0), ("the attacker's filter", units)):
            shadow_restorer.UNITS = count
            restorer = fit_restorer(clean, dirty, height, Seed(0).generator("units"))
            shadow_restorer.UNITS = units
            found[f"{name}, {kind}"], believed = restorer.clean(noisy, height)
        found[f"believed, {kind}"] = believed
    return found


def measured(images: Tensor, targets: Tensor, classes: int, public: dict[str, Tensor], defense: Shadow) -> list[dict[str, Any]]:
    """Return one row per round: the first, and the last with the maps of the first."""
    shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
    model = build_model("lenet(activation='relu')", input_shape=shape, classes=classes, seed=Seed(0))
    learner = Learner.of(model, loss_by_name("cross_entropy"), TrainingSettings(learning_rate=0.1))
    batch, rows = Batch(images, targets), []
    state: Named = {}
    for when in (0, ROUNDS - 1):
        noise, state = defense.noise(batch, ClientView(learner, Seed(7), round=when, weights=learner.weights), state)
        noisy = (images + noise).clamp(0, 1)
        height = amplitude(defense.strength, when / ROUNDS, defense.schedule)
        pairs = {kind: (clean, public_pairs(defense, clean, learner, when)) for kind, clean in public.items()}
        found = {"nothing": noisy}
        if len(public) > 1 or "X-rays" not in public:
            found["subtracting the recipe"] = ShadowAdversary(defense)._subtracted(learner, noisy, targets, when)
        found |= filters(noisy, height, pairs)
        scores: dict[str, list[float]] = {
            n: v.tolist() if n.startswith("believed") else psnr(v, images) for n, v in found.items()
        }
        rows.append({"round": when, "pictures": len(images), **scores})
        sys.stderr.write(json.dumps({n: sum(v) / len(v) for n, v in scores.items()}) + "\n")
    return rows


def main() -> None:
    """Measure X-rays, photographs and digits, and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="pneumoniamnist.npz")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--latent-steps", type=int, default=50)
    parser.add_argument("--variant", choices=tuple(VARIANTS), help="X-rays only, with a part of the defense left out")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = {"rounds": ROUNDS, "until": 1, "latent_steps": options.latent_steps, **VARIANTS.get(options.variant, {})}
    defense = Shadow(**settings)
    record: dict[str, Any] = {
        "format": "gradveil-shadow-restore-1",
        "version": __version__,
        "torch": torch.__version__,
        "settings": settings,
    }
    data = load_data(options.data)
    images = F.interpolate(data.inputs, size=(32, 32), mode="bilinear", align_corners=False, antialias=True).clamp(0, 1)
    data = dataclasses.replace(data, inputs=images)
    order = [int(row) for row in Seed(0).child("records").numpy("choice").permutation(len(data))]
    chosen = data.batch(order[SKIPPED : SKIPPED + options.count])
    crops = {
        channels: public_images((channels, side, side), 32, Seed(0).child("public")) for channels, side in ((1, 32), (3, 32))
    }
    public = {"X-rays": images[order[-PUBLIC:]]}
    if not options.variant:
        public["photograph"] = crops[1]
    record["X-rays"] = measured(chosen.inputs, chosen.targets, data.classes, public, defense)
    if options.variant:
        options.out.write_text(json.dumps({**record, "variant": options.variant}, indent=1) + "\n", encoding="utf-8")
        return
    photos = load_data("photos")
    chosen = photos.batch([place * (len(photos) // options.count) + 1 for place in range(options.count)])
    record["photos"] = measured(chosen.inputs, chosen.targets, photos.classes, {"photograph": crops[3]}, defense)
    digits = load_data("digits")
    chosen = digits.batch([place * (len(digits) // options.count) + 1 for place in range(options.count)])
    small = public_images(digits.input_shape, 32, Seed(0).child("public"))
    record["digits"] = measured(chosen.inputs, chosen.targets, digits.classes, {"photograph": small}, defense)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
