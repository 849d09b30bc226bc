"""PRECODE: the bottleneck, its divergence and noise, which models it fits, and that one example gives the noise away."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from gradveil.attacks import referee
from gradveil.attacks.engine.labels import recover_labels
from gradveil.attacks.engine.loop import optimise
from gradveil.attacks.feature_inversion import feature_layer
from gradveil.attacks.linear_layer import features_at, layer_inputs
from gradveil.client.update import run_client
from gradveil.defenses import adapt, build_defense
from gradveil.defenses.none import NoDefense
from gradveil.defenses.precode import EPSILON, FITTED, KNOWN, PRECODE, READ, log_softplus
from gradveil.errors import UsageError
from gradveil.learning.learner import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.models.lenet import lenet
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, Reconstruction, ThreatModel
from gradveil.study.local_training import TrainingSettings
from gradveil.testing.defenses_adversary import relative_residual
from gradveil.testing.defenses_scene import Scene, TinyNet, distance, draw_batch

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_transforms.json").read_text())
DEFENSE = PRECODE(latent=8)


def observe(examples: int, settings: TrainingSettings | None = None) -> tuple[Observation, Batch, Tensor]:
    """Return what a client with a ReLU-free LeNet sends, its batch, and the noise it drew."""
    settings = settings or TrainingSettings()
    with torch.random.fork_rng(devices=[]):  # else the network, and what a few steps of fitting reach, is another every time
        torch.manual_seed(3)
        adapted = adapt(DEFENSE, lenet((1, 8, 8), 3))
    assert adapted.adapt_loss is not None
    noise = {name: torch.zeros((settings.steps(examples), examples, *shape)) for name, shape in adapted.noise_shapes.items()}
    learner = Learner.of(adapted.model, adapted.adapt_loss(cross_entropy), settings).replace(noise=noise)
    generator = torch.Generator().manual_seed(5)
    batch = Batch(torch.rand((examples, 1, 8, 8), generator=generator), torch.arange(examples) % 3)
    result = run_client(learner, batch, DEFENSE, Seed(4))
    update = DEFENSE.decode(result.payload, Scene(learner, batch).spec)
    observation = Observation(
        (learner,), (update,), (result.payload,), (1, 8, 8), 3, examples, ThreatModel(), DEFENSE.adversary()
    )
    drawn = torch.randn(noise[EPSILON].shape, generator=Scene(learner, batch).view(4).generator("model noise"))
    return observation, batch, drawn


@pytest.mark.parametrize("row", GOLDEN["divergence_in_bits"]["value"], ids=str)
def test_the_divergence_is_in_bits(row: dict[str, float]) -> None:
    model = PRECODE(latent=1).adapt_model(nn.Linear(2, 3)).model
    encoder = model.get_submodule("model.encoder")
    assert isinstance(encoder, nn.Linear)
    with torch.no_grad():
        encoder.weight.zero_()
        encoder.bias.copy_(torch.tensor([row["mean"], math.log(math.expm1(row["std"]))]))
    logits, divergence = model(torch.ones(4, 2), torch.zeros(4, 1))
    assert logits.shape == (4, 3)
    assert divergence.tolist() == pytest.approx([row["bits"]] * 4, abs=GOLDEN["divergence_in_bits"]["tolerance"])


def test_the_loss_is_the_tasks_plus_the_weighted_divergence() -> None:
    adapted = PRECODE(latent=4, divergence=0.25).adapt_model(nn.Linear(2, 3))
    assert adapted.adapt_loss is not None
    outputs, targets = (torch.randn(5, 3), torch.arange(5.0)), torch.zeros(5, dtype=torch.int64)
    expected = cross_entropy(outputs[0], targets) + 0.25 * 2
    assert float(adapted.adapt_loss(cross_entropy)(outputs, targets)) == pytest.approx(float(expected), rel=1e-6)


def test_the_logarithm_survives_vanishing_deviations() -> None:
    raw = torch.tensor([-1e4, -200.0, -15.0, 0.0, 30.0], requires_grad=True)
    found = log_softplus(raw)
    assert found.tolist() == pytest.approx([-1e4, -200.0, -15.0, math.log(math.log(2)), math.log(30)], rel=1e-6)
    (slope,) = torch.autograd.grad(found.sum(), raw)
    assert bool(torch.isfinite(slope).all()) and float(slope[0]) == 1.0


def test_noise_moves_the_output_in_both_modes_and_none_is_the_mean() -> None:
    model = DEFENSE.adapt_model(TinyNet()).model
    inputs, noise = draw_batch(1).inputs, torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    for mode in (model.train(), model.eval()):
        assert not torch.allclose(mode(inputs, noise)[0], mode(inputs)[0])
        assert torch.equal(mode(inputs, torch.zeros(3, 8))[0], mode(inputs)[0])
    bottleneck = model.get_submodule("model.head")
    assert bottleneck._epsilon is None and bottleneck._divergence is None


def test_noise_goes_where_it_belongs_under_vmap() -> None:
    model = DEFENSE.adapt_model(TinyNet()).model
    inputs = torch.stack([draw_batch(seed).inputs for seed in range(3)])
    noise = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(2))
    together = vmap(lambda x, e: model(x, e)[0])(inputs, noise)
    assert torch.allclose(together, torch.stack([model(x, e)[0] for x, e in zip(inputs, noise, strict=True)]), atol=1e-6)


def test_the_model_is_copied_and_new_weights_are_the_same_every_time() -> None:
    model, before = TinyNet(), torch.get_rng_state()
    first, second, other = (each.adapt_model(model).model for each in (DEFENSE, DEFENSE, PRECODE(latent=8, seed=1)))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model.head, nn.Linear)
    assert distance(first.state_dict(), second.state_dict()) == 0
    assert distance(first.state_dict(), other.state_dict()) > 0.01
    names = [name for name, _ in first.named_parameters()]
    assert names[-3:] == ["model.head.decoder.bias", "model.head.classifier.weight", "model.head.classifier.bias"]
    bound = 1 / math.sqrt(64)
    encoder = dict(first.named_parameters())["model.head.encoder.weight"]
    assert encoder.shape == (16, 64) and bound * 0.9 < float(encoder.detach().abs().max()) <= bound


class Sequence(nn.Module):
    """A classifier over positions, which one feature vector per example cannot serve."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(inputs)
        return outputs.mean(1)


