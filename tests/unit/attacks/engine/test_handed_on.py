"""What the engine hands on: the step it is at, the steps it took, how candidates share memory, and how each of them ended."""

from __future__ import annotations

import pytest
import torch

from gradveil.attacks import launch
from gradveil.attacks.base import Attack
from gradveil.attacks.engine import execution
from gradveil.attacks.engine.execution import CAPTURE_PAYS, Execution, choose_execution
from gradveil.attacks.engine.loop import Problem
from gradveil.attacks.engine.matching import Recipe, _schedules
from gradveil.attacks.engine.optimisers import LBFGS, MOST_HALVINGS, Adam, learning_rate_at
from gradveil.attacks.engine.smooth_relu import sharpness_at
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.inverting_gradients import InvertingGradients
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe

CUDA = torch.device("cuda")


@pytest.mark.parametrize("schedule", ["steps", "cosine"])
@pytest.mark.parametrize("step", [0, 3, 5])
def test_adam_steps_as_far_as_the_schedule_says(schedule: str, step: int) -> None:
    steps, optimiser = 8, Adam(learning_rate=0.5, schedule=schedule)  # type: ignore[arg-type]
    memory = optimiser.start(torch.zeros(1, 2))
    gradient = torch.tensor([[3.0, -2.0]])
    moved = []
    for one in range(step + 1):
        before = memory["trial"]
        memory = optimiser.advance(
            memory, torch.zeros(1), gradient, torch.ones(1, dtype=torch.bool), optimiser.numbers(one, steps)
        )
        moved.append(float((memory["trial"] - before).abs().max()))
    # Of a gradient that stays the same, every step of Adam is as long as its learning rate.
    assert moved[-1] == pytest.approx(learning_rate_at(schedule, 0.5, step, steps), rel=1e-3)  # type: ignore[arg-type]


def test_lbfgs_starts_again_after_so_many_halvings_and_not_before() -> None:
    optimiser, on = LBFGS(learning_rate=1.0), torch.ones(1, dtype=torch.bool)
    memory = optimiser.start(torch.zeros(1, 1))
    memory = optimiser.advance(memory, torch.ones(1), torch.ones(1, 1), on, {})
    strides = []
    for _ in range(MOST_HALVINGS + 1):
        memory = optimiser.advance(memory, torch.full((1,), 9.0), torch.ones(1, 1), on, {})
        strides.append(float(memory["stride"]))
    halved = [0.5 ** (count + 1) for count in range(MOST_HALVINGS)]
    assert strides == pytest.approx([*halved, 1.0])


@pytest.mark.parametrize(("steps", "mode"), [(CAPTURE_PAYS, "captured"), (CAPTURE_PAYS - 1, "batched")])
def test_on_a_gpu_candidates_share_its_free_memory(steps: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000_000, 1))
    one = 1_000_000 * 4 * 12 + 2 * 1_000_000  # what a candidate needs: a dozen gradients, and activations of its examples
    assert one < 60_000_000 < 2 * one
    assert choose_execution("auto", CUDA, 1_000_000, 7, 1, steps) == Execution(mode, 1)
    assert choose_execution("auto", CUDA, 100_000, 12, 2, steps) == Execution(mode, 4)
    assert execution._equal_chunks(12, 5) == 4


@pytest.mark.parametrize(
    "attack", [InvertingGradients(steps=5, restarts=2), FeatureInversion(steps=5, restarts=2)], ids=lambda one: one.card.name
)
def test_candidates_say_how_they_ended(attack: Attack) -> None:
    found = launch(attack, [observe(make_learner(), make_batch(seed=seed)) for seed in range(2)], make_context())
    assert [(each.target, each.restart, each.steps, each.status) for each in found] == [
        (target, restart, 5, "finished") for target in range(2) for restart in range(2)
    ]
    assert all(each.first_loss >= each.best_loss > 0 and each.gradient_norm > 0 for each in found)
    assert len({each.gradient_norm for each in found}) == 4


def test_an_attack_that_diverges_says_so_of_the_candidate_that_did() -> None:
    seen = [observe(make_learner(), make_batch(seed=seed)) for seed in range(2)]
    huge = {name: torch.full_like(value, 1e200) for name, value in seen[1].update.weights.items()}
    bad = seen[1].replace(updates=(seen[1].update.replace(weights=huge),))
    found = launch(InvertingGradients(steps=30, objective="l2"), [seen[0], bad], make_context(30))
    assert [each.status for each in found] == ["finished", "not finite"]
    assert found[1].steps < found[0].steps == 30


@pytest.mark.parametrize("step", [0, 4, 19])
def test_relus_are_as_sharp_and_priors_as_strong_as_their_step_says(step: int) -> None:
    recipe = Recipe(name="x", smooth_relu=True, tv=0.5, tv_end=0.125)
    problem = Problem(lambda leaves, constants: leaves["x"], {"x": torch.ones(3, 2)}, {}, schedules=_schedules(recipe, True, 20))
    found = problem.scheduled(step)
    assert found["sharpness"].tolist() == pytest.approx([sharpness_at(step, 20)] * 3)
    assert found["tv"].tolist() == pytest.approx([0.5 * 0.25 ** min(1, step / 18)] * 3)
