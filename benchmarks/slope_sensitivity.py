"""How far a tiny change of the input turns the slope an attack follows, with one local step and with several.

No study: nothing is attacked; the slope that attacks follow is probed.

    python benchmarks/slope_sensitivity.py --data cifar10.npz --out FILE.json
    python benchmarks/slope_sensitivity.py --data cifar10.npz --model convnet --learning-rate 0.001 --out FILE.json

Double precision, so what is measured belongs to the network and not to rounding: a candidate (uniform noise, as attacks start) is
multiplied by 1 + change * N(0, 1) entry by entry, and ``turned`` is the distance of the two slopes of the cosine distance to a
real update, in units of their norm; median over candidates. Kinks (ReLU, max pooling) make it large, and local steps multiply it.
``cosine`` compares the update of the local steps with the plain gradient at the same weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.engine.lean_distances import unit_distance
from gradveil.data import load_data
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

MODELS = ("lenet", 'lenet(activation="relu")', "convnet", 'convnet(pool="average")', "resnet18", "resnet20")
CHANGES = (1e-7, 1e-6, 1e-5, 1e-4)
EXAMPLES, TINY = 4, 1e-20


def slope(learner: Learner, candidate: Tensor, labels: Tensor, seen: Named) -> Tensor:
    """Return the derivative of the distance between a candidate's update and the one seen."""
    candidate = candidate.clone().requires_grad_()
    update = learner.update(candidate, labels)
    loss = unit_distance(list(update.values()), [seen[name] for name in update], TINY)
    return torch.autograd.grad(loss, candidate)[0]


def flat(update: Named) -> Tensor:
    """Return all entries of an update in one row."""
    return torch.cat([value.detach().flatten() for value in update.values()])


def rows(model: str, pictures: Tensor, labels: Tensor, candidates: int, classes: int, rate: float) -> list[dict[str, Any]]:
    """Return what one and four local steps do on a network."""
    network = build_model(model, input_shape=tuple(pictures.shape[1:]), classes=classes, seed=Seed(0)).double().eval()
    made, gradient = [], None
    for steps in (1, 4):
        settings = TrainingSettings() if steps == 1 else TrainingSettings(shares="weights", local_steps=steps, learning_rate=rate)
        learner = Learner.of(network, loss_by_name("cross_entropy"), settings)
        seen = {name: value.detach() for name, value in learner.update(pictures, labels).items()}
        gradient = flat(seen) if gradient is None else gradient
        random = Seed(1).generator("candidates")
        turned: dict[float, list[float]] = {change: [] for change in CHANGES}
        for _ in range(candidates):
            start = torch.rand(pictures.shape, generator=random, dtype=torch.float64)
            before = slope(learner, start, labels, seen)
            for change in CHANGES:
                noise = torch.randn(pictures.shape, generator=random, dtype=torch.float64)
                after = slope(learner, start * (1 + change * noise), labels, seen)
                turned[change].append(float((after - before).norm() / before.norm()))
        made.append(
            {
                "model": model,
                "local_steps": steps,
                "learning_rate": rate,
                "candidates": candidates,
                "cosine": round(float(torch.cosine_similarity(flat(seen), gradient, dim=0)), 4),
                "turned": {f"{change:g}": float(f"{statistics.median(found):.2g}") for change, found in turned.items()},
            }
        )
    return made


def main() -> None:
    """Measure all networks and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--model", action="append", help="repeatable; all networks of the table if not given")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    data = load_data(options.data)
    pictures, labels = data.inputs[:EXAMPLES].double(), data.targets[:EXAMPLES]
    found = []
    for model in options.model or MODELS:
        for row in rows(model, pictures, labels, options.candidates, data.classes, options.learning_rate):
            found.append(row)
            print(row, flush=True)
    options.out.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
