"""Clipping the update as a whole, layer by layer, and example by example."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from gradveil.adversary import OpenAdversary
from gradveil.defenses import Defense
from gradveil.defenses.clipping import Clipping, Scope, clip
from gradveil.defenses.example_clipping import ExampleClipping
from gradveil.errors import UsageError
from gradveil.learning import Learner
from gradveil.records import Batch, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, norm
from gradveil.testing.defenses_scene import Scene, distance

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses.json").read_text())
FLOATS = st.floats(-1e6, 1e6, width=32)


def tensors(values: dict[str, Any]) -> Named:
    return {name: torch.tensor(value) for name, value in values.items()}


def protect(defense: Defense, weights: Named) -> Named:
    return defense.protect_update(Update(weights, examples=1), Scene.of(defense).view(), {})[0].weights


@pytest.mark.parametrize(("scope", "golden"), [("global", "clip_global"), ("layer", "clip_layer")])
def test_hand_computed_clips(scope: Scope, golden: str) -> None:
    case, tolerance = GOLDEN[golden]["value"], GOLDEN[golden]["tolerance"]
    sent = protect(Clipping(bound=case["bound"], scope=scope), tensors(case["update"]))
    for name, expected in case["sent"].items():
        assert sent[name].tolist() == pytest.approx(expected, abs=tolerance)


def test_a_scalar_is_clipped_too() -> None:
    case = GOLDEN["clip_scalar"]["value"]
    sent = protect(Clipping(bound=case["bound"]), tensors({"w": case["update"]}))
    assert float(sent["w"]) == pytest.approx(case["sent"])
    assert sent["w"].shape == ()


def test_examples_are_clipped_one_by_one_and_then_averaged() -> None:
    case = GOLDEN["clip_examples"]["value"]
    gradients = {"w": torch.tensor(case["gradients"])}
    defense = ExampleClipping(bound=case["bound"])
    clipped, _ = defense.protect_gradient(gradients, Scene.of(defense).view(), {})
    assert clipped["w"].mean(0).tolist() == pytest.approx(case["mean"], abs=1e-7)


@given(st.lists(FLOATS, min_size=1, max_size=8), FLOATS, st.floats(1e-6, 1e6))
def test_no_update_exceeds_the_bound_and_none_within_it_changes(entries: list[float], scalar: float, bound: float) -> None:
    weights = {"a.weight": torch.tensor(entries), "a.bias": torch.tensor(scalar), "b.weight": torch.tensor(entries[:2])}
    wide = {name: value.double() for name, value in weights.items()}
    for scope in ("global", "layer"):
        sent = clip(weights, bound, scope)
        groups = [list(weights)] if scope == "global" else [["a.weight", "a.bias"], ["b.weight"]]
        for group in groups:
            before = float(norm({name: wide[name] for name in group}))
            after = float(norm({name: sent[name].double() for name in group}))
            assert after <= bound * (1 + 1e-5)
            assert after == pytest.approx(min(before, bound), rel=1e-5, abs=1e-12)
            if before <= bound:
                assert all(torch.equal(sent[name], weights[name]) for name in group)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_that_leave_single_precision_do_no_harm(scale: float) -> None:
    weights = {"w": torch.tensor([3.0, 4.0]) * scale}
    assert clip(weights, scale, "global")["w"].tolist() == pytest.approx([0.6 * scale, 0.8 * scale])


def test_the_clip_of_zero_has_a_finite_derivative() -> None:
    def length(x: Tensor) -> Tensor:
        clipped = clip({"a.w": x, "b.w": x[:1]}, 1.0, "layer")
        return torch.stack([value.sum() for value in clipped.values()]).sum()

    assert grad(length)(torch.zeros(3)).tolist() == [2.0, 1.0, 1.0]
    assert vmap(grad(length))(torch.zeros(2, 3)).shape == (2, 3)


def two_clients(defense: Defense, settings: TrainingSettings) -> tuple[Named, Scene, Batch]:
    """Return the mean of what two clients send, and the scene of an attacker who sees only that."""
    scene = Scene.of(defense, settings=settings)
    first = scene.batch
    second = Batch(first.inputs.flip(0) ** 2, first.targets.flip(0))
    sent = [scene.send(defense, seed, batch) for seed, batch in enumerate((first, second))]
    mean = {name: (value + sent[1].weights[name]) / 2 for name, value in sent[0].weights.items()}
    both = Batch(torch.cat([first.inputs, second.inputs]), torch.cat([first.targets, second.targets]))
    return mean, scene, both


@pytest.mark.parametrize("settings", [TrainingSettings(), TrainingSettings(shares="weights", local_steps=3, momentum=0.9)])
@pytest.mark.parametrize("defense", [Clipping(bound=0.3), Clipping(bound=0.1, scope="layer"), ExampleClipping(bound=0.5)])
def test_the_attacker_replays_the_clip_of_every_client_of_an_aggregate(defense: Defense, settings: TrainingSettings) -> None:
    mean, scene, both = two_clients(defense, settings)
    learner = scene.learner.replace(settings=settings.replace(clients=2))
    replayed = defense.adversary().replay(learner, both.inputs, both.targets, {})
    assert distance(replayed, mean) < 1e-5
    raw = OpenAdversary().replay(learner, both.inputs, both.targets, {})
    assert distance(raw, mean) > 0.1


def test_clipping_one_example_only_changes_the_length() -> None:
    defense = ExampleClipping(bound=0.5)
    scene = Scene.of(defense)
    one = Batch(scene.batch.inputs[:1], scene.batch.targets[:1])
    raw = Learner.gradient(scene.learner, scene.learner.weights, one.inputs, one.targets)
    sent = scene.send(defense, batch=one).weights
    factor = 0.5 / float(norm(raw))
    assert distance(sent, {name: value * factor for name, value in raw.items()}) < 1e-5


@pytest.mark.parametrize("bound", [0, -1.0, math.nan, math.inf, "x"])
def test_bounds_that_mean_nothing_are_refused(bound: Any) -> None:
    for kind in (Clipping, ExampleClipping):
        with pytest.raises(UsageError, match=r"bound is .*; it must be a number above 0"):
            kind(bound=bound)


def test_scopes_are_checked_and_the_example_scope_points_to_its_defense() -> None:
    with pytest.raises(UsageError, match="'example_clipping'"):
        Clipping(scope="example")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean 'layer'"):
        ExampleClipping(scope="layers")  # type: ignore[arg-type]
