"""Time one step of an attack on all candidates: torch's convolutions, ours, and those of another file.

    python -m benchmarks.convolution_steps --device cuda --out FILE.json
    git show REVISION:src/gradveil/attacks/matrix_convolution.py > before.py
    python -m benchmarks.convolution_steps --device cuda --also before.py --out FILE.json

A step is the derivative, in the inputs, of the distance between two updates, recorded and replayed as in an attack. Ways are
timed one after the other in one process, best of two times four steps. ``off`` is the distance of the derivatives from the
first way's, in units of their norm: where a network has kinks (ReLU, pooling), rounding puts some inputs on the other side.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Timer, arguments, finish, read
from gradveil.attacks.engine.execution import COARSE_FROM, Execution
from gradveil.attacks.engine.lean_distances import unit_distance
from gradveil.attacks.engine.matrix_convolution import with_matrix_convolutions
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, matrix_products

Way = Callable[[Learner], Learner]
SHAPE, CLASSES, TINY = (3, 32, 32), 10, 1e-20
SETTINGS = [  # model, examples per candidate, candidates, local steps
    ("resnet18", 1, 28, 1),
    ("resnet18", 4, 24, 1),
    ("resnet18", 16, 12, 1),
    ("resnet18", 4, 12, 4),
    ("convnet", 1, 72, 1),
    ("convnet", 4, 24, 1),
    ("convnet", 4, 12, 4),
    ("resnet20", 4, 24, 1),
    ("lenet", 1, 72, 1),
]


def other(path: Path) -> Way:
    """Return `with_matrix_convolutions` of another file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    found: Way = module.with_matrix_convolutions
    return found


def timed(
    way: Way, model: str, examples: int, candidates: int, local_steps: int, device: torch.device, rounds: int
) -> tuple[float, Tensor]:
    """Return milliseconds per step of all candidates, and the derivatives."""
    network = build_model(model, input_shape=SHAPE, classes=CLASSES, seed=Seed(0))
    settings = TrainingSettings() if local_steps == 1 else TrainingSettings(shares="weights", local_steps=local_steps)
    learner = way(Learner.of(network, loss_by_name("cross_entropy"), settings).to(device))
    random = Seed(1).generator("pictures")
    labels = (torch.arange(examples) % CLASSES).to(device)
    seen = {
        name: value.detach()
        for name, value in learner.update(torch.rand((examples, *SHAPE), generator=random).to(device), labels).items()
    }

    def loss(row: Tensor, evidence: Named) -> Tensor:
        update = learner.update(row.reshape(examples, *SHAPE), labels)
        return unit_distance(list(update.values()), [evidence[name] for name in update], TINY)

    rows = torch.rand((candidates, examples * torch.Size(SHAPE).numel()), generator=random).to(device)
    evidence = {name: value.expand(candidates, *value.shape).contiguous() for name, value in seen.items()}
    evaluate = Execution("captured" if device.type == "cuda" else "batched", candidates).prepare(loss)
    with matrix_products(device, coarse=learner.parameters >= COARSE_FROM):
        slopes, _ = evaluate(rows, evidence)
        timer = Timer(device)
        for _ in range(rounds):
            timer(model, lambda: evaluate(rows, evidence), repeats=4)
    return 1000 * timer.best[model], slopes


def main() -> None:
    """Time all settings and write them down."""
    parser = arguments(__doc__, rounds=2, device="cuda")
    parser.add_argument("--also", type=Path, help="a file with another `with_matrix_convolutions`")
    parser.add_argument("--only", default="", help="one model")
    options = read(parser)
    ways: dict[str, Way] = {"torch": lambda learner: learner}
    if options.also is not None:
        ways[options.also.stem] = other(options.also)
    ways["ours"] = with_matrix_convolutions
    device, rows = torch.device(options.device), []
    for setting in (each for each in SETTINGS if options.only in ("", each[0])):
        first: Tensor | None = None
        for name, way in ways.items():
            ms, slopes = timed(way, *setting, device, options.rounds)
            first = slopes if first is None else first
            row: dict[str, Any] = dict(zip(("model", "examples", "candidates", "local_steps"), setting, strict=True))
            rows.append({**row, "way": name, "ms": round(ms, 3), "off": round(float((slopes - first).norm() / first.norm()), 6)})
            sys.stderr.write(f"{rows[-1]}\n")
            if device.type == "cuda":
                torch.cuda.empty_cache()
    finish("convolution_steps", {"rows": rows}, options)


if __name__ == "__main__":
    main()
