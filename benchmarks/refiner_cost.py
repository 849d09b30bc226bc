"""What Refiner costs a client: its step over an undefended and over a pruning step, and over the floor of the passes it needs.

    python -m benchmarks.refiner_cost --out FILE.json
    python -m benchmarks.refiner_cost --device cuda --batch 128 --rounds 20 --out FILE.json

A whole client is timed, data to payload. The floor is the same passes without Refiner: ten bare double-backward steps, ten
passes to and fro through the evaluation network, and two gradients. The second part refines pictures for a LeNet together and one
at a time. Exit code 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Timer, arguments, finish, in_turns, read
from gradveil.client.local_training import LocalTraining
from gradveil.client.update import run_client
from gradveil.defenses import Defense, build_defense
from gradveil.defenses.refiner.defense import Refiner, evaluation_network
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.study.local_training import TrainingSettings

SHAPE, CLASSES = (3, 32, 32), 10
PAPER = {"lenet": 17.9, "resnet18": 32.7}
"""Table 5: a step of Refiner over one of pruning."""

STEP_LIMIT = {"resnet18": 32.0}
"""Undefended steps that a step may cost: ten double-backward steps. Of a LeNet the evaluation network alone costs more."""

FLOOR_LIMIT = 1.1
"""A step may cost this much of the floor: arithmetic on weights and pictures between the passes."""

TOGETHER_LIMIT = 4.0
"""Pictures refined together must be this many times faster each than one at a time."""


def make(model: str, device: torch.device, batch: int) -> tuple[Learner, Batch]:
    """Return a learner and random data of the size of CIFAR-10."""
    built = build_model(model, input_shape=SHAPE, classes=CLASSES, seed=Seed(0))
    learner = Learner.of(built, loss_by_name("cross_entropy"), TrainingSettings()).to(device)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((batch, *SHAPE), generator=generator)
    return learner, Batch(inputs.to(device), torch.randint(CLASSES, (batch,), generator=generator).to(device))


def client(learner: Learner, batch: Batch, defense: Defense) -> None:
    """Run one client as a federation does."""
    run_client(learner, batch, defense, Seed(0), local=LocalTraining())


def floor(learner: Learner, network: nn.Module, batch: Batch, steps: int) -> None:
    """Make the passes that a step of Refiner cannot do without, and nothing else."""
    leaves = {name: value.detach().requires_grad_() for name, value in learner.weights.items()}

    def first(inputs: Tensor, again: bool) -> tuple[Tensor, ...]:
        loss = learner.objective(leaves, inputs, batch.targets)
        return torch.autograd.grad(loss, list(leaves.values()), create_graph=again)

    first(batch.inputs, again=False)
    for _ in range(steps):
        inputs = batch.inputs.detach().requires_grad_()
        total = torch.stack([value.square().sum() for value in first(inputs, again=True)]).sum() - network(inputs).mean()
        torch.autograd.grad(total, inputs)
    first(batch.inputs, again=False)


@contextmanager
def counting(module: nn.Module, counts: dict[str, int], name: str) -> Iterator[None]:
    """Count the forward passes of a module."""
    counts[name] = 0

    def count(*_: object) -> None:
        counts[name] += 1

    handle = module.register_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


def steps_of(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time whole clients with one model."""
    learner, batch = make(model, torch.device(options.device), options.batch)
    defense, network = Refiner(), evaluation_network(Refiner().network, batch.inputs)
    counts: dict[str, int] = {}
    with counting(learner.model, counts, "model"), counting(network, counts, "network"):
        client(learner, batch, defense)  # also warms up
    ways = {
        "undefended": lambda: client(learner, batch, build_defense("none")),
        "pruning": lambda: client(learner, batch, build_defense("pruning(rate=0.9)")),
        "refiner": lambda: client(learner, batch, defense),
        "refiner, epsilon=0.1": lambda: client(learner, batch, Refiner(epsilon=0.1)),
        "floor": lambda: floor(learner, network, batch, defense.steps),
        "floor without network": lambda: floor(learner, _Nothing(), batch, defense.steps),
    }
    best = in_turns(ways, options.device, rounds=options.rounds, clock=options.clock)
    return {
        "model": model,
        "batch": options.batch,
        "seconds": {name: round(value, 6) for name, value in best.items()},
        "forward_passes": counts,
        "over_undefended": round(best["refiner"] / best["undefended"], 3),
        "over_pruning": round(best["refiner"] / best["pruning"], 3),
        "paper_over_pruning": PAPER.get(model),
        "floor_over_undefended": round(best["floor"] / best["undefended"], 3),
        "model_floor_over_undefended": round(best["floor without network"] / best["undefended"], 3),
        "over_floor": round(best["refiner"] / best["floor"], 4),
        "limit_over_floor": FLOOR_LIMIT,
        "limit_over_undefended": STEP_LIMIT.get(model),
        "kept": best["refiner"] <= FLOOR_LIMIT * best["floor"]
        and best["refiner"] <= STEP_LIMIT.get(model, float("inf")) * best["undefended"],
    }


class _Nothing(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.sum((1, 2, 3)) * 0


def one_at_a_time(learner: Learner, singles: list[Batch]) -> None:
    """Refine every picture by itself, as code without batches does."""
    for single in singles:
        client(learner, single, Refiner())


def together(options: argparse.Namespace) -> dict[str, Any]:
    """Refine pictures for a LeNet together and one at a time."""
    learner, batch = make("lenet", torch.device(options.device), options.pictures)
    singles = [Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1]) for i in range(min(options.singles, len(batch)))]
    timer = Timer(options.device, options.clock)
    for number in range(options.rounds + 1):
        timer("batch", lambda: client(learner, batch, Refiner()))
        timer("example", lambda: client(learner, batch, Refiner(match="example")))
        timer("one at a time", lambda: one_at_a_time(learner, singles))
        if number == 0:
            timer.best.clear()
    each = {name: value / (len(singles) if name == "one at a time" else len(batch)) for name, value in timer.best.items()}
    ratios = {name: round(each["one at a time"] / each[name], 3) for name in ("batch", "example")}
    return {
        "pictures": len(batch),
        "singles": len(singles),
        "seconds_per_picture": {name: round(value, 6) for name, value in each.items()},
        "times_faster": ratios,
        "limit": TOGETHER_LIMIT,
        "kept": ratios["batch"] >= TOGETHER_LIMIT,
    }


def main() -> int:
    """Measure, and tell whether the limits are kept."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--models", nargs="*", default=["lenet", "resnet18"])
    parser.add_argument("--batch", type=int, default=8, help="records per step")
    parser.add_argument("--pictures", type=int, default=128, help="refined together; 0 skips that part")
    parser.add_argument("--singles", type=int, default=8, help="of them, refined one at a time")
    options = read(parser)
    rows = [steps_of(model, options) for model in options.models]
    pictures = together(options) if options.pictures else None
    finish("refiner_cost", {"models": rows, "together": pictures}, options)
    return 0 if all(found["kept"] for found in (*rows, *([pictures] if pictures else []))) else 1


if __name__ == "__main__":
    sys.exit(main())
