"""Small observations for the tests of attacks: a tiny client, its defense, and what its server sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks import AttackContext
from gradveil.attacks.base import PublicRecords
from gradveil.client.update import run_client
from gradveil.defenses import Defense, build_defense
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Observation, ThreatModel, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

SHAPE = (2, 8, 8)
CLASSES = 5


def make_learner(
    spelling: str = "lenet", *, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = SHAPE, seed: int = 0, **settings: Any
) -> Learner:
    model = build_model(spelling, input_shape=shape, classes=CLASSES, seed=Seed(seed))
    return Learner.of(model, loss_by_name("cross_entropy"), TrainingSettings(**settings)).to(dtype)


def make_batch(count: int = 1, *, seed: int = 0, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = SHAPE) -> Batch:
    generator = torch.Generator().manual_seed(1000 + seed)
    inputs = torch.rand((count, *shape), generator=generator).to(dtype)
    return Batch(inputs, torch.randint(CLASSES, (count,), generator=generator))


def send(learner: Learner, batch: Batch, defense: Defense, seed: Seed) -> Named:
    """Run all clients of one round as they would run, and return the mean of what arrives."""
    clients = learner.settings.clients
    own = learner.replace(settings=learner.settings.replace(clients=1))
    size = len(batch) // clients
    arrived = []
    for client in range(clients):
        part = slice(client * size, (client + 1) * size)
        payload = run_client(own, Batch(batch.inputs[part], batch.targets[part]), defense, seed.child(client)).payload
        arrived.append(defense.decode(payload, ModelSpec.of(learner.model)).weights)
    return {name: torch.stack([one[name] for one in arrived]).mean(0) for name in arrived[0]}


def observe(
    learner: Learner, batch: Batch, defense: str = "none", *, seed: int = 1, rounds: tuple[Learner, ...] = (), **changes: Any
) -> Observation:
    built, learners = build_defense(defense), (learner, *rounds)
    updates = tuple(
        Update(send(one, batch, built, Seed(seed).child("round", index)), examples=len(batch), round=index)
        for index, one in enumerate(learners)
    )
    return Observation(
        learners=learners,
        updates=updates,
        payloads=(),
        input_shape=tuple(batch.inputs.shape[1:]),
        classes=CLASSES,
        examples=len(batch),
        threat=ThreatModel(clients=learner.settings.clients, rounds=len(learners)),
        adversary=built.adversary(),
    ).replace(**changes)


def simulator(learners: tuple[Learner, ...], defense: str) -> Callable[[Tensor, Tensor, int], tuple[Named, ...]]:
    """Return the defended client's code for the attacker's own data, as an audit hands it to the context."""
    built = build_defense(defense)

    def simulate(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        return tuple(send(one, Batch(inputs, targets), built, Seed(99).child(draw)) for one in learners)

    return simulate


def make_context(budget: int = 20, **changes: Any) -> AttackContext:
    return AttackContext(**{"seed": Seed(5), "budget": budget, "execution": "batched", **changes})


def own_inputs(count: int = 8, *, size: int = 1, seed: int = 50, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return what an attacker tries the client's code on: inputs (P, B, ...) and targets (P, B)."""
    batches = [make_batch(size, seed=seed + place, dtype=dtype) for place in range(count)]
    return torch.stack([each.inputs for each in batches]), torch.stack([each.targets for each in batches])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def public(count: int = 70) -> PublicRecords:
    return PublicRecords(drawn(count, *SHAPE, seed=3), torch.arange(count) % CLASSES, "same")


def noting(calls: list[Any], call: Any, answer: Any) -> Any:
    """Note a call and answer it."""
    calls.append(call)
    return answer
