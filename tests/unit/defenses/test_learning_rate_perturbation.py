"""LRP: what is drawn, what it does to a gradient and to local training, and that the rate can be fitted."""

from __future__ import annotations

import pytest
import torch

from gradveil.defenses import build_defense
from gradveil.defenses.learning_rate_perturbation import LOG_FACTOR, LearningRatePerturbation
from gradveil.defenses.none import NoDefense
from gradveil.errors import UsageError
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, scale
from gradveil.testing.defenses_adversary import relative_residual
from gradveil.testing.defenses_scene import Scene, distance, draw_batch

SGD = TrainingSettings(shares="weights", local_steps=3, learning_rate=0.05)
SETTINGS = [TrainingSettings(), SGD, SGD.replace(momentum=0.9), SGD.replace(optimizer="adam", learning_rate=0.01)]


def factor_of(defense: LearningRatePerturbation, scene: Scene, seed: int) -> float:
    return defense.factor(scene.view(seed))


def test_factors_are_uniform_in_the_range() -> None:
    defense = LearningRatePerturbation(spread=0.5)
    scene = Scene.of(defense)
    drawn = torch.tensor([factor_of(defense, scene, seed) for seed in range(400)])
    assert bool(((drawn >= 0.5) & (drawn <= 1.5)).all())
    assert float(drawn.mean()) == pytest.approx(1, abs=0.05)
    assert float(drawn.std()) == pytest.approx(0.5 / 3**0.5, abs=0.03)


def test_a_gradient_is_rescaled_and_one_step_moves_at_the_drawn_rate() -> None:
    defense = LearningRatePerturbation(spread=0.9)
    for settings in (TrainingSettings(), SGD.replace(local_steps=1)):
        scene = Scene.of(defense, settings=settings)
        raw, sent = scene.send(NoDefense(), seed=4).weights, scene.send(defense, seed=4).weights
        assert distance(sent, scale(raw, factor_of(defense, scene, 4))) < 1e-5
        assert distance(sent, raw) > 0.01


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.shares}-{s.optimizer}-{s.momentum}")
def test_the_attacker_replays_the_truth_at_the_true_rate(settings: TrainingSettings) -> None:
    defense = LearningRatePerturbation(spread=0.9)
    scene, truth = Scene.of(defense, settings=settings), draw_batch(2)
    observation = scene.observe(defense, 2, truth)
    evidence = observation.adversary.evidence(observation, 0)

    def score(factor: float) -> float:
        variables: Named = {LOG_FACTOR: torch.tensor([factor]).log()}
        return float(relative_residual(observation.adversary, scene.learner, evidence, truth.inputs, truth.targets, variables))

    assert score(factor_of(defense, scene, 2)) < 1e-8
    assert score(1.0) > 1e-4


def test_clients_of_an_aggregate_have_rates_of_their_own() -> None:
    defense = LearningRatePerturbation(spread=0.9)
    scene, batch = Scene.of(defense), draw_batch(1)
    pair = scene.learner.replace(settings=scene.learner.settings.replace(clients=2))
    inputs, targets = torch.cat([batch.inputs, draw_batch(2).inputs]), torch.cat([batch.targets, draw_batch(2).targets])
    factors = torch.tensor([0.5, 1.5])
    found = defense.adversary().replay(pair, inputs, targets, {LOG_FACTOR: factors.log()})
    one, two = scene.learner.update(inputs[:3], targets[:3]), scene.learner.update(inputs[3:], targets[3:])
    assert distance(found, {name: (0.5 * value + 1.5 * two[name]) / 2 for name, value in one.items()}) < 1e-5


def test_two_in_a_chain_multiply() -> None:
    double = build_defense("lrp(spread=0.5) + lrp(spread=0.2)")
    scene = Scene.of(double, settings=SGD.replace(local_steps=1))
    raw, sent = scene.send(NoDefense(), seed=3).weights, scene.send(double, seed=3).weights
    ratios = torch.cat([(sent[name] / raw[name]).reshape(-1) for name in ("conv.weight", "head.weight")])
    product = 1.0
    for part, stage in zip((LearningRatePerturbation(spread=0.5), LearningRatePerturbation(spread=0.2)), ((), (1,)), strict=True):
        product *= part.factor(scene.view(3).replace(stage=stage))
    assert float(ratios.median()) == pytest.approx(product, rel=1e-3)


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="below 1"):
        LearningRatePerturbation(spread=1.0)
