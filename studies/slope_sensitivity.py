"""How far a tiny change of the input turns the slope an attack follows, with one local step and with several.

No plan says it: nothing is attacked; the slope that attacks follow is probed.

Double precision, so what is measured belongs to the network and not to rounding: a candidate (uniform noise, as attacks start) is
multiplied by 1 + change * N(0, 1) entry by entry, and ``turned`` is the distance of the two slopes of the cosine distance to a
real update, in units of their norm; median over candidates. Kinks (ReLU, max pooling) make it large, and local steps multiply it.
``cosine`` compares the update of the local steps with the plain gradient at the same weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
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
from studies.shared import MISSING, table

MODELS = {
    "lenet": "LeNet, sigmoid",
    'lenet(activation="relu")': "LeNet, ReLU",
    "convnet": "ConvNet",
    'convnet(pool="average")': "ConvNet, average pooling",
    "resnet18": "ResNet-18",
    "resnet20": "ResNet-20, untrained",
}
SLOWER = "convnet"
"""The network that is asked with smaller learning rates, too."""
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


def units(settings: SimpleNamespace) -> list[str]:
    """Name networks and learning rates."""
    rates = settings.learning_rates
    return [f"{model} {rate:g}" for model in MODELS for rate in (rates if model == SLOWER else rates[:1])]


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Probe one network at one learning rate."""
    model, _, rate = unit.rpartition(" ")
    data = load_data(settings.data)
    pictures, labels = data.inputs[:EXAMPLES].double(), data.targets[:EXAMPLES]
    return {"rows": rows(model, pictures, labels, settings.candidates, data.classes, float(rate))}


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show networks with one local step, where no learning rate counts, and with several."""
    found: dict[tuple[str, int, float], dict[str, Any]] = {}
    for row in (row for each in documents.values() for row in each["rows"]):
        found.setdefault((row["model"], row["local_steps"], row["learning_rate"] if row["local_steps"] > 1 else 0), row)
    order = list(MODELS)
    lines = []
    for (model, steps, rate), row in sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1], -item[0][2])):
        many = steps > 1
        turned = [f"{row['turned'][f'{change:g}']:.2g}" for change in CHANGES]
        ends = [f"{rate:g}" if many else MISSING, *turned, row["cosine"] if many else MISSING]
        lines.append([MODELS[model], steps, *ends])
    first, *changes = [f"{change:.0e}".replace("e-0", "e-") for change in CHANGES]
    head = ["network", "local steps", "learning rate", f"changed by {first}", *changes, "cosine of update and gradient"]
    return {"": table(head, lines)}
