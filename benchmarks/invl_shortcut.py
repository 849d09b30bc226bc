"""Does noise along a class's own directions write the label into the picture? InvL-DNP with a basis per class, in training.

No study: the trained network is asked about test pictures under noise of their own and of another class; a plan asks for
accuracy.

    python benchmarks/invl_shortcut.py --data cifar10.npz --rounds 500 --seed 0 --out shortcut.json

Trains as `invl_horizontal.py` does and asks the network about test pictures: clean, with the noise of their own class, and with
the noise of a class drawn at random among the others. A network that looks at pictures answers much the same each time; one
that has learned the noise names the class whose basis it was, and is lost without noise. White noise of the same variance is the
control.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from invl_horizontal import one_client
from torch import Tensor

from gradveil import __version__
from gradveil.adversary import prefixed
from gradveil.client.update import run_client
from gradveil.defenses.invl.dnp import CLASS, InvLDNP
from gradveil.federation.setup import build_federation
from gradveil.learning import Learner
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

FORMAT = "gradveil-invl-shortcut-1"
MODEL = "lenet(activation='relu', normalize='cifar10')"


def answers(learner: Learner, weights: Named, inputs: Tensor) -> Tensor:
    """Return the class the network names for every picture."""
    with torch.no_grad():
        return learner.logits(weights, inputs, learner.zero_noise(len(inputs))).argmax(1)


def along(bases: dict[int, Tensor], classes: Tensor, inputs: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Return the pictures with noise along the basis of the class named for each."""
    drawn = torch.randn(inputs.shape, generator=generator).reshape(len(inputs), -1)
    noise = torch.zeros_like(drawn)
    for each, basis in bases.items():
        members = classes == each
        noise[members] = (drawn[members] @ basis.T) @ basis
    return (inputs + std * noise.reshape(inputs.shape)).clamp(0, 1)


def asked(learner: Learner, weights: Named, state: Named, defense: InvLDNP, inputs: Tensor, truth: Tensor) -> dict[str, float]:
    """Return how often the network names the truth, and how often the class whose noise it was shown."""
    bases = {int(name): basis for name, basis in prefixed(state, CLASS).items()}
    classes = max(bases) + 1
    generator = torch.Generator().manual_seed(0)
    other = (truth + torch.randint(1, classes, truth.shape, generator=generator)) % classes
    shown = {
        "clean": inputs,
        "own": along(bases, truth, inputs, defense.std, generator),
        "other": along(bases, other, inputs, defense.std, generator),
        "white": (inputs + defense.std * torch.randn(inputs.shape, generator=generator)).clamp(0, 1),
    }
    named = {name: answers(learner, weights, pictures) for name, pictures in shown.items()}
    right = {f"{name}_right": float((found == truth).float().mean()) for name, found in named.items()}
    return right | {"other_names_the_noise": float((named["other"] == other).float().mean())}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--delta", type=float, default=0.08)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--every", type=int, default=125)
    parser.add_argument("--minibatch", type=int, default=32)
    parser.add_argument("--server-rate", type=float, default=2e-3)
    parser.add_argument("--tested", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    spelling = f"invl_dnp(delta={options.delta}, basis='class', refresh={options.rounds})"
    federation, begun = build_federation(one_client(spelling, options, model=MODEL)), time.process_time()
    defense = federation.defense
    assert isinstance(defense, InvLDNP)
    learner = federation.learner.replace(settings=TrainingSettings(shares="gradient"))
    weights = {name: value.clone() for name, value in learner.weights.items()}
    server = torch.optim.Adam(list(weights.values()), lr=options.server_rate)
    test = federation.test.batch(list(range(min(options.tested, len(federation.test)))))
    state: Named | None = None
    curve: list[dict[str, Any]] = []
    for index in range(options.rounds):
        epoch, place = divmod(index * options.minibatch, len(federation.train) - len(federation.train) % options.minibatch)
        order = federation.seed.child("order").numpy("records", round=epoch).permutation(len(federation.train))
        batch = federation.train.batch(order[place : place + options.minibatch].tolist())
        own = learner.replace(weights={name: value.clone() for name, value in weights.items()})
        client = federation.seed.child("client", 0)
        result = run_client(own, batch, defense, client, state=state, round_index=index, public=federation.public)
        state = result.state
        update = defense.decode(result.payload, federation.spec).weights
        for name, value in weights.items():
            value.grad = update[name].to(value)
        server.step()
        if (index + 1) % options.every == 0:
            curve.append({"round": index + 1, **asked(learner, weights, state, defense, test.inputs, test.targets)})
            sys.stderr.write(f"{time.process_time() - begun:8.1f} s  {curve[-1]}\n")
    record = {
        "format": FORMAT,
        "version": __version__,
        "torch": torch.__version__,
        "data": Path(options.data).name,
        "input": list(test.inputs.shape[1:]),
        "model": MODEL,
        "defense": spelling,
        "seed": options.seed,
        "tested": len(test),
        "processor_seconds": round(time.process_time() - begun, 1),
        "directions": {name: len(basis) for name, basis in prefixed(state or {}, CLASS).items()},
        "curve": curve,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
