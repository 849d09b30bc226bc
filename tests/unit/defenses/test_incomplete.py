"""Every attacker who knows only part of what was done says so, in exactly the settings where that is the case."""

from __future__ import annotations

from typing import Any

import pytest

from gradveil.client.update import horizontal_fault
from gradveil.defenses import DEFENSES, build_defense
from gradveil.records import Observation, ThreatModel
from gradveil.study.local_training import TrainingSettings
from gradveil.testing.defenses_adversary import relative_residual
from gradveil.testing.defenses_scene import Scene
from tests.unit.audit.small import make_subject

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
    assert seen.adversary.arrives(seen).incomplete is incomplete


@pytest.mark.parametrize(
    "spelling", ["pruning(rate=0.5)", "top_k(keep=0.1)", "dgp", "soteria", "censor", "quantisation", "mq", "svdefense"]
)
def test_an_aggregate_hides_masks_grids_and_factors(spelling: str) -> None:
    alone, many = observe(spelling, {}), observe(spelling, {}, clients=3)
    assert not alone.adversary.arrives(alone).incomplete
    assert many.adversary.arrives(many).incomplete


@pytest.mark.parametrize("spelling", ["lrp", "precode(latent=8)", "data_noise"])
def test_what_is_drawn_anew_in_every_round_is_fitted_once(spelling: str) -> None:
    alone, more = observe(spelling, {}), observe(spelling, {}, rounds=2)
    assert not alone.adversary.arrives(alone).incomplete
    assert more.adversary.arrives(more).incomplete


HORIZONTAL = [name for name in DEFENSES.names() if not horizontal_fault(DEFENSES.build(name))]
UNKNOWN = {"lrp", "precode", "graddefense"}
"""The truth of their unknowns, a rate, a code or which slices are noisy, is not in the observation; they are tested above."""


SPARED = {"shadow": "shadow(latent_steps=1, fit_steps=1)"}
"""With fewer steps where all of them take minutes; how well a generator is fitted is not looked at here."""


@pytest.mark.parametrize("changes", [{"local_steps": 3, "batch_size": 2}, {"rounds": 2}, {"clients": 2}], ids=str)
@pytest.mark.parametrize("name", sorted(set(HORIZONTAL) - UNKNOWN))
def test_who_does_not_explain_the_truth_says_so(name: str, changes: dict[str, Any]) -> None:
    """At the truth nothing is left over, or the attacker names the noise, or admits that it knows only part."""
    target = make_subject(defense=SPARED.get(name, name), **changes).targets[0]
    seen, adversary = target.observation, target.observation.adversary
    left = max(
        float(relative_residual(adversary, learner, adversary.evidence(seen, i), target.trained_inputs, target.batch.targets, {}))
        for i, learner in enumerate(seen.learners)
    )
    assert left < 1e-8 or adversary.arrives(seen).noise_std or adversary.arrives(seen).incomplete
