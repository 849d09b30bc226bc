"""How much of the shadow's noise can be taken off by an attacker who found x + N exactly, with and without public pictures.

No plan says it: nothing is attacked; the last step of an attacker is given x + N.

No attack is run: this is the last step of an informed one alone. Held-out pictures get noise from the whole defense. The
attacker's public pictures (of the same collection, or crops of one photograph) get it from his own short run of the same code. A
switching median (a pixel that sticks out of its neighbours' median by more than a share of the known height becomes that median;
the share is tuned on the public pairs) and a linear filter stand beside the attacker's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
from studies.shared import table

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
TITLES = {
    "whole": "nothing",
    "no codes": "codes (`latent_steps=0`)",
    "no fine-tuning": "fine-tuning (`fit_steps=0`)",
    "no equalisation": "equalisation (`equalised=False`)",
    "no foreground": "foreground (`foreground=0`)",
    "T = 1": "heat of the softmax (`temperature=1`)",
}
KINDS = "kinds"
"""The unit with other pictures than X-rays: photographs as public pictures, photos, digits."""
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
            found["subtracting the recipe"] = ShadowAdversary(defense).subtracted(learner, noisy, targets, when)
        found |= filters(noisy, height, pairs)
        scores: dict[str, list[float]] = {
            n: v.tolist() if n.startswith("believed") else psnr(v, images) for n, v in found.items()
        }
        rows.append({"round": when, "pictures": len(images), **scores})
    return rows


def units(settings: SimpleNamespace) -> list[str]:
    """Name what is left out of the defense, on X-rays, and the other pictures."""
    return [*(f"parts/{variant.replace(' ', '_')}" for variant in VARIANTS), KINDS]


def measure(unit: str, options: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Restore X-rays with a part of the defense left out, or X-rays, photographs and digits with the whole of it."""
    variant = "" if unit == KINDS else unit.removeprefix("parts/").replace("_", " ")
    count = options.kinds_count if unit == KINDS else options.count
    settings = {"rounds": ROUNDS, "until": 1, "latent_steps": options.latent_steps, **VARIANTS.get(variant, {})}
    defense = Shadow(**settings)
    record: dict[str, Any] = {"format": "gradveil-shadow-restore-1", "settings": settings}
    data = load_data(options.data)
    images = F.interpolate(data.inputs, size=(32, 32), mode="bilinear", align_corners=False, antialias=True).clamp(0, 1)
    data = dataclasses.replace(data, inputs=images)
    order = [int(row) for row in Seed(0).child("records").numpy("choice").permutation(len(data))]
    chosen = data.batch(order[SKIPPED : SKIPPED + count])
    crops = {
        channels: public_images((channels, side, side), 32, Seed(0).child("public")) for channels, side in ((1, 32), (3, 32))
    }
    public = {"X-rays": images[order[-PUBLIC:]]} | ({} if variant else {"photograph": crops[1]})
    record["X-rays"] = measured(chosen.inputs, chosen.targets, data.classes, public, defense)
    if variant:
        return {**record, "variant": variant}
    photos = load_data("photos")
    chosen = photos.batch([place * (len(photos) // count) + 1 for place in range(count)])
    record["photos"] = measured(chosen.inputs, chosen.targets, photos.classes, {"photograph": crops[3]}, defense)
    digits = load_data("digits")
    chosen = digits.batch([place * (len(digits) // count) + 1 for place in range(count)])
    small = public_images(digits.input_shape, 32, Seed(0).child("public"))
    record["digits"] = measured(chosen.inputs, chosen.targets, digits.classes, {"photograph": small}, defense)
    return record


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show what filters do to the whole defense, and what a part left out changes."""
    found = {each["variant"]: each["X-rays"] for each in documents.values() if "variant" in each}
    ways = ("nothing", *(f"{name}, X-rays" for name in ("switching median", "linear filter", "the attacker's filter")))
    filters = table(
        ["", *(way.removesuffix(", X-rays") for way in ways)],
        (
            [title, *(f"{fmean(row[way]):.1f}" for way in ways)]
            for title, row in zip(("first round", f"last of {ROUNDS} rounds"), found["whole"], strict=True)
        ),
    )
    parts = table(
        "left out | x + N, first / last round | after the attacker's filter",
        (
            [TITLES[name], *(" / ".join(f"{fmean(row[way]):.1f}" for row in found[name]) for way in (ways[0], ways[-1]))]
            for name in TITLES
            if name in found
        ),
    )
    return {"filters": filters, "parts": parts}
