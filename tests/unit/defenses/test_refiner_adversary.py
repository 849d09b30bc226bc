"""Refiner's attackers: de-blending, the mixture that vanishes at the truth, and that audits replay the raw data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed
from gradveil.audit.scene import build_subject, load_cell_data
from gradveil.client.update import run_client
from gradveil.data import public_images
from gradveil.defenses import build_defense
from gradveil.defenses.none import NoDefense
from gradveil.defenses.refiner.adversary import NOISE, DeblendingAdversary, MixtureAdversary, deblend, noise_of
from gradveil.defenses.refiner.defense import LAMBDA, Refiner
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, Reconstruction, ThreatModel, Update
from gradveil.study.cell import Cell
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.testing.defenses import Check
from gradveil.testing.defenses_adversary import ADVERSARY_CHECKS, ENOUGH, LOCAL_TRAINING, _share_won
from gradveil.testing.defenses_scene import Scene
from tests.unit.defenses.test_refiner import Roughness, make_learner, smooth_batch


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> Roughness:
    """Put a network that needs no training in the place of the trained one."""
    judge = Roughness().eval().requires_grad_(False)
    monkeypatch.setattr("gradveil.defenses.refiner.defense.evaluation_network", lambda name, like: judge.to(like))
    return judge


def error(left: Tensor, right: Tensor) -> float:
    return float((left - right).square().mean())


def observe(defense: Refiner, learner: Learner, batch: Batch) -> tuple[Observation, Tensor]:
    """Return what the attacker sees, and the data that was trained on."""
    result = run_client(learner, batch, defense, Seed(0))
    update = Update(dict(result.payload.streams["weights"]), len(batch))
    observation = Observation(
        learners=(learner,),
        updates=(update,),
        payloads=(result.payload,),
        input_shape=tuple(batch.inputs.shape[1:]),
        classes=4,
        examples=len(batch),
        threat=ThreatModel(),
        adversary=defense.adversary(),
    )
    return observation, result.trained_batch.inputs


def residual(observation: Observation, inputs: Tensor, targets: Tensor, variables: Named) -> float:
    adversary = observation.adversary
    simulated = adversary.replay(observation.learner, inputs, targets, variables)
    found = adversary.compare(adversary.evidence(observation, 0), simulated, variables).residuals()
    size = sum(float(v.square().sum()) for v in prefixed(adversary.evidence(observation, 0), OBSERVED).values())
    return math.sqrt(sum(float(v.square().sum()) for v in found.values()) / size)


def test_noise_is_measured_where_there_are_edges() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = (torch.arange(32) // 8 % 2).float().expand(1, 3, 32, 32)
    for std in (0.05, 0.2):
        noisy = steps + std * torch.randn(steps.shape, generator=generator)
        assert noise_of(noisy) == pytest.approx(std, rel=0.1)
    assert noise_of(torch.rand((2, 3, 1, 9), generator=generator)) == 0.0


@pytest.mark.parametrize("blend", [0.3, 0.5])
def test_deblending_comes_closer_than_the_robust_picture(blend: float) -> None:
    clean = public_images((3, 32, 32), 4, Seed(0))
    noise = torch.rand(clean.shape, generator=torch.Generator().manual_seed(1))
    robust = (1 - blend) * clean + blend * noise
    assert error(deblend(robust, blend), clean) < 0.5 * error(robust, clean)
    assert torch.equal(deblend(clean, 0.0), clean)
    table = torch.rand((5, 6), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(deblend((1 - blend) * table + blend / 2, blend), table, atol=1e-6)


def test_the_attacker_fits_the_settings() -> None:
    assert type(Refiner(blend=0.0, steps=0).adversary()) is OpenAdversary
    free, ball = Refiner(blend=0.3).adversary(), Refiner(epsilon=0.1, scope="layer").adversary()
    assert free == DeblendingAdversary(0.3, Refiner(blend=0.3))
    assert ball == MixtureAdversary(0.5, 0.1, "layer", False, defense=Refiner(epsilon=0.1, scope="layer"))
    scene = Scene.of(NoDefense())
    seen = scene.observe(NoDefense(), 1, scene.batch)
    assert free.arrives(seen).plain_search and not free.arrives(seen).raw_inputs
    assert ball.arrives(seen).raw_inputs and not ball.arrives(seen).plain_search
    assert build_defense("refiner(epsilon=0.1) + pruning").adversary().arrives(seen).raw_inputs


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"shares": "weights", "local_steps": 3, "minibatch": 2, "learning_rate": 0.1}],
    ids=["gradient", "local training"],
)
def test_the_mixture_vanishes_at_the_truth_and_not_elsewhere(scope: Any, settings: dict[str, Any]) -> None:
    learner, batch = make_learner(**settings).to(torch.float64), smooth_batch(3)
    batch = batch.replace(inputs=batch.inputs.double())
    defense = Refiner(epsilon=0.02, scope=scope, steps=4)
    observation, robust = observe(defense, learner, batch)
    truth = {NOISE: ((robust - 0.5 * batch.inputs) / 0.5)[None]}
    assert residual(observation, batch.inputs, batch.targets, truth) < 1e-9
    assert residual(observation, batch.inputs.flip(-1), batch.targets, truth) > 1e-4
    assert residual(observation, batch.inputs, batch.targets, {NOISE: 1 - truth[NOISE]}) > 1e-6


def test_every_client_of_an_aggregate_has_its_own_mixture() -> None:
    learner, defense = make_learner().to(torch.float64), Refiner(epsilon=0.02, steps=4)
    batches = [smooth_batch(2), smooth_batch(4)]
    batches = [
        Batch(batches[0].inputs.double(), batches[0].targets),
        Batch(batches[1].inputs[2:].double(), batches[1].targets[2:]),
    ]
    seen = [observe(defense, learner, batch) for batch in batches]
    mean = {n: (v + seen[1][0].update.weights[n]) / 2 for n, v in seen[0][0].update.weights.items()}
    together = learner.replace(settings=TrainingSettings(clients=2))
    observation = seen[0][0].replace(learners=(together,), updates=(Update(mean, 4),), examples=4)
    inputs, targets = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    truth = {NOISE: torch.stack([(robust - 0.5 * b.inputs) / 0.5 for (_, robust), b in zip(seen, batches, strict=True)])}
    drawn = observation.adversary.variables(observation, torch.Generator().manual_seed(0))
    assert drawn[NOISE].shape == truth[NOISE].shape == (2, 2, 3, 16, 16)
    assert residual(observation, inputs, targets, truth) < 1e-9


def test_finishing_takes_the_raw_estimate_or_the_deblended_one() -> None:
    learner, batch = make_learner(), smooth_batch(1)
    for epsilon, deblended in ((1e-6, False), (1e6, True)):
        observation, robust = observe(Refiner(epsilon=epsilon), learner, batch)
        guess = Reconstruction(batch.inputs, batch.targets, "truth", variables={NOISE: (2 * robust - batch.inputs)[None]})
        finished = observation.adversary.finish(guess, observation).inputs
        assert torch.allclose(finished, deblend(robust, 0.5) if deblended else batch.inputs, atol=1e-5)
    bare = Reconstruction(batch.inputs, batch.targets, "plain")
    assert torch.equal(observation.adversary.finish(bare, observation).inputs, batch.inputs)


def test_several_rounds_are_not_all_known() -> None:
    learner, batch = make_learner(), smooth_batch(1)
    for defense in (Refiner(), Refiner(epsilon=0.1)):
        observation, _ = observe(defense, learner, batch)
        twice = observation.replace(updates=observation.updates * 2, learners=observation.learners * 2)
        assert not observation.adversary.arrives(observation).incomplete and twice.adversary.arrives(twice).incomplete


def test_an_audit_tells_lambda_and_replays_the_raw_data() -> None:
    for spelling, raw in (("refiner(epsilon=0.0001, steps=2)", True), ("refiner(steps=2)", False)):
        cell = Cell(data="photos", model="lenet", records=2, defense=spelling)
        target = build_subject(cell, load_cell_data(cell), 1).targets[0]
        assert target.measured[LAMBDA] == 1.0 or raw
        assert torch.equal(target.replayed_inputs, target.batch.inputs if raw else target.trained_inputs)
        assert not torch.equal(target.batch.inputs, target.trained_inputs)


@pytest.mark.parametrize(
    ("scope", "settings"), [("global", TrainingSettings()), ("layer", LOCAL_TRAINING)], ids=["gradient", "local training"]
)
def test_the_mixture_prefers_the_truth(scope: Any, settings: TrainingSettings) -> None:
    defense = Refiner(epsilon=0.1, relative=True, scope=scope, steps=2)
    assert _share_won(defense, Scene.of(defense, settings=settings)) >= ENOUGH


@pytest.mark.parametrize("check", ADVERSARY_CHECKS[:4], ids=lambda check: check.__name__)
def test_the_mixture_keeps_the_attackers_contract(check: Check) -> None:
    defense = Refiner(epsilon=0.1, scope="layer", steps=2)
    check(defense, Scene.of(defense))


def test_a_model_of_the_wrong_kind_of_layers_is_still_attacked() -> None:
    model = build_model("mlp(hidden=5)", input_shape=(1, 6, 6), classes=4, seed=Seed(0))
    learner = Learner.of(model, loss_by_name("cross_entropy"))
    observation, _ = observe(Refiner(epsilon=0.05, steps=2), learner, smooth_batch(2, (1, 6, 6)))
    drawn = observation.adversary.variables(observation, torch.Generator().manual_seed(0))
    assert math.isfinite(residual(observation, smooth_batch(2, (1, 6, 6)).inputs, torch.tensor([0, 1]), drawn))
    assert observation.adversary.arrives(observation).exact() == frozenset()
