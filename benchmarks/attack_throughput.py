"""Attack steps per second: one image after the other against many at once, in one run.

The obvious alternative is the loop every public notebook uses: for each image, autograd through the model's gradient, one
step at a time. The same objective, model and device.

    python -m benchmarks.attack_throughput --device cpu --model lenet --targets 16
    python -m benchmarks.attack_throughput --device cuda --model lenet --targets 512 --modes batched,captured
    python -m benchmarks.attack_throughput --device cuda --model resnet18 --targets 32 --modes batched,captured
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import arguments, finish, in_turns, read
from gradveil.adversary import OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.attacks.engine.execution import COARSE_FROM, Execution
from gradveil.attacks.engine.matrix_convolution import quicker
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.tensors import Named, matrix_products

Step = Callable[[], None]


def loop_step(learner: Learner, inputs: Tensor, labels: Tensor, seen: list[Named]) -> Step:
    """Return the obvious way: autograd, one image after the other."""
    model = learner.model
    parameters = {n: w.clone().requires_grad_(True) for n, w in learner.weights.items()}

    def step() -> None:
        for x, y, g in zip(inputs, labels, seen, strict=True):
            dummy = x.clone().requires_grad_(True)
            outputs = torch.func.functional_call(model, (parameters, learner.buffers), (dummy,))
            loss = torch.nn.functional.cross_entropy(outputs, y)
            found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            inner = torch.stack([(a * b).sum() for a, b in zip(found, g.values(), strict=True)]).sum()
            left = torch.stack([a.square().sum() for a in found]).sum().sqrt()
            right = torch.stack([b.square().sum() for b in g.values()]).sum().sqrt()
            torch.autograd.grad(1 - inner / (left * right), dummy)

    return step


def engine_step(learner: Learner, inputs: Tensor, labels: Tensor, seen: list[Named], mode: str) -> Step:
    """Return our way: the engine's own evaluation of all candidates."""
    adversary, cosine = OpenAdversary(), OBJECTIVES.get("cosine")
    learner = quicker(learner, tuple(inputs.shape[2:]))
    shape = inputs.shape[1:]

    def loss(row: Tensor, constants: Named) -> Tensor:
        simulated = adversary.replay(learner, row.reshape(shape), constants["labels"], {})
        return cosine(adversary.compare(prefixed(constants, "0|"), simulated, {}))

    constants = {f"0|{n}": v for n, v in with_prefix(_stack(seen), OBSERVED).items()} | {"labels": labels}
    evaluate = Execution(mode, inputs.shape[0]).prepare(loss)
    rows = inputs.flatten(1)
    return lambda: _consume(evaluate(rows, constants))


def _precise(step: Step, device: torch.device, coarse: bool) -> Step:
    """Run a step in the precision that an attack would run it in."""

    def run() -> None:
        with matrix_products(device, coarse=coarse):
            step()

    return run


def _consume(result: tuple[Tensor, Tensor]) -> None:
    float(result[1].sum())


def _stack(many: list[Named]) -> Named:
    return {n: torch.stack([one[n] for one in many]) for n in many[0]}


def measure(
    model_name: str, targets: int, device: torch.device, modes: list[str], rounds: int, loop_targets: int
) -> dict[str, Any]:
    """Interleave all ways for ``rounds`` rounds; return steps per second of each and ratios to the loop."""
    model = build_model(model_name, input_shape=(3, 32, 32), classes=10, seed=Seed(0))
    learner = Learner.of(model, loss_by_name("cross_entropy")).to(device)
    generator = Seed(0).generator("benchmark")
    inputs = torch.rand((targets, 1, 3, 32, 32), generator=generator).to(device)
    labels = torch.randint(10, (targets, 1), generator=generator).to(device)
    truth = torch.rand((targets, 1, 3, 32, 32), generator=generator).to(device)
    seen = [{n: v.detach() for n, v in learner.update(x, y).items()} for x, y in zip(truth, labels, strict=True)]
    few = slice(0, loop_targets)
    ways: dict[str, tuple[Step, int]] = {"loop": (loop_step(learner, inputs[few], labels[few], seen[few]), loop_targets)}
    compile_seconds = {}
    for mode in modes:
        step = _precise(engine_step(learner, inputs, labels, seen, mode), device, learner.parameters >= COARSE_FROM)
        begun = time.perf_counter()
        step()
        compile_seconds[mode] = round(time.perf_counter() - begun, 2)
        ways[mode] = (step, targets)
    for step, _ in ways.values():
        step()
    took = in_turns({name: step for name, (step, _) in ways.items()}, device, rounds=rounds, repeats=3)
    best = {name: took[name] / count for name, (_, count) in ways.items()}
    rates = {name: round(1 / seconds, 1) for name, seconds in best.items()}
    return {
        "model": model_name,
        "targets": targets,
        "steps_per_second": rates,
        "ratio_to_loop": {name: round(rate / rates["loop"], 2) for name, rate in rates.items()},
        "first_call_seconds": compile_seconds,
    }


def main() -> None:
    """Measure and print, and write JSON where asked."""
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--targets", type=int, default=16)
    parser.add_argument("--loop-targets", type=int, default=0, help="images the loop is timed on; 0 means all")
    parser.add_argument("--modes", default="batched,compiled")
    options = read(parser)
    device, few = torch.device(options.device), options.loop_targets or options.targets
    found = measure(options.model, options.targets, device, options.modes.split(","), options.rounds, few)
    finish("attack_throughput", found, options)


if __name__ == "__main__":
    main()
