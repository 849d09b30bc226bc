"""Soteria's mask: all feature Jacobian norms in batched passes against one backward per feature, in one run.

Released code walks through the features of the last layer: zero the input's gradient, one backward pass, one norm. The batched
form takes the same rows of the same Jacobian under ``vmap``. Both masks are compared before anything is timed.

    python -m benchmarks.soteria_mask --model lenet
    python -m benchmarks.soteria_mask --model resnet18 --device cuda
    python -m benchmarks.soteria_mask --model resnet18 --device cuda --batch 8
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import arguments, finish, in_turns, read
from gradveil.defenses.soteria import column_mask, feature_sensitivities, last_linear_layer
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed

RATE, EPSILON = 0.8, 0.1


def one_by_one(learner: Learner, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and Jacobian norms (B, F) by one backward pass per feature, over one forward pass."""
    module = learner.model.get_submodule(last_linear_layer(learner.model).removesuffix(".weight"))
    caught: list[Tensor] = []

    def catch(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        caught.append(arguments[0])

    handle = module.register_forward_pre_hook(catch)
    leaf = inputs.clone().requires_grad_(True)
    learner.forward(learner.weights, leaf)
    handle.remove()
    features = caught[0]
    norms = []
    for index in range(features.shape[1]):
        (slope,) = torch.autograd.grad(features[:, index].sum(), leaf, retain_graph=True)
        norms.append(slope.reshape(len(inputs), -1).norm(dim=1))
    return features.detach(), torch.stack(norms, dim=1)


def measure(model_name: str, batch: int, device: torch.device, rounds: int, side: int = 32) -> dict[str, Any]:
    """Interleave both ways for ``rounds`` rounds; return milliseconds of each, their ratio, and how far their norms differ."""
    model = build_model(model_name, input_shape=(3, side, side), classes=10, seed=Seed(0))
    learner = Learner.of(model, loss_by_name("cross_entropy")).to(device)
    inputs = torch.rand((batch, 3, side, side), generator=Seed(0).generator("benchmark")).to(device)
    ways = {"one_by_one": lambda: one_by_one(learner, inputs), "batched": lambda: feature_sensitivities(learner, inputs)}
    (features, slow), (_, fast) = ways["one_by_one"](), ways["batched"]()
    masks = [column_mask(features, norms, RATE, EPSILON) for norms in (slow, fast)]
    best = in_turns(ways, device, rounds=rounds)
    return {
        "model": model_name,
        "batch": batch,
        "features": features.shape[1],
        "milliseconds": {name: round(1000 * seconds, 2) for name, seconds in best.items()},
        "speedup": round(best["one_by_one"] / best["batched"], 2),
        "largest_difference": float(((slow - fast).abs() / slow.abs().max()).max()),
        "columns_that_differ": int((masks[0] != masks[1]).sum()),
    }


def main() -> None:
    """Measure and print, and write JSON where asked."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--side", type=int, default=32, help="height and width of the inputs")
    options = read(parser)
    found = measure(options.model, options.batch, torch.device(options.device), options.rounds, options.side)
    finish("soteria_mask", found, options)


if __name__ == "__main__":
    main()
