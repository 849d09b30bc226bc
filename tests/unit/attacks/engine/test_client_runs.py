"""The client's code on many candidates: mapped only where that gives what one by one gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.attacks.engine.client_runs import run_clients
from gradveil.errors import UsageError
from gradveil.tensors import Named
from tests.unit.attacks.scenes import make_context

INPUTS, TARGETS = torch.arange(6.0).reshape(3, 2), torch.zeros(3, 2, dtype=torch.int64)


class Client:
    """Doubles its inputs, and counts how often it is asked; many at once it errs by ``off``, or fails."""

    def __init__(self, off: float = 0.0, failure: Exception | None = None) -> None:
        self.off, self.failure = off, failure
        self.alone = self.together = 0

    def one(self, inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        self.alone += 1
        return ({"w": 2 * inputs + draw},)

    def many(self, inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        self.together += 1
        if self.failure is not None:
            raise self.failure
        return ({"w": 2 * inputs + draw + self.off},)

    def context(self, **changes: Any) -> Any:
        return make_context(simulate=self.one, simulate_many=self.many, **changes)


@pytest.mark.parametrize(
    ("client", "alone", "together"),
    [
        (Client(), 2, 3),  # believed after two candidates ran both ways
        (Client(off=0.5), 2 + 9, 1),
        (Client(off=float("nan")), 2 + 9, 1),
        (Client(failure=RuntimeError("no batching rule")), 9, 1),
    ],
)
def test_what_differs_or_fails_is_asked_once_and_then_run_one_by_one(client: Client, alone: int, together: int) -> None:
    context = client.context()
    for draw in range(3):
        (found,) = run_clients(context, INPUTS, TARGETS, draw)
        assert torch.equal(found["w"], 2 * INPUTS + draw)
    assert (client.alone, client.together) == (alone, together)


def test_rounding_is_no_difference() -> None:
    client = Client(off=1e-5)
    (found,) = run_clients(client.context(), INPUTS, TARGETS, 0)
    assert torch.equal(found["w"], 2 * INPUTS + 1e-5)


def test_labels_of_another_kind_are_tried_anew() -> None:
    client = Client()
    context = client.context()
    run_clients(context, INPUTS, TARGETS, 0)
    run_clients(context, INPUTS, torch.rand(3, 2, 5), 0)
    assert (client.alone, client.together) == (4, 2)


def test_a_failure_later_on_is_remembered_too() -> None:
    client = Client()
    context = client.context()
    run_clients(context, INPUTS, TARGETS, 0)
    client.failure = torch.OutOfMemoryError("full")
    for _ in range(2):
        (found,) = run_clients(context, INPUTS, TARGETS, 0)
        assert torch.equal(found["w"], 2 * INPUTS)
    assert client.together == 2


def test_one_candidate_needs_no_mapping() -> None:
    client = Client()
    run_clients(client.context(), INPUTS[:1], TARGETS[:1], 0)
    assert (client.alone, client.together) == (1, 0)


def test_without_the_clients_code_nothing_runs() -> None:
    with pytest.raises(UsageError, match="no client's code"):
        run_clients(make_context(), INPUTS, TARGETS, 0)
