"""How well the evaluation network tells noise from pictures: Figures 4 and 5 of the Refiner paper, on data it never saw.

No study: nothing is attacked or trained; a shipped network is asked for the share of noise.

    python benchmarks/evaluation_network.py run --data cifar10=cifar10_12k.npz mnist=mnist.npz photos digits --out FILE.json
    python benchmarks/evaluation_network.py table --out FILE.json

Pictures x are mixed with uniform noise v, (1 - r) x + r v, and the network is asked for r. Kept when the mean answer is within
0.05 of r everywhere and rises with r.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil import __version__
from gradveil.data import load_data
from gradveil.networks.evaluation import mix
from gradveil.networks.store import load_network
from gradveil.randomness import Seed

RATIOS = tuple(step / 10 for step in range(11))
LIMIT = 0.05
AT_ONCE = 64

PAPER = {
    "SVHN": (0.079, 0.175, 0.276, 0.396, 0.516, 0.611, 0.704, 0.793, 0.920),
    "CIFAR-10": (0.078, 0.175, 0.273, 0.397, 0.494, 0.617, 0.700, 0.821, 0.910),
    "CIFAR-100": (0.064, 0.155, 0.275, 0.383, 0.526, 0.592, 0.698, 0.804, 0.909),
}
"""Figure 5: one picture each, at ratios 0.1 to 0.9."""


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


def measure(network: nn.Module, images: Tensor, seed: int) -> dict[str, Any]:
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


def run(options: argparse.Namespace) -> int:
    """Measure every set and write one file."""
    torch.set_num_threads(1)
    network, started = load_network(options.network), time.perf_counter()
    sets = {}
    for each in options.data:
        title, _, spelling = each.rpartition("=")
        dataset = load_data(spelling)
        order = Seed(options.seed).child("pictures").numpy("choice").permutation(len(dataset))[: options.pictures]
        sets[title or spelling] = measure(network, dataset.inputs[order.tolist()], options.seed)
    record = {
        "format": "gradveil-evaluation-network-1",
        "version": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "network": Path(options.network).name,
        "ratios": list(RATIOS),
        "limit": LIMIT,
        "seconds": round(time.perf_counter() - started, 1),
        "paper_one_picture": {name: list(values) for name, values in PAPER.items()},
        "sets": sets,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return table(options)


def table(options: argparse.Namespace) -> int:
    """Print the file as a table in Markdown."""
    record = json.loads(options.out.read_text(encoding="utf-8"))
    heads = " | ".join(f"{ratio:g}" for ratio in record["ratios"])
    sys.stdout.write(f"| data | pictures | {heads} | largest error | limit {record['limit']} |\n")
    sys.stdout.write("|---" * (len(record["ratios"]) + 4) + "|\n")
    for name, found in record["sets"].items():
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(found["mean"], found["std"], strict=True)]
        verdict = "kept" if found["kept"] else "broken"
        sys.stdout.write(f"| {name} | {found['pictures']} | {' | '.join(cells)} | {found['bias']:.3f} | {verdict} |\n")
    for name, values in record["paper_one_picture"].items():
        cells = ["", *(f"{value:.3f}" for value in values), ""]
        sys.stdout.write(f"| paper, one picture of {name} | 1 | {' | '.join(cells)} | | |\n")
    return 0 if all(found["kept"] for found in record["sets"].values()) else 1


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--data", nargs="+", default=["photos"], help="sets, each by name or path, or as title=path")
    parser.add_argument("--network", default="evaluation-32")
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    return run(options) if options.what == "run" else table(options)


if __name__ == "__main__":
    sys.exit(main())
