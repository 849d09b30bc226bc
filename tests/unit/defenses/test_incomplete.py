"""Every attacker who knows only part of what was done says so, in exactly the settings where that is the case."""

from __future__ import annotations

from typing import Any

import pytest

from gradveil.defenses import build_defense
from gradveil.learning.settings import TrainingSettings
from gradveil.records import Observation, ThreatModel
from gradveil.testing.defenses_scene import Scene

ONE_STEP = {"shares": "weights", "local_steps": 1, "learning_rate": 0.05}
STEPS = {**ONE_STEP, "local_steps": 3}
ADAM = {**ONE_STEP, "optimizer": "adam"}


def observe(spelling: str, settings: dict[str, Any], clients: int = 1, rounds: int = 1) -> Observation:
    defense = build_defense(spelling)
    scene = Scene.of(defense, settings=TrainingSettings(**settings))
    seen = scene.observe(defense, 1, scene.batch)
    return seen.replace(
        learners=seen.learners * rounds,
        updates=tuple(seen.update.replace(round=index) for index in range(rounds)),
        payloads=seen.payloads * rounds if clients == 1 else (),
        threat=ThreatModel(clients=clients, rounds=rounds),
    )


@pytest.mark.parametrize(
    ("spelling", "settings", "incomplete"),
    [
        ("dp_sgd", {}, False),
        ("dp_sgd", ONE_STEP, False),
        ("dp_sgd", STEPS, True),
        ("dp_sgd", ADAM, True),
        ("dp_sgd(noise_multiplier=0.0)", STEPS, False),
        ("dp_sgd + clipping", STEPS, True),
        ("gaussian_noise(std=0.1)", STEPS, False),
        ("mq", {}, False),
        ("mq(observer='outside')", {}, True),
    ],
)
def test_local_training(spelling: str, settings: dict[str, Any], incomplete: bool) -> None:
    seen = observe(spelling, settings)
    assert seen.adversary.incomplete_for(seen) is incomplete


@pytest.mark.parametrize(
    "spelling", ["pruning(rate=0.5)", "top_k(keep=0.1)", "dgp", "soteria", "censor", "quantisation", "mq", "svdefense"]
)
def test_an_aggregate_hides_masks_grids_and_factors(spelling: str) -> None:
    alone, many = observe(spelling, {}), observe(spelling, {}, clients=3)
    assert not alone.adversary.incomplete_for(alone)
    assert many.adversary.incomplete_for(many)


@pytest.mark.parametrize("spelling", ["lrp", "precode(latent=8)"])
def test_what_is_drawn_anew_in_every_round_is_fitted_once(spelling: str) -> None:
    alone, more = observe(spelling, {}), observe(spelling, {}, rounds=2)
    assert not alone.adversary.incomplete_for(alone)
    assert more.adversary.incomplete_for(more)
