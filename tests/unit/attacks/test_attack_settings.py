"""Settings of attacks: nonsense is refused by name, a stance is the one asked for, and unknowns of a defense are handed back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from gradveil.attacks import ATTACKS, launch, peeling
from gradveil.attacks.engine import matching
from gradveil.attacks.engine.matching import Recipe
from gradveil.attacks.generic.probe import _run, probe_of
from gradveil.errors import UsageError
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe, own_inputs, simulator

POOLED = 'convnet(width=4, norm="none")'


def built(spelling: str) -> Any:
    return ATTACKS.build(spelling)


@pytest.mark.parametrize(
    ("spelling", "setting", "wrong"),
    [
        *(("piste_like", name, value) for name in ("steps", "restarts", "latent", "width") for value in (0, -1, 1.5)),
        *(
            (attack, name, value)
            for attack in ("peeling", "feature_inversion")
            for name in ("tv", "tv_end")
            for value in (0, -1.0)
        ),
        *((attack, "tv", math.nan) for attack in ("peeling", "feature_inversion")),
    ],
)
def test_nonsense_is_refused_by_name(spelling: str, setting: str, wrong: Any) -> None:
    attack: Any = ATTACKS.build(spelling)
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(attack, **{setting: wrong})
    assert str(caught.value).startswith(f"{spelling}: {setting} "), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "cosin"}, "objective"),
        ({"start": "gray"}, "start"),
        ({"labels": "stolen"}, "labels"),
        ({"stance": "plane"}, "stance"),
        ({"tv_end": 0.1}, "tv_end is 0.1, but tv is 0.0"),
        ({"tv_end": 0.1, "tv": -1.0}, "tv_end is 0.1, but tv is -1.0"),
    ],
)
def test_a_recipe_refuses_what_means_nothing(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Recipe(name="x", **changes)
    assert str(caught.value).startswith(said)
    assert Recipe(name="x", tv=1.0, tv_end=0.1).tv_end == 0.1
    assert Recipe(name="x", objective="likelihood").objective == "likelihood"


@pytest.mark.parametrize("spelling", ["inverting_gradients", "idlg", "dlg", "peeling"])
def test_a_stance_is_told_with_what_was_found(spelling: str) -> None:
    model = POOLED if spelling == "peeling" else "lenet"
    learner = make_learner(model, shape=(2, 16, 16))
    seen = [observe(learner, make_batch(shape=(2, 16, 16)), "gaussian_noise(std=0.001)")]
    attack: Any = dataclasses.replace(built(spelling), steps=3, stance="informed")
    assert {each.stance for each in launch(attack, seen, make_context(100))} == {"informed"}


def test_unknowns_of_a_defense_are_fitted_and_handed_back() -> None:
    learner = make_learner()
    seen = [observe(learner, make_batch(seed=seed), "lrp") for seed in range(2)]
    names = set(seen[0].adversary.variables(seen[0], torch.Generator().manual_seed(0)))
    assert names
    attack = dataclasses.replace(built("inverting_gradients"), steps=4, stance="informed")
    found = launch(attack, seen, make_context(100))
    assert all(set(each.variables) == names for each in found)
    plain = dataclasses.replace(built("inverting_gradients"), steps=4)
    assert all(each.variables == {} for each in launch(plain, seen, make_context(100)))


@pytest.mark.parametrize("mode", ["looped", "batched"])
def test_only_where_candidates_run_one_by_one_are_examples_taken_so(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[object] = []
    inner: Any = vars(matching)["one_at_a_time"]

    def noting(learner: Any) -> Any:
        turned.append(learner)
        return inner(learner)

    monkeypatch.setattr(matching, "one_at_a_time", noting)
    seen = [observe(make_learner(), make_batch())]
    attack = dataclasses.replace(built("inverting_gradients"), steps=3)
    launch(attack, seen, make_context(100, execution=mode))
    assert len(turned) == (1 if mode == "looped" else 0)


def test_what_the_client_makes_of_own_inputs_is_kept_round_by_round() -> None:
    first = make_learner()
    second = first.replace(weights={name: 1.5 * value for name, value in first.weights.items()})
    calls: list[int] = []
    inner = simulator((first, second), "clipping(bound=0.1)")

    def noting(inputs: Any, targets: Any, draw: int) -> Any:
        calls.append(draw)
        return inner(inputs, targets, draw)

    inputs, targets = own_inputs(8)
    context = make_context(simulate=noting, own=(inputs, targets))
    found = _run((first, second), context)
    assert found is not None and calls == [-1 - place for place in range(len(calls))] and len(calls) >= 4
    for index in range(2):
        for place in range(len(calls)):
            sent = inner(inputs[place], targets[place], -1 - place)[index]
            raw = (first, second)[index].update(inputs[place], targets[place])
            assert all(torch.allclose(found.sent[index][name][place], value) for name, value in sent.items())
            assert all(torch.allclose(found.raw[index][name][place], value) for name, value in raw.items())
    crossed = found.crossed if hasattr(found, "crossed") else None
    if crossed is not None:
        one = first.update(inputs[1], targets[2])
        assert all(torch.allclose(value[2, 1], one[name]) for name, value in crossed.items())
    seen = observe(first, make_batch(), "clipping(bound=0.1)")
    calls.clear()
    assert probe_of(seen, context) is probe_of(seen, context) and len(calls) >= 4
    assert probe_of(seen, make_context()) is None


@pytest.mark.parametrize(("steps", "tracked"), [(1, [0]), (2, [1]), (5, [4]), (10, [9]), (20, [18, 19]), (30, [27, 28, 29])])
def test_only_the_last_steps_of_a_search_compete(steps: int, tracked: list[int]) -> None:
    settled = peeling._settled(steps)
    assert [step for step in range(steps) if settled(step)] == tracked
    seen = observe(make_learner(), make_batch())
    ruler = matching._tracker(seen.adversary, True, steps, make_context())
    assert ruler is not None and [step for step in range(steps) if ruler(step)] == tracked
    assert matching._tracker(seen.adversary, False, steps, make_context()) is None


@pytest.mark.parametrize("steps", [1, 5, 40, 300, 1201, 2400])
def test_rounds_of_peeling_spend_all_and_no_more(steps: int) -> None:
    plan = peeling._plan(steps)
    assert 1 <= len(plan) <= peeling.ROUNDS and len(set(plan)) == 1
    assert len(plan) == max(1, min(peeling.ROUNDS, steps // peeling.ROUND))
    assert steps - len(plan) < sum(map(sum, plan)) <= steps
    for features, images in plan:
        assert images >= 1 and features == int(peeling.FEATURE_SHARE * (features + images))


def test_a_search_that_broke_once_stays_broken() -> None:
    before = ["finished", "not finite", "finished"]
    assert peeling._worst(before, ["finished", "finished", "not finite"]) == ["finished", "not finite", "not finite"]
