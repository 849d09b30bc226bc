"""DP-SGD: one noise per step, of the size the accountant counts on, and what its attacker knows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gradveil.adversary import OpenAdversary
from gradveil.client.update import run_client
from gradveil.defenses import build_defense, chain
from gradveil.defenses.dp_sgd import DPSGD, accumulated_noise, step_sizes
from gradveil.defenses.example_clipping import ExampleClipping
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.records import ThreatModel
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, norm
from gradveil.testing.defenses_scene import Scene, distance, draw_batch


def rows(examples: int, entries: int = 20_000) -> Named:
    generator = torch.Generator().manual_seed(0)
    return {"a.weight": torch.randn(examples, entries, generator=generator), "b.weight": torch.zeros(examples, entries)}


@pytest.mark.parametrize(("examples", "expected", "divisor"), [(1, 0, 1), (8, 0, 8), (8, 32, 32)])
@pytest.mark.parametrize(("scope", "layers"), [("global", 1), ("layer", 2)])
def test_the_noise_on_the_sum_is_sigma_times_the_bound_however_many_examples(
    examples: int, expected: int, divisor: int, scope: Any, layers: int
) -> None:
    defense = DPSGD(noise_multiplier=2.0, bound=0.5, scope=scope, expected_batch=expected)
    sent, _ = defense.protect_gradient(rows(examples), Scene.of(defense).view(), {})
    assert sent["b.weight"].shape == (1, 20_000)
    assert float(sent["b.weight"].std()) * divisor == pytest.approx(2.0 * 0.5 * math.sqrt(layers), rel=0.02)


def test_no_example_moves_the_sum_by_more_than_the_bound() -> None:
    defense = DPSGD(noise_multiplier=1.0, bound=0.5)
    view, gradients = Scene.of(defense).view(), rows(6)
    without = {name: torch.cat([value[:2], torch.zeros_like(value[:1]), value[3:]]) for name, value in gradients.items()}
    left, right = (defense.protect_gradient(each, view, {})[0] for each in (gradients, without))
    moved = norm({name: 6 * (value - right[name]) for name, value in left.items()})
    assert float(moved) == pytest.approx(0.5, rel=1e-3)


def test_without_noise_it_is_example_clipping() -> None:
    clipped, plain = ExampleClipping(bound=0.2), DPSGD(bound=0.2, noise_multiplier=0.0)
    scene = Scene.of(plain)
    assert distance(scene.send(plain).weights, scene.send(clipped).weights) < 1e-6
    assert plain.adversary().arrives(scene.observe(plain, 1, scene.batch)).noise_std is None
    assert DPSGD(bound=None, noise_multiplier=0.0).adversary() == OpenAdversary()


def test_every_step_draws_its_own_noise() -> None:
    defense = DPSGD()
    view, gradients = Scene.of(defense).view(), rows(2)
    first, again, second = (
        defense.protect_gradient(gradients, view.replace(step=step), {})[0]["b.weight"].flatten() for step in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.05


def test_the_expected_batch_is_replayed() -> None:
    defense = DPSGD(noise_multiplier=1e-6, bound=0.3, expected_batch=12)
    scene = Scene.of(defense)
    seen = scene.observe(defense, 1, scene.batch)
    replayed = seen.adversary.replay(scene.learner, scene.batch.inputs, scene.batch.targets, {})
    assert distance(replayed, seen.update.weights) < 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        TrainingSettings(shares="weights", learning_rate=0.05),
        TrainingSettings(shares="weights", learning_rate=0.05, local_steps=6),
        TrainingSettings(shares="weights", learning_rate=0.05, local_steps=6, momentum=0.9),
        TrainingSettings(shares="weights", learning_rate=0.05, epochs=2, minibatch=2),
    ],
    ids=["one step", "steps", "momentum", "minibatches"],
)
def test_noise_of_local_steps_adds_up_as_told(settings: TrainingSettings) -> None:
    defense = DPSGD(noise_multiplier=1.0, bound=0.05)
    scene = Scene.of(defense, settings=settings)
    seen = scene.observe(defense, 1, scene.batch)
    told = seen.adversary.arrives(seen).noise_std
    quiet = run_client(scene.learner, scene.batch, DPSGD(noise_multiplier=0, bound=0.05), Seed(0)).payload.streams["weights"]
    gaps = [run_client(scene.learner, scene.batch, defense, Seed(seed)).payload.streams["weights"] for seed in range(12)]
    squares = [float((gap[n] - quiet[n]).square().sum()) for gap in gaps for n in quiet]
    entries = sum(value.numel() for value in quiet.values()) * len(gaps)
    assert told == pytest.approx(math.sqrt(math.fsum(squares) / entries), rel=0.05)


def test_step_sizes_follow_the_minibatches_and_adam_is_not_told() -> None:
    settings = TrainingSettings(shares="weights", epochs=2, minibatch=2)
    scene = Scene.of(DPSGD(), settings=settings)
    seen = scene.observe(DPSGD(), 1, scene.batch)
    assert step_sizes(seen) == [2, 1, 2, 1]
    adam = scene.learner.replace(settings=settings.replace(optimizer="adam"))
    assert accumulated_noise(seen.replace(learners=(adam,)), lambda size: 1.0) is None


def test_an_aggregate_of_clients_is_less_noisy() -> None:
    scene = Scene.of(DPSGD())
    seen = scene.observe(DPSGD(), 1, draw_batch(3))
    alone = seen.adversary.arrives(seen).noise_std
    aggregate = seen.replace(threat=ThreatModel(clients=4), examples=4 * seen.examples)
    many = aggregate.adversary.arrives(aggregate).noise_std
    assert alone is not None and many == pytest.approx(alone / 2)


def test_what_follows_it_in_a_chain_sees_the_noisy_mean() -> None:
    defense = chain(DPSGD(), build_defense("clipping(bound=0.1)"))
    sent = Scene.of(defense).send(defense)
    assert float(norm(sent.weights)) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bound": 0.0}, "bound is 0.0"),
        ({"noise_multiplier": -1}, "noise_multiplier is -1"),
        ({"scope": "layers"}, "did you mean 'layer'"),
        ({"bound": None}, "without a bound it is off"),
        ({"bound": None, "noise_multiplier": 0, "expected_batch": 4}, "without a bound it is off"),
        ({"expected_batch": -1}, "expected_batch is -1"),
        ({"expected_batch": 1.5}, "whole number"),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DPSGD(**wrong)
