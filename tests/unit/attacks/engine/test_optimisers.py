"""Optimisers over many candidates: they minimise, and rows never mix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradveil.attacks.engine.execution import Execution
from gradveil.attacks.engine.loop import Outcome, Problem, optimise
from gradveil.attacks.engine.optimisers import LBFGS, Adam, Optimiser, learning_rate_at
from gradveil.tensors import Named

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "attacks.json").read_text())


def rosenbrock(leaves: Named, constants: Named) -> Tensor:
    x, y = leaves["point"][0], leaves["point"][1]
    return constants["steepness"] * ((1 - x).square() + 100 * (y - x.square()).square())


def run(optimiser: Optimiser, points: Tensor, steps: int, **constants: Tensor) -> Outcome:
    problem = Problem(rosenbrock, {"point": points}, constants)
    return optimise(problem, optimiser, steps, Execution("batched", len(points)))


STARTS = torch.tensor([[-1.2, 1.0], [0.0, 3.0], [2.0, -1.0], [-3.0, -4.0]], dtype=torch.float64)


def test_lbfgs_finds_the_minimum_of_every_row() -> None:
    outcome = run(LBFGS(), STARTS, 150, steepness=torch.ones(4, dtype=torch.float64))
    assert torch.allclose(outcome.leaves["point"], torch.ones(4, 2, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("steepness", [1e-6, 1.0, 1e9])
def test_lbfgs_does_not_stall_on_steep_or_flat_losses(steepness: float) -> None:
    outcome = run(LBFGS(), STARTS, 200, steepness=torch.full((4,), steepness, dtype=torch.float64))
    assert bool((outcome.best_loss < 1e-8 * outcome.first_loss).all())


def test_lbfgs_solves_a_quadratic_in_about_as_many_steps_as_it_has_directions() -> None:
    scales = torch.logspace(0, 3, 10, dtype=torch.float64)
    problem = Problem(
        lambda leaves, _: (scales * (leaves["x"] - 1).square()).sum(), {"x": torch.zeros(1, 10, dtype=torch.float64)}, {}
    )
    assert float(optimise(problem, LBFGS(), 60, Execution("batched", 1)).best_loss) < 1e-10


@pytest.mark.parametrize("optimiser", [LBFGS(), Adam(learning_rate=0.05), Adam(learning_rate=0.05, signed=True)], ids=repr)
def test_a_row_does_not_know_its_company(optimiser: Optimiser) -> None:
    steepness = torch.tensor([1.0, 1e3, 1e-3, 7.0], dtype=torch.float64)
    together = run(optimiser, STARTS, 25, steepness=steepness)
    for row in range(4):
        alone = run(optimiser, STARTS[row : row + 1], 25, steepness=steepness[row : row + 1])
        assert torch.allclose(alone.leaves["point"][0], together.leaves["point"][row], rtol=1e-9, atol=1e-12)
        assert float(alone.best_loss) == pytest.approx(float(together.best_loss[row]), rel=1e-9)


def test_a_row_that_meets_nan_does_not_disturb_the_others() -> None:
    steepness = torch.tensor([1.0, float("nan"), 1.0, 1.0], dtype=torch.float64)
    for optimiser in (LBFGS(), Adam()):
        outcome = run(optimiser, STARTS, 60, steepness=steepness)
        clean = run(optimiser, STARTS, 60, steepness=torch.ones(4, dtype=torch.float64))
        assert outcome.status == ["finished", "not finite", "finished", "finished"]
        assert torch.allclose(outcome.best_loss[[0, 2, 3]], clean.best_loss[[0, 2, 3]])


def test_adam_is_the_adam_of_torch() -> None:
    optimiser = Adam(learning_rate=0.03, schedule="constant")
    memory, point = optimiser.start(STARTS), STARTS.clone().requires_grad_()
    reference = torch.optim.Adam([point], lr=0.03, eps=1e-12)
    active = torch.ones(4, dtype=torch.bool)
    for step in range(100):
        trial = memory["trial"].clone().requires_grad_()
        (slope,) = torch.autograd.grad((trial**4 - trial.sum(1, keepdim=True).square()).sum(), trial)
        memory = optimiser.advance(memory, slope[:, 0], slope, active, optimiser.numbers(step, 100))
        reference.zero_grad()
        (point**4 - point.sum(1, keepdim=True).square()).sum().backward()
        reference.step()
    assert torch.allclose(memory["trial"], point.detach(), atol=1e-6)


def test_signed_adam_sees_only_signs() -> None:
    optimiser, active = Adam(signed=True), torch.ones(2, dtype=torch.bool)
    slopes = torch.tensor([[3.0, -0.1], [300.0, -1e-5]])
    memory = optimiser.advance(optimiser.start(torch.zeros(2, 2)), slopes[:, 0], slopes, active, optimiser.numbers(0, 10))
    assert torch.equal(memory["trial"][0], memory["trial"][1])
    assert memory["trial"][0].sign().tolist() == [-1.0, 1.0]


def test_rows_that_are_not_active_stay() -> None:
    active = torch.tensor([True, False])
    for optimiser in (Adam(), LBFGS()):
        memory = optimiser.start(torch.ones(2, 3))
        for step in range(3):
            numbers = optimiser.numbers(step, 3)
            memory = optimiser.advance(memory, torch.ones(2) / (step + 1), torch.ones(2, 3), active, numbers)
        assert torch.equal(memory["trial"][1], torch.ones(3))
        assert not torch.equal(memory["trial"][0], torch.ones(3))


@pytest.mark.parametrize("case", GOLDEN["learning_rates"]["value"], ids=str)
def test_schedules(case: dict[str, float | str]) -> None:
    found = [learning_rate_at(case["schedule"], 1.0, step, 800) for step in (0, 299, 300, 500, 700, 799)]  # type: ignore[arg-type]
    assert found == pytest.approx(case["rates"], rel=GOLDEN["learning_rates"]["tolerance"])
