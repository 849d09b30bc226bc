"""Mutated payloads against the whole server: whatever arrives, the round ends, and the model stays finite."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradveil.client.update import run_client
from gradveil.defenses import DEFENSES, Defense, build_defense
from gradveil.federation import Server, receive
from gradveil.federation.setup import build_federation
from gradveil.records import Payload
from tests.unit.federation.small import settings, shapes

TRIES = 150
Mutation = Callable[[Tensor, random.Random], Tensor | None]

VALUES = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-30, 3e38, -3e38, 2.0**31)


def poke(value: Tensor, dice: random.Random) -> Tensor:
    """Change one entry."""
    changed = value.clone().reshape(-1)
    if changed.numel():
        chosen = dice.choice(VALUES)
        number = chosen if value.is_floating_point() or (math.isfinite(chosen) and abs(chosen) < 2**31) else -7
        changed[dice.randrange(changed.numel())] = number if value.is_floating_point() else int(number) % 128
    return changed.reshape(value.shape)


MUTATIONS: tuple[Mutation, ...] = (
    poke,
    lambda value, dice: torch.full_like(value, dice.choice(VALUES)) if value.is_floating_point() else torch.zeros_like(value),
    lambda value, dice: value.reshape(-1),
    lambda value, dice: value[:0] if value.ndim else value.reshape(1),
    lambda value, dice: torch.cat([value, value]) if value.ndim else value.reshape(1, 1),
    lambda value, dice: value.double() if value.is_floating_point() else value.to(torch.int16),
    lambda value, dice: value.to(torch.complex64) if value.is_floating_point() else value.bool(),
    lambda value, dice: value.flip(0) if value.ndim else value,
    lambda value, dice: None,
)


def mutate(payload: Payload, dice: random.Random) -> Payload:
    """Return a payload with one thing wrong, or two."""
    streams = {name: dict(named) for name, named in payload.streams.items()}
    changes: dict[str, object] = {}
    for _ in range(dice.choice((1, 1, 2))):
        filled = [name for name, named in streams.items() if named]
        match dice.randrange(8):
            case 0:
                changes["examples"] = dice.choice((-1, 0, 10**6, 2**60))
            case 1:
                changes["round"] = dice.choice((-1, 1, 2**60))
            case 2:
                changes["scheme"] = "dense-1" if payload.scheme != "dense-1" else "other"
            case 3 if filled:
                stream = dice.choice(filled)
                names = list(streams[stream])
                values = dice.sample(list(streams[stream].values()), len(names))
                streams[stream] = dict(zip(names, values, strict=True))
            case 4:
                streams[dice.choice(("extra", *streams))] = {"stranger": torch.ones(2)}
            case _ if filled:
                stream = dice.choice(filled)
                name = dice.choice(list(streams[stream]))
                changed = dice.choice(MUTATIONS)(streams[stream][name], dice)
                if changed is None:
                    del streams[stream][name]
                else:
                    streams[stream][name] = changed
    notes = {key: dice.choice((value, -1, 0, "x")) for key, value in payload.notes.items()}
    return dataclasses.replace(payload, streams=streams, notes=notes, **changes)  # type: ignore[arg-type]


def codecs() -> list[str]:
    """Name one defense per wire scheme, and every one that chooses aggregation weights."""
    chosen: dict[str, str] = {}
    for name in DEFENSES.names():
        defense: Defense = DEFENSES.build(name)
        chosen.setdefault(name if defense.overrides("layer_weights") else defense.scheme, name)
    return sorted(chosen.values())


@pytest.mark.parametrize("name", codecs())
def test_no_payload_stops_the_round(name: str) -> None:
    defense = build_defense(name)
    data = shapes(12)
    federation = build_federation(settings(defense=name, model="lenet", clients=3, clients_per_round=3), data, data)
    server = Server(federation.learner.weights, federation.evaluator.buffers, momentum=0.5)
    sent = {}
    for client in range(3):
        batch = federation.batch(client, 0)
        learner = federation.local_learner(server.weights, len(batch))
        seed = federation.seed.child("client", client)
        sent[client] = run_client(learner, batch, defense, seed, public=federation.public).payload
    sizes = {client: len(part) for client, part in enumerate(federation.parts)}
    honest = server.step(receive(sent, defense, federation.spec, round_index=0, sizes=sizes), defense, federation.spec)
    assert (honest.accepted, honest.note) == ((0, 1, 2), "")
    dice, refused = random.Random(name), 0
    for _ in range(TRIES):
        arrived = {0: sent[0], 1: mutate(sent[1], dice), 2: sent[2]}
        reception = receive(arrived, defense, federation.spec, round_index=0, sizes=sizes, buffers=server.buffers)
        step = server.step(reception, defense, federation.spec)
        refused += 1 in step.refused
        assert {0, 2} <= set(step.accepted)
        assert step.note == ""
        assert all(bool(torch.isfinite(value).all()) for value in step.server.weights.values())
    assert refused > TRIES // 3
