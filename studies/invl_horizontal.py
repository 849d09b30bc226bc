"""Accuracy and cost of the horizontal rows of `invl_defenses.py` (Tables 2 and 4 of the InvRE paper), and their ensemble.

Accuracy: every round one client sends the gradient of one minibatch, which is all the data it has in that round, to a server with
Adam; so noise is in units of a gradient and undiluted, as in the paper. What a defense keeps goes from round to round: class
centres are those of the minibatch in which a basis is made, and it lasts ``refresh`` rounds.

Cost: one client's round of one pass over its records, over the same without a defense. Rounds are interleaved, the fastest is
taken, and both processor and wall time are told: on a busy machine only the first means something. A basis kept for R rounds
counts as (one that makes it + R - 1 that keep it) / R.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gradveil.client.update import run_client
from gradveil.data import load_data
from gradveil.defenses import build_defense
from gradveil.federation.setup import build_federation
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.study.federation import FederationSettings
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named


def one_client(spelling: str, options: SimpleNamespace, **more: Any) -> FederationSettings:
    """Return the paper's training: one client, one minibatch a round, BatchNorm on the statistics it came with."""
    return FederationSettings(
        data=options.data,
        defense=spelling,
        clients=1,
        clients_per_round=1,
        rounds=options.rounds,
        local_steps=1,
        minibatch=options.minibatch,
        batch_norm="eval",
        seed=options.seed,
        **more,
    )


def accuracy(spelling: str, options: SimpleNamespace) -> dict[str, Any]:
    """Train with a defense, and return its accuracy on the test records along the way."""
    settings = one_client(spelling, options, model=options.model, device=options.device)
    federation = build_federation(settings)
    learner = federation.learner.replace(settings=TrainingSettings(shares="gradient"))
    weights = {name: value.clone() for name, value in learner.weights.items()}
    server = torch.optim.Adam(list(weights.values()), lr=options.server_rate)
    state: Named | None = None
    curve, begun = [], time.process_time()
    for index in range(options.rounds):
        epoch, place = divmod(index * options.minibatch, len(federation.train) - len(federation.train) % options.minibatch)
        order = federation.seed.child("order").numpy("records", round=epoch).permutation(len(federation.train))
        rows = torch.from_numpy(order[place : place + options.minibatch])
        batch = federation.train.batch(rows.tolist())
        result = run_client(
            learner.replace(weights={name: value.clone() for name, value in weights.items()}),
            batch,
            federation.defense,
            federation.seed.child("client", 0),
            state=state,
            round_index=index,
            public=federation.public,
        )
        state = result.state
        update = federation.defense.decode(result.payload, federation.spec).weights
        for name, value in weights.items():
            value.grad = update[name].to(value)
        server.step()
        if (index + 1) % max(1, options.rounds // 4) == 0:
            curve.append([index + 1, federation.evaluate(weights, federation.evaluator.buffers)[0]])
    return {
        "defense": spelling,
        "settings": {
            **{name: getattr(options, name) for name in ("rounds", "minibatch", "server_rate", "refresh")},
            "data": Path(options.data).name,
            "server": "adam",
            "train": len(federation.train),
            "test": len(federation.test),
        },
        "final_accuracy": curve[-1][1],
        "accuracy": curve,
        "processor_seconds": round(time.process_time() - begun, 1),
    }


def last_common_round(records: Sequence[dict[str, Any]]) -> int:
    """Return the last round that all trainings were evaluated at; dear rows have fewer rounds."""
    common = set.intersection(*({int(at) for at, _ in record["accuracy"]} for record in records)) if records else set()
    return max(common, default=0)


def cost(spelling: str, options: SimpleNamespace) -> dict[str, Any]:
    """Time one client's round with a defense, over the same without one."""
    defense, plain = build_defense(spelling), build_defense("none")
    data = load_data(options.data)
    device = torch.device(options.device)
    model = build_model(options.model, input_shape=data.input_shape, classes=data.classes, seed=Seed(options.seed))
    settings = TrainingSettings(shares="weights", epochs=1, minibatch=options.minibatch, learning_rate=0.01)
    learner = Learner.of(model, loss_by_name("cross_entropy"), settings).to(device)
    batch = data.batch(list(range(options.cost_records)))
    batch = batch.replace(inputs=batch.inputs.to(device), targets=batch.targets.to(device))
    public = data.batch(list(range(options.cost_records, min(len(data), 2 * options.cost_records)))).inputs.to(device)

    def timed(which: Any, state: Named | None, index: int) -> tuple[tuple[float, float], Named]:
        # Weights of their own: a basis that was made before for the same ones must not be found again.
        own = learner.replace(weights={name: value.clone() for name, value in learner.weights.items()})
        begun = time.process_time(), time.perf_counter()
        result = run_client(own, batch, which, Seed(0), state=state, round_index=index, public=public)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.process_time() - begun[0], time.perf_counter() - begun[1]), result.state

    timed(plain, None, 0)
    keeps = options.refresh > 1 and "refresh" in spelling
    took: dict[str, list[tuple[float, float]]] = {"plain": [], "fresh": [], "kept": []}
    for _ in range(options.repeats):
        one, state = timed(defense, None, 0)
        took["fresh"].append(one)
        # Short rounds are repeated: the fastest of a few is what they take when nobody is in the way.
        for _ in range(5):
            took["plain"].append(timed(plain, None, 0)[0])
            if keeps:
                took["kept"].append(timed(defense, state, 1)[0])
    rounds = options.refresh if keeps else 1
    best = [{name: min(each[clock] for each in found) for name, found in took.items() if found} for clock in (0, 1)]
    ratios = [(clock["fresh"] + (rounds - 1) * clock.get("kept", 0.0)) / rounds / clock["plain"] for clock in best]
    return {
        "defense": spelling,
        "records": options.cost_records,
        "minibatch": options.minibatch,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "refresh": rounds,
        "processor_seconds": best[0],
        "wall_seconds": best[1],
        "ratio": ratios[0] if device.type == "cpu" else ratios[1],
        "wall_ratio": ratios[1],
    }
