"""How well the evaluation network tells noise from pictures: Figures 4 and 5 of the Refiner paper, on data it never saw.

No plan says it: nothing is attacked or trained; a shipped network is asked for the share of noise.

Pictures x are mixed with uniform noise v, (1 - r) x + r v, and the network is asked for r. Kept when the mean answer is within
0.05 of r everywhere and rises with r.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.data import load_data
from gradveil.networks.evaluation import mix
from gradveil.networks.store import load_network
from gradveil.randomness import Seed
from studies.shared import table

RATIOS = tuple(step / 10 for step in range(11))
LIMIT = 0.05
AT_ONCE = 64

PAPER = {
    "SVHN": (0.079, 0.175, 0.276, 0.396, 0.516, 0.611, 0.704, 0.793, 0.920),
    "CIFAR-10": (0.078, 0.175, 0.273, 0.397, 0.494, 0.617, 0.700, 0.821, 0.910),
    "CIFAR-100": (0.064, 0.155, 0.275, 0.383, 0.526, 0.592, 0.698, 0.804, 0.909),
}
"""Figure 5: one picture each, at ratios 0.1 to 0.9."""
TITLES = {
    "cifar10_12k": "CIFAR-10",
    "pneumoniamnist": "chest X-rays",
    "photos": "photos",
    "mnist_with_writers": "MNIST",
    "digits": "digits of 8×8",
}


def answers(network: nn.Module, images: Tensor, seed: int, ratios: Sequence[float] = RATIOS) -> Tensor:
    """Return what the network answers (ratios, pictures), every ratio with fresh noise."""
    generator = Seed(seed).child("evaluation network").generator("noise")
    rows = []
    with torch.no_grad():
        for ratio in ratios:
            parts = []
            for some in images.split(AT_ONCE):
                noise = torch.rand(some.shape, generator=generator)
                parts.append(network(mix(some, noise, torch.full((len(some),), ratio))))
            rows.append(torch.cat(parts))
    return torch.stack(rows)


def answered(network: nn.Module, images: Tensor, seed: int) -> dict[str, Any]:
    """Return mean and spread per ratio, one picture by itself, and whether the limits are kept."""
    found = answers(network, images, seed).double()
    mean = found.mean(1)
    bias = float((mean - torch.tensor(RATIOS, dtype=torch.float64)).abs().max())
    # Single pictures need not rise everywhere; how many do is the honest form of "monotone".
    rising = (found.diff(dim=0) > 0).all(0)
    return {
        "pictures": len(images),
        "shape": list(images.shape[1:]),
        "mean": [round(float(value), 4) for value in mean],
        "std": [round(float(value), 4) for value in found.std(1)],
        "one": [round(float(value), 4) for value in found[:, 0]],
        "bias": round(bias, 4),
        "monotone": bool((mean.diff() > 0).all()),
        "share_of_pictures_that_rise": round(float(rising.double().mean()), 4),
        "kept": bias <= LIMIT and bool((mean.diff() > 0).all()),
    }


def units(settings: SimpleNamespace) -> list[str]:
    """Name the sets."""
    return [Path(source).stem for source in settings.data]


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Ask about pictures of one set."""
    dataset = load_data(next(source for source in settings.data if Path(source).stem == unit))
    order = Seed(settings.seed).child("pictures").numpy("choice").permutation(len(dataset))[: settings.pictures]
    return answered(load_network(settings.network), dataset.inputs[order.tolist()], settings.seed)


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show the mean answers of every set, and the paper's."""
    head = ["data", "pictures", *(f"{ratio:g}" for ratio in RATIOS), "largest error", f"within {LIMIT}, and rising"]
    rows = [
        [
            *(TITLES.get(name, name), found["pictures"], *(f"{value:.3f}" for value in found["mean"])),
            *(f"{found['bias']:.3f}", "yes" if found["kept"] else "no"),
        ]
        for name, found in sorted(documents.items(), key=lambda item: (item[0] not in TITLES, [*TITLES, item[0]].index(item[0])))
    ]
    rows += [
        [f"paper, one picture of {name}", 1, "", *(f"{value:.3f}" for value in values), *[""] * 3]
        for name, values in PAPER.items()
    ]
    return {"": table(head, rows)}
