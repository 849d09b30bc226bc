"""What attacks hand to the engine: how much there is to compute, every round's own offset, and the settings of each search."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.attacks import launch, peeling
from gradveil.attacks.adaptive import StraightThrough
from gradveil.attacks.base import Attack
from gradveil.attacks.engine.execution import choose_execution
from gradveil.attacks.engine.loop import optimise
from gradveil.attacks.engine.matching import Recipe, run_recipe
from gradveil.attacks.engine.smooth_relu import SHARPNESS, sharpness_at
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.attacks.peeling import Peeling
from gradveil.tensors import Named
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe

POOLED = 'convnet(width=4, norm="none")'


def watched(monkeypatch: pytest.MonkeyPatch, module: str, name: str, inner: Any) -> list[tuple[Any, ...]]:
    """Note the arguments of a function that an attack calls."""
    calls: list[tuple[Any, ...]] = []

    def noting(*given: Any, **more: Any) -> Any:
        calls.append((*given, *more.values()))
        return inner(*given, **more)

    monkeypatch.setattr(f"gradveil.attacks.{module}.{name}", noting)
    return calls


@pytest.mark.parametrize(
    ("attack", "module", "examples", "steps"),
    [
        (InvertingGradients(steps=7, restarts=2), "engine.matching", 2, 7),
        (FeatureInversion(steps=7, restarts=2), "feature_inversion", 1, 7),
        (Peeling(steps=8, restarts=2), "peeling", 1, 0),  # never recorded on a CPU
    ],
    ids=lambda value: value.card.name if isinstance(value, Attack) else None,
)
def test_the_engine_is_told_what_there_is_to_compute(
    attack: Attack, module: str, examples: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watched(monkeypatch, module, "choose_execution", choose_execution)
    learner = make_learner(POOLED if module == "peeling" else "lenet", shape=(2, 16, 16))
    seen = [observe(learner, make_batch(examples, seed=seed, shape=(2, 16, 16))) for seed in range(3)]
    launch(attack, seen, make_context(100))
    ((wanted, device, parameters, candidates, told, planned),) = calls
    assert (wanted, device.type, parameters, candidates, told) == ("batched", "cpu", learner.parameters, 6, examples)
    assert planned == steps


def test_every_round_has_an_offset_of_its_own() -> None:
    first = make_learner()
    second = first.replace(weights={name: 1.5 * value for name, value in first.weights.items()})
    guess = make_batch(2)

    def simulate(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        return tuple(
            {name: value + (10 * (index + 1) + draw) for name, value in one.update(inputs, targets).items()}
            for index, one in enumerate((first, second))
        )

    context = make_context(simulate=simulate)
    found = StraightThrough(draws=2).offsets((first, second), guess.inputs[None], guess.targets[None], context, 3)
    # Draws 6 and 7 of step 3: their mean beside ten for the first round and twenty for the second.
    for index, wanted in enumerate((16.5, 26.5)):
        assert all(torch.allclose(value, torch.full_like(value, wanted)) for value in found[index].values())


def test_peeling_searches_with_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watched(monkeypatch, "peeling", "optimise", optimise)
    attack = Peeling(steps=40, restarts=1, learning_rate=0.3)
    learner = make_learner(POOLED, shape=(2, 16, 16))
    launch(attack, [observe(learner, make_batch(shape=(2, 16, 16)))], make_context(100))
    rates = [call[1].learning_rate for call in calls]
    assert set(rates) == {0.3, 0.15} and all(call[1].schedule == "cosine" for call in calls)
    for problem, optimiser, steps, *_ in calls:
        if optimiser.learning_rate == 0.3 and problem.tracks is not None:
            assert problem.tracks(steps - 1) and (steps < 4 or not problem.tracks(0))
    fixed = {name for call in calls for name in call[0].boxed}
    assert fixed == {"inputs"}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Peeling)])
def test_each_setting_of_peeling_moves_what_is_found(name: str) -> None:
    learner = make_learner(POOLED, shape=(2, 16, 16))
    seen = [observe(learner, make_batch(shape=(2, 16, 16)))]
    attack = Peeling(steps=24, restarts=1)
    value = getattr(attack, name)
    changed: Any = {name: "informed" if name == "stance" else 2 * value if isinstance(value, int) else 1.5 * value}
    before, after = (launch(each, seen, make_context(100)) for each in (attack, dataclasses.replace(attack, **changed)))
    if name == "stance":
        assert [each.stance for each in after] == ["informed"]
    elif name == "restarts":
        assert len(after) == 2 * len(before)
    else:
        assert not torch.equal(before[0].inputs, after[0].inputs)


@pytest.mark.parametrize("name", ["learning_rate", "tv", "tv_end", "steps", "restarts"])
def test_each_setting_of_feature_inversion_moves_what_is_found(name: str) -> None:
    seen = [observe(make_learner(), make_batch())]
    attack = FeatureInversion(steps=12)
    value = getattr(attack, name)
    changed: Any = {name: 2 * value if isinstance(value, int) else 1.5 * value}
    before, after = (launch(each, seen, make_context(100)) for each in (attack, dataclasses.replace(attack, **changed)))
    if name == "restarts":
        assert [each.restart for each in after] == [0, 1] and not torch.equal(after[0].inputs, after[1].inputs)
        assert torch.equal(before[0].inputs, after[0].inputs)
    else:
        assert not torch.equal(before[0].inputs, after[0].inputs)


def test_both_searches_of_peeling_grow_sharp_and_let_only_settled_steps_compete(monkeypatch: pytest.MonkeyPatch) -> None:

    def hasty(problem: Any, optimiser: Any, steps: int, *more: Any, **others: Any) -> Any:
        return optimise(problem, optimiser, 1, *more)

    calls = watched(monkeypatch, "peeling", "optimise", hasty)
    attack = Peeling(steps=2 * peeling.ROUND, restarts=1)
    learner = make_learner(POOLED, shape=(2, 16, 16))
    launch(attack, [observe(learner, make_batch(shape=(2, 16, 16)))], make_context(10_000))
    starts: dict[str, list[float]] = {"features": [], "inputs": []}
    for problem, _, steps, *_ in calls:
        (leaf,) = problem.leaves
        wanted = peeling._settled(steps)
        assert problem.tracks is not None and problem.refresh is not None
        assert [problem.tracks(step) for step in range(steps)] == [wanted(step) for step in range(steps)]
        first, last = (problem.refresh(step, problem.leaves, problem.constants) for step in (0, steps - 1))
        begun = problem.constants[SHARPNESS]
        starts[leaf].append(float(begun.flatten()[0]))
        assert torch.allclose(first[SHARPNESS], begun)
        end = peeling.SHARP if leaf == "features" else peeling.SPREAD[1]
        assert torch.allclose(last[SHARPNESS], torch.full_like(begun, end))
        if leaf == "inputs":
            assert torch.allclose(first["tv"], problem.constants["tv"]) and float(first["tv"]) == attack.tv
            assert float(last["tv"]) == pytest.approx(attack.tv_end)
    assert starts == {"features": [1.0, 2.0], "inputs": [peeling.SPREAD[0]] * 2}


@pytest.mark.parametrize("steps", [10, 25])
def test_schedules_of_a_recipe_end_where_steps_begin_to_compete(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watched(monkeypatch, "engine.matching", "optimise", optimise)
    recipe = Recipe(name="x", steps=steps, tv=0.5, tv_end=0.005, smooth_relu=True)
    run_recipe(recipe, [observe(make_learner("lenet(activation='relu')"), make_batch())], make_context(100))
    ((problem, _, told, *_),) = calls
    assert told == steps and set(problem.schedules) == {"tv", "sharpness"}
    tv = [problem.schedules["tv"](step) for step in range(steps)]
    assert tv[0] == 0.5 and tv == [0.5 * 0.01 ** min(1.0, step / (0.9 * steps)) for step in range(steps)]
    sharp = [problem.schedules["sharpness"](step) for step in range(steps)]
    assert sharp == [sharpness_at(step, steps) for step in range(steps)] and sharp[-1] > sharp[0]
    settled = [step for step in range(steps) if problem.tracks is None or problem.tracks(step)]
    assert settled == [step for step in range(steps) if step >= min(math.ceil(0.9 * steps), steps - 1)]
