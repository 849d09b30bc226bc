"""The server: what it refuses, that the round goes on, and its optimiser against torch and the paper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from gradveil.defenses import Defense, DefenseCard
from gradveil.defenses.none import NoDefense
from gradveil.errors import BadUpdate
from gradveil.federation.server import Server, receive
from gradveil.records import ModelSpec, Payload, Role, Update
from gradveil.tensors import Named
from gradveil.wire import encode_dense

SIZES = {client: 4 for client in range(4)}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bn = nn.Linear(3, 2), nn.BatchNorm1d(2)


MODEL = Small()
SPEC = ModelSpec.of(MODEL)
WEIGHTS: Named = {name: torch.zeros(spec.shape) for name, spec in SPEC.named(Role.WEIGHT).items()}
BUFFERS: Named = {name: value.clone() for name, value in MODEL.named_buffers()}


def payload(value: float = 1.0, examples: int = 4, round_index: int = 2, **buffers: torch.Tensor) -> Payload:
    sent = {f"bn.{name}": tensor for name, tensor in buffers.items()}
    weights = {name: torch.full(tuple(tensor.shape), value) for name, tensor in WEIGHTS.items()}
    return encode_dense(Update(weights, examples, round_index, sent))


def with_weights(change: Callable[[Named], Named]) -> Payload:
    good = payload()
    return dataclasses.replace(good, streams={"weights": change(dict(good.streams["weights"]))})


def poisoned(value: float) -> Payload:
    return with_weights(lambda weights: {**weights, "layer.bias": torch.tensor([1.0, value])})


BAD = {
    "not a number": (poisoned(math.nan), "not finite in 'layer.bias'"),
    "infinite": (poisoned(math.inf), "not finite in 'layer.bias'"),
    "a name too few": (with_weights(lambda w: {n: v for n, v in w.items() if n != "layer.bias"}), "lacks \\['layer.bias'\\]"),
    "a name too many": (with_weights(lambda w: {**w, "extra": torch.zeros(1)}), "unexpected \\['extra'\\]"),
    "swapped shapes": (with_weights(lambda w: {**w, "layer.bias": w["layer.weight"]}), "'layer.bias' has shape \\(2, 3\\)"),
    "another precision": (with_weights(lambda w: {**w, "layer.bias": w["layer.bias"].double()}), "is torch.float64"),
    "another scheme": (dataclasses.replace(payload(), scheme="other-1"), "scheme is 'other-1'"),
    "another round": (payload(round_index=1), "of round 1, but this is round 2"),
    "no examples": (payload(examples=0), "claims 0 examples"),
    "too many examples": (payload(examples=5), "claims 5 examples, but the client registered with 4"),
    "negative variance": (payload(running_var=torch.tensor([0.5, 1.5])), "variances in 'bn.running_var' would be negative"),
    "infinite mean": (payload(running_mean=torch.tensor([0.5, math.inf])), "not finite in 'bn.running_mean'"),
    "counter backwards": (payload(num_batches_tracked=torch.tensor(1)), "'bn.num_batches_tracked' runs backwards"),
    "counter overflow": (
        payload(num_batches_tracked=torch.tensor(-(2**62))),
        "runs backwards or too far",
    ),
}


@pytest.mark.parametrize(("bad", "says"), BAD.values(), ids=BAD)
def test_a_bad_client_is_refused_and_the_round_goes_on(bad: Payload, says: str) -> None:
    sent = {0: payload(1.0), 1: bad, 2: payload(3.0)}
    reception = receive(sent, NoDefense(), SPEC, round_index=2, sizes=SIZES, buffers=BUFFERS)
    assert list(reception.updates) == [0, 2]
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(reception.refused[1])
    step = Server(WEIGHTS, BUFFERS).step(reception, NoDefense(), SPEC)
    assert step.accepted == (0, 2)
    assert step.note == ""
    assert all(torch.equal(value, torch.full_like(value, -2.0)) for value in step.server.weights.values())


def test_when_all_are_refused_nothing_changes_and_the_step_says_so() -> None:
    server = Server(WEIGHTS, BUFFERS, momentum=0.9)
    reception = receive({0: poisoned(math.nan), 1: payload(round_index=9)}, NoDefense(), SPEC, round_index=2)
    step = server.step(reception, NoDefense(), SPEC)
    assert step.server is server
    assert step.accepted == ()
    assert sorted(step.refused) == [0, 1]
    assert step.note == (
        "the weights stay as they were: there are no updates to aggregate: every client was refused or sent nothing"
    )


def test_finite_updates_that_make_the_model_infinite_change_nothing() -> None:
    server = Server(WEIGHTS, BUFFERS, learning_rate=1e30)
    reception = receive({0: payload(1e19)}, NoDefense(), SPEC, round_index=2)
    step = server.step(reception, NoDefense(), SPEC)
    assert step.server is server
    assert "the new global model has 6 entries that are not finite" in step.note


@pytest.mark.parametrize("settings", [{}, {"learning_rate": 10.0}, {"momentum": 0.9}, {"optimizer": "adam"}], ids=str)
def test_one_client_with_huge_numbers_does_not_stop_the_others(settings: dict[str, Any]) -> None:
    server = Server(WEIGHTS, BUFFERS, **settings)
    alone, both = (
        server.step(receive(sent, NoDefense(), SPEC, round_index=2), NoDefense(), SPEC)
        for sent in ({0: payload()}, {0: payload(), 1: payload(3e38)})
    )
    assert both.accepted == (0,) and "size 3e+38" in both.refused[1] and not both.note
    assert torch.equal(both.server.weights["layer.bias"], alone.server.weights["layer.bias"])


def test_huge_running_statistics_are_refused() -> None:
    liar = payload(running_mean=torch.tensor([0.0, -3e38]))
    assert "'bn.running_mean' has an entry of size" in receive({0: liar}, NoDefense(), SPEC, round_index=2).refused[0]


@pytest.mark.parametrize(("dtype", "change"), [(torch.bool, 0), (torch.uint8, 1), (torch.int8, -120), (torch.int64, 1)], ids=str)
def test_buffers_of_other_kinds_that_a_client_changes_are_refused_by_name(dtype: torch.dtype, change: int) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("mask", torch.full((2,), 10).to(dtype))
    spec, buffers = ModelSpec.of(model), dict(model.named_buffers())
    weights = {name: torch.zeros(own.shape) for name, own in spec.named(Role.WEIGHT).items()}
    sent = encode_dense(Update(weights, 4, 0, {"mask": torch.full((2,), change).to(dtype)}))
    found = receive({0: sent}, NoDefense(), spec, round_index=0, buffers=buffers)
    assert "'mask'" in found.refused[0]


def test_a_narrow_counter_may_count_up() -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("seen", torch.tensor(10, dtype=torch.int8))
    spec, buffers = ModelSpec.of(model), dict(model.named_buffers())
    weights = {name: torch.zeros(own.shape) for name, own in spec.named(Role.WEIGHT).items()}
    sent = encode_dense(Update(weights, 4, 0, {"seen": torch.tensor(-3, dtype=torch.int8)}))
    step = Server(weights, buffers).step(receive({0: sent}, NoDefense(), spec, round_index=0, buffers=buffers), NoDefense(), spec)
    assert int(step.server.buffers["seen"]) == 13


@dataclass(frozen=True, kw_only=True)
class Weighs(Defense):
    """Weighs clients by a note in their payload."""

    card: ClassVar[DefenseCard] = DefenseCard(name="weighs", summary="For tests.")
    strict: bool = True

    def layer_weights(self, payloads: Sequence[Payload]) -> list[dict[str, float]]:
        if self.strict and any(float(each.notes["trust"]) < 0 for each in payloads):
            raise BadUpdate("trust is negative")
        return [{"layer.weight": float(each.notes["trust"])} for each in payloads]


def trusted(value: float, trust: float) -> Payload:
    return dataclasses.replace(payload(value), notes={"trust": trust})


@pytest.mark.parametrize("strict", [True, False])
def test_a_client_whose_aggregation_weight_is_a_lie_is_refused(strict: bool) -> None:
    defense = Weighs(strict=strict)
    reception = receive({0: trusted(1.0, 3.0), 1: trusted(9.0, -1.0), 2: trusted(5.0, 1.0)}, defense, SPEC, round_index=2)
    step = Server(WEIGHTS).step(reception, defense, SPEC)
    assert step.accepted == (0, 2)
    assert list(step.refused) == [1]
    assert float(step.server.weights["layer.weight"][0, 0]) == -2.0  # 3/4 · 1 + 1/4 · 5
    assert float(step.server.weights["layer.bias"][0]) == -3.0  # by examples


def test_weights_that_sum_to_zero_stop_the_step_by_name() -> None:
    reception = receive({0: trusted(1.0, 0.0), 1: trusted(2.0, 0.0)}, Weighs(), SPEC, round_index=2)
    step = Server(WEIGHTS).step(reception, Weighs(), SPEC)
    assert step.server.weights is WEIGHTS
    assert "the aggregation weights of 'layer.weight' sum to zero" in step.note


def rounds(server: Server, directions: Sequence[float]) -> float:
    for value in directions:
        step = server.step(receive({0: payload(value)}, NoDefense(), SPEC, round_index=2), NoDefense(), SPEC)
        assert step.note == ""
        server = step.server
    return float(server.weights["layer.bias"][0])


def test_momentum_is_that_of_torch() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    for value in (1.0, -2.0, 3.0):
        weight.grad = torch.tensor([value])
        optimizer.step()
    moved = rounds(Server(WEIGHTS, learning_rate=0.5, momentum=0.9), (1.0, -2.0, 3.0))
    assert moved == pytest.approx(weight.item(), rel=1e-6)


def test_adam_is_that_of_adaptive_federated_optimization() -> None:
    x = mean = square = 0.0
    for value in (1.0, -2.0, 3.0):
        mean, square = 0.9 * mean + 0.1 * value, 0.99 * square + 0.01 * value**2
        x -= 0.1 * mean / (math.sqrt(square) + 1e-3)
    assert rounds(Server(WEIGHTS, optimizer="adam", learning_rate=0.1), (1.0, -2.0, 3.0)) == pytest.approx(x, rel=1e-5)


def test_buffers_are_averaged_without_the_optimiser() -> None:
    sent = {
        0: payload(1.0, 1, running_mean=torch.tensor([-4.0, 0.0]), num_batches_tracked=torch.tensor(-2)),
        1: payload(1.0, 3, running_mean=torch.tensor([-8.0, 0.0]), num_batches_tracked=torch.tensor(-5)),
    }
    reception = receive(sent, NoDefense(), SPEC, round_index=2, sizes=SIZES, buffers=BUFFERS)
    server = Server(WEIGHTS, BUFFERS, learning_rate=0.01, momentum=0.5).step(reception, NoDefense(), SPEC).server
    assert server.buffers["bn.running_mean"].tolist() == [7.0, 0.0]
    assert server.buffers["bn.running_var"].tolist() == [1.0, 1.0]
    assert int(server.buffers["bn.num_batches_tracked"]) == 5


def test_aggregation_weights_of_honest_clients_change_the_aggregate() -> None:
    sent = {0: trusted(1.0, 3.0), 1: trusted(5.0, 1.0)}
    steps = {}
    for defense in (Weighs(), NoDefense()):
        reception = receive(sent, defense, SPEC, round_index=2)
        steps[type(defense)] = Server(WEIGHTS).step(reception, defense, SPEC)
    weighed, plain = steps[Weighs], steps[NoDefense]
    assert (weighed.accepted, plain.accepted, weighed.refused) == ((0, 1), (0, 1), {})
    assert float(weighed.server.weights["layer.weight"][0, 0]) == -2.0  # 3/4 · 1 + 1/4 · 5
    assert float(plain.server.weights["layer.weight"][0, 0]) == -3.0  # by examples
