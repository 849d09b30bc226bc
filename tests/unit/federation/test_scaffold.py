"""SCAFFOLD against a reference written in numpy from the paper, and its control variates against the decoded update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gradveil.client.local_training import LocalTraining
from gradveil.client.update import run_client
from gradveil.defenses import ClientView, Defense, DefenseCard, State
from gradveil.defenses.none import NoDefense
from gradveil.errors import UsageError
from gradveil.federation.scaffold import Scaffold
from gradveil.federation.server import Reception, Server, receive
from gradveil.learning import Learner
from gradveil.learning.losses import mean_squared_error
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

CLIENTS, STEPS, RATE, ROUNDS, FEATURES = 4, 3, 0.05, 3, 5
SETTINGS = TrainingSettings(shares="weights", local_steps=STEPS, learning_rate=RATE)
SAMPLED = [[0, 1], [1, 3], [0, 2]]
Array = NDArray[np.float64]


def data() -> list[tuple[Array, Array]]:
    random = np.random.default_rng(3)
    return [(random.normal(size=(6, FEATURES)), random.normal(size=(6, 1)) + client) for client in range(CLIENTS)]


def reference() -> tuple[Array, Array, dict[int, Array]]:
    """Run Algorithm 1 of the paper (option II, server step 1) on least squares, in numpy."""
    x, c = np.zeros((1, FEATURES)), np.zeros((1, FEATURES))
    own = {client: np.zeros((1, FEATURES)) for client in range(CLIENTS)}
    sets = data()
    for sampled in SAMPLED:
        moves, changes = [], []
        for client in sampled:
            inputs, targets = sets[client]
            y = x.copy()
            for _ in range(STEPS):
                gradient = 2 * (inputs @ y.T - targets).T @ inputs / len(inputs)
                y = y - RATE * (gradient - own[client] + c)
            new = own[client] - c + (x - y) / (STEPS * RATE)
            moves.append(y - x)
            changes.append(new - own[client])
            own[client] = new
        x = x + np.mean(moves, axis=0)
        c = c + len(sampled) / CLIENTS * np.mean(changes, axis=0)
    return x, c, own


def play(defense: Defense) -> tuple[Server, Scaffold]:
    """Run the same rounds through the real client, server and control variates."""
    model = torch.nn.Linear(FEATURES, 1, bias=False).double()
    learner = Learner.of(model, mean_squared_error, SETTINGS)
    weights: Named = {"weight": torch.zeros(1, FEATURES, dtype=torch.float64)}
    server, scaffold, spec = Server(weights), Scaffold.start(weights, CLIENTS), ModelSpec.of(model)
    batches = [Batch(torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets in data()]
    for index, sampled in enumerate(SAMPLED):
        sent = {
            client: run_client(
                learner.replace(weights=server.weights),
                batches[client],
                defense,
                Seed(client),
                round_index=index,
                local=LocalTraining(correction=scaffold.correction(client)),
            ).payload
            for client in sampled
        }
        reception: Reception = receive(sent, defense, spec, round_index=index)
        assert reception.refused == {}
        server = server.step(reception, defense, spec).server
        scaffold = scaffold.after(reception.updates, SETTINGS)
    return server, scaffold


def test_it_is_the_paper_s_algorithm() -> None:
    x, c, own = reference()
    server, scaffold = play(NoDefense())
    assert np.abs(x).max() > 0.1
    assert np.allclose(server.weights["weight"].numpy(), x, atol=1e-12)
    assert np.allclose(scaffold.server["weight"].numpy(), c, atol=1e-12)
    for client in range(CLIENTS):
        assert np.allclose(scaffold.control(client)["weight"].numpy(), own[client], atol=1e-12)


def test_the_server_s_control_variate_is_the_mean_of_all_clients() -> None:
    _, scaffold = play(NoDefense())
    mean = sum(scaffold.control(client)["weight"] for client in range(CLIENTS)) / CLIENTS
    assert torch.allclose(scaffold.server["weight"], torch.as_tensor(mean), atol=1e-12)
    assert float(scaffold.server["weight"].abs().max()) > 0.1


@dataclass(frozen=True, kw_only=True)
class Hides(Defense):
    """Sends zeros, whatever was trained."""

    card: ClassVar[DefenseCard] = DefenseCard(name="hides", summary="For tests.")

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        return update.replace(weights={name: torch.zeros_like(value) for name, value in update.weights.items()}), state


def test_control_variates_know_only_what_was_decoded() -> None:
    server, scaffold = play(Hides())
    assert float(server.weights["weight"].abs().max()) == 0.0
    assert all(float(scaffold.control(client)["weight"].abs().max()) == 0.0 for client in range(CLIENTS))
    assert float(scaffold.server["weight"].abs().max()) == 0.0


def test_a_zero_update_turns_control_variates_that_were_there() -> None:
    start = Scaffold(2, {"w": torch.tensor([1.0])}, {0: {"w": torch.tensor([3.0])}})
    after = start.after({0: Update({"w": torch.zeros(1)}, examples=4)}, SETTINGS)
    assert after.control(0)["w"].tolist() == [2.0]  # c_i - c + 0
    assert after.server["w"].tolist() == [0.5]  # c + (2 - 3) / N
    assert after.control(1)["w"].tolist() == [0.0]
    assert start.control(0)["w"].tolist() == [3.0]


def test_steps_are_counted_from_the_examples_of_each_client() -> None:
    settings = TrainingSettings(shares="weights", epochs=2, minibatch=3, learning_rate=0.5)
    start = Scaffold.start({"w": torch.zeros(1)}, 2)
    after = start.after({0: Update({"w": torch.ones(1)}, examples=7)}, settings)
    assert after.control(0)["w"].tolist() == pytest.approx([1 / (6 * 0.5)])  # two epochs of three minibatches


@pytest.mark.parametrize("changes", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_other_optimisers_are_refused(changes: dict[str, object]) -> None:
    start = Scaffold.start({"w": torch.zeros(1)}, 2)
    with pytest.raises(UsageError, match="scaffold needs plain local sgd"):
        start.after({0: Update({"w": torch.ones(1)}, examples=1)}, SETTINGS.replace(**changes))
