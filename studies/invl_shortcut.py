"""Does noise along a class's own directions write the label into the picture? InvL-DNP with a basis per class, in training.

No plan says it: the trained network is asked about test pictures under noise of their own and of another class; a plan asks
for accuracy.

Trains as `invl_horizontal.py` does and asks the network about test pictures: clean, with the noise of their own class, and with
the noise of a class drawn at random among the others. A network that looks at pictures answers much the same each time; one
that has learned the noise names the class whose basis it was, and is lost without noise. White noise of the same variance is the
control.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gradveil.adversary import prefixed
from gradveil.client.update import run_client
from gradveil.defenses.invl.dnp import CLASS, InvLDNP
from gradveil.federation.setup import build_federation
from gradveil.learning import Learner
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from studies.invl_horizontal import one_client
from studies.invl_vertical import shrink
from studies.shared import grouped, table

FORMAT = "gradveil-invl-shortcut-1"
EVERY = 500
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


def units(settings: SimpleNamespace) -> list[str]:
    """Name sizes of pictures and seeds."""
    return list(grouped(settings))


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Train, and ask along the way."""
    options = grouped(settings)[unit]
    if options.factor > 1:
        smaller = work / f"shrunk{options.factor}.npz"
        shrink(Path(options.data), smaller, options.factor)
        options.data = str(smaller)
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
    return {
        "format": FORMAT,
        "input": list(test.inputs.shape[1:]),
        "model": MODEL,
        "defense": spelling,
        "seed": options.seed,
        "tested": len(test),
        "processor_seconds": round(time.process_time() - begun, 1),
        "directions": {name: len(basis) for name, basis in prefixed(state or {}, CLASS).items()},
        "curve": curve,
    }


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show what the network answers after every five hundred minibatches."""
    names = ("clean_right", "own_right", "other_right", "white_right", "other_names_the_noise")
    rows = [
        [
            "×".join(str(size) for size in each["input"][1:]),
            each["seed"],
            at["round"],
            *(f"{100 * at[name]:.1f} %" for name in names),
        ]
        for each in sorted(documents.values(), key=lambda each: (each["input"], each["seed"]))
        for at in each["curve"]
        if at["round"] % EVERY == 0
    ]
    return {
        "": table(
            "pictures | seed | minibatches | right: clean | under the noise of their own class | under that of another class | "
            "under white noise | names the other class",
            rows,
        )
    }
