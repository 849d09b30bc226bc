"""A small federation in Flower's own messages: the app is called directly, so a round takes milliseconds and starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'gradveil[flower]'")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

from gradveil.client import run_client
from gradveil.client.update import ClientResult
from gradveil.defenses import Defense, build_defense
from gradveil.federation import Server, receive
from gradveil.flower.protecting import protect
from gradveil.learning import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

RUN, SEED, RATE = 7, 5, 0.5
SETTINGS = TrainingSettings(shares="weights", learning_rate=RATE)
NODES = {901: 0, 407: 1, 655: 2}
"""Node to partition: numbers of nodes are in another order than those of partitions, as in real runs."""
SIZES = (4, 6, 10)
App = Callable[[Message, Context], Message]


class Net(nn.Module):
    """As in Flower's quickstart, and smaller."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.head = nn.Linear(3 * 36, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(self.conv(inputs)).sigmoid().flatten(1))
        return outputs


def net(*, norm: bool = False) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net(norm=norm)


def batch_of(partition: int) -> Batch:
    generator = torch.Generator().manual_seed(partition)
    size = SIZES[partition]
    inputs = torch.rand((size, 1, 8, 8), generator=generator)
    return Batch(inputs, torch.randint(4, (size,), generator=generator), tuple(f"{partition}-{row}" for row in range(size)))


def step_of_sgd(message: Message, context: Context, model: nn.Module) -> Message:
    """What the app's author wrote: nothing of Gradveil in it."""
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    batch = batch_of(int(context.node_config["partition-id"]))
    loss = torch.nn.functional.cross_entropy(model(batch.inputs), batch.targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    metrics = MetricRecord({"num-examples": len(batch), "train_loss": float(loss.detach())})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def app_with(*mods: Any, norm: bool = False) -> ClientApp:
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        return step_of_sgd(message, context, net(norm=norm))

    return app


def protected(defense: str, folder: Path, **options: Any) -> ClientApp:
    norm = "buffers" in options
    return app_with(protect(net(norm=norm), defense, folder=folder, **{"seed": SEED, **options}), norm=norm)


class Grid:
    """All that a strategy asks of a grid before messages are sent."""

    def get_node_ids(self) -> list[int]:
        return list(NODES)


def fed(kind: type[Any] = FedAvg, **options: Any) -> Any:
    return kind(**{"fraction_evaluate": 0.0, "min_train_nodes": 3, "min_available_nodes": 3, **options})


@dataclass
class Play:
    """A run in progress: what was last sent and answered, and the model."""

    strategy: Any
    app: App
    arrays: ArrayRecord
    contexts: dict[int, Context] = field(default_factory=dict)
    round: int = 0
    asked: list[Message] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)

    @classmethod
    def of(cls, strategy: Any, app: App) -> Play:
        contexts = {
            node: Context(RUN, node, {"partition-id": place, "num-partitions": 3}, RecordDict(), {})
            for node, place in NODES.items()
        }
        return cls(strategy, app, strategy.initial_arrays, contexts)

    def ask(self, **config: Any) -> list[Message]:
        self.round += 1
        self.asked = list(self.strategy.configure_train(self.round, self.arrays, ConfigRecord(config), Grid()))
        self.replies = [self.app(message, self.contexts[message.metadata.dst_node_id]) for message in self.asked]
        return self.replies

    def end(self, replies: list[Message] | None = None) -> Any:
        arrays, _ = self.strategy.aggregate_train(self.round, self.replies if replies is None else replies)
        self.arrays = arrays or self.arrays
        return self.strategy.receipts[-1]

    @property
    def weights(self) -> Named:
        return {name: torch.from_numpy(array.numpy().copy()) for name, array in self.arrays.items()}


def embedded(defense: Defense, rounds: int, places: tuple[int, ...] = (0, 1, 2)) -> tuple[Named, list[dict[int, ClientResult]]]:
    """Return the weights and payloads of the same federation in one process, without Flower."""
    learner = Learner.of(net(), cross_entropy, SETTINGS)
    spec, server = ModelSpec.of(learner.model), Server(learner.weights)
    kept: dict[int, Named] = {}
    sent: list[dict[int, ClientResult]] = []
    for index in range(rounds):
        here = learner.replace(weights=server.weights)
        results = {
            place: run_client(
                here, batch_of(place), defense, Seed(SEED).child("client", place), state=kept.get(place), round_index=index
            )
            for place in places
        }
        kept = {place: result.state for place, result in results.items()}
        payloads = {place: result.payload for place, result in results.items()}
        server = server.step(receive(payloads, defense, spec, round_index=index), defense, spec).server
        sent.append(results)
    return dict(server.weights), sent


def built(spelling: str) -> Defense:
    return build_defense(spelling)


def worst(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    return max(float((left[name].double() - value.detach().double()).abs().max()) for name, value in right.items())


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be a task of a run, which messages ask for; and allow seeds, which real clients refuse."""
    for name, value in (("_run_id", RUN), ("_task_id", 1), ("_node_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
    monkeypatch.setenv("GRADVEIL_UNSAFE_SEEDS", "1")
    yield