class Idle(nn.Module):
    """A model that never calls its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: DEFENSE.adapt_model(nn.Conv2d(1, 1, 3)), "no linear layer"),
        (lambda: DEFENSE.adapt_model(Sequence()).model(torch.ones(2, 3, 4)), "one feature vector"),
        (lambda: DEFENSE.adapt_model(Idle()).model(torch.ones(2, 4)), "never calls"),
        (lambda: build_defense("precode + precode").adapt_model(TinyNet()), "already"),
        (lambda: PRECODE(latent=0), "at least 1"),
        (lambda: PRECODE(divergence=-1), "at least 0"),
    ],
)
def test_what_cannot_work_is_refused(attempt: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        attempt()


def test_one_example_gives_noise_and_features_away() -> None:
    observation, batch, drawn = observe(1)
    variables = observation.adversary.variables(observation, torch.Generator().manual_seed(0))
    assert float(variables[KNOWN]) == 1
    assert torch.allclose(variables[READ][0], drawn, atol=0.05)
    evidence = observation.adversary.evidence(observation, 0)
    left = relative_residual(observation.adversary, observation.learner, evidence, batch.inputs, batch.targets, variables)
    assert float(left) < 1e-5
    layer = feature_layer(observation)
    assert layer == "model.linear.encoder.weight"
    features, found = features_at(observation.learner, layer, batch.inputs), layer_inputs(observation.update.weights, layer, 1)
    assert found is not None and torch.allclose(found, features, atol=1e-4)
    assert recover_labels(observation).tolist() == batch.targets.tolist()


@pytest.mark.parametrize(("examples", "settings"), [(2, None), (1, TrainingSettings(shares="weights", local_steps=2))])
def test_what_cannot_be_read_is_fitted(examples: int, settings: TrainingSettings | None) -> None:
    observation, batch, drawn = observe(examples, settings)
    adversary = observation.adversary
    variables = adversary.variables(observation, torch.Generator().manual_seed(0))
    assert float(variables[KNOWN]) == 0
    assert variables[FITTED].shape == (1, *drawn.shape)
    evidence = adversary.evidence(observation, 0)

    def score(noise: Tensor) -> float:
        own = {**variables, FITTED: noise[None]}
        return float(relative_residual(adversary, observation.learner, evidence, batch.inputs, batch.targets, own))

    assert score(drawn) < 1e-9 < 1e-4 < score(variables[FITTED][0])
    assert float(adversary.penalty(variables)) == pytest.approx(1e-4 / 2, rel=0.5)
    assert len(recover_labels(observation)) == examples


def test_noise_on_the_update_is_not_mistaken_for_a_reading() -> None:
    observation, _, _ = observe(1)
    noisy = {name: value + 0.01 * torch.randn_like(value) for name, value in observation.update.weights.items()}
    blurred = observation.replace(updates=(observation.update.replace(weights=noisy),))
    assert float(blurred.adversary.variables(blurred, torch.Generator())[KNOWN]) == 0


def test_clients_of_an_aggregate_have_noise_of_their_own() -> None:
    observation, batch, _ = observe(2)
    pair = observation.learner.replace(settings=TrainingSettings(clients=2))
    crowd = observation.replace(learners=(pair,), examples=4)
    variables = crowd.adversary.variables(crowd, torch.Generator().manual_seed(0))
    assert variables[FITTED].shape == (2, 1, 2, 8)
    inputs, targets = batch.inputs.repeat(2, 1, 1, 1), batch.targets.repeat(2)
    found = crowd.adversary.replay(pair, inputs, targets, variables)
    alone = [
        observation.learner.replace(noise={EPSILON: variables[FITTED][client]}).update(batch.inputs, batch.targets)
        for client in range(2)
    ]
    assert distance(found, {name: (value + alone[1][name]) / 2 for name, value in alone[0].items()}) < 1e-5


def test_the_undefended_client_of_the_same_model_draws_the_same_noise() -> None:
    scene = Scene.of(DEFENSE)
    assert distance(scene.send(DEFENSE, seed=3).weights, scene.send(NoDefense(), seed=3).weights) == 0
    assert distance(scene.send(DEFENSE, seed=3).weights, scene.send(DEFENSE, seed=4).weights) > 0.01


def test_noise_that_was_read_is_not_fitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[int] = []

    def counted(problem: Any, optimiser: Any, steps: int, *rest: Any) -> Any:
        spent.append(steps)
        return optimise(problem, optimiser, steps, *rest)

    monkeypatch.setattr(referee, "optimise", counted)
    for examples, expected in ((1, [1]), (2, [1, referee.REFIT_STEPS])):
        spent.clear()
        observation, batch, _ = observe(examples)
        others = [Reconstruction(batch.inputs + shift, batch.targets, recipe="given") for shift in (0.0, 0.5)]
        close, far = referee.Referee().scores(observation, others)
        assert spent == expected and close < far
