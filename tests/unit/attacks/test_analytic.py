"""The two attacks that read instead of search: the linear layer, and the features before the last layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import launch
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.linear_layer import LinearLayer, features_at, layer_inputs
from gradveil.errors import UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.metrics import peak_signal_to_noise
from gradveil.records import Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import scale
from tests.unit.attacks.scenes import CLASSES, make_batch, make_context, make_learner, observe

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "attacks.json").read_text())


@pytest.mark.parametrize(
    "model", ["mlp", "mlp(hidden=8, activation='sigmoid')", "mlp(hidden=16, normalize='half')", "mlp(hidden=())"]
)
def test_the_input_of_a_perceptron_is_read_exactly(model: str) -> None:
    learner, batches = make_learner(model, dtype=torch.float32), [make_batch(seed=s, dtype=torch.float32) for s in range(3)]
    found = launch(LinearLayer(), [observe(learner, batch) for batch in batches], make_context())
    psnr = [float(peak_signal_to_noise(c.inputs, batches[c.target].inputs)) for c in found]
    assert min(psnr) >= GOLDEN["linear_layer_psnr"]["value"]
    assert [int(c.targets) for c in found] == [int(batch.targets) for batch in batches]


def test_a_common_factor_changes_nothing() -> None:
    seen = observe(make_learner("mlp(hidden=8)"), make_batch())
    clipped = seen.replace(updates=(Update(scale(seen.update.weights, 1e-3), examples=1),))
    plain, scaled = (launch(LinearLayer(), [each], make_context())[0].inputs for each in (seen, clipped))
    assert torch.allclose(plain, scaled, atol=1e-9)


def test_least_squares_averages_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, delta = torch.rand(40, generator=generator), torch.randn(64, generator=generator)
    weight = torch.outer(delta, truth) + 0.05 * torch.randn((64, 40), generator=generator)
    found = layer_inputs({"a.weight": weight, "a.bias": delta}, "a.weight", 1)
    assert found is not None
    loudest = int(delta.abs().argmax())
    single = weight[loudest] / delta[loudest]
    assert (found[0] - truth).norm() < 0.6 * (single - truth).norm()


def test_rows_moved_by_one_example_each_give_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    truth = torch.rand((3, 20), generator=generator)
    delta = torch.zeros(12, 3)
    for row in range(9):
        delta[row, row % 3] = 1.0 + row
    delta[9] = torch.tensor([1.0, -0.9, 0.5])  # a row that mixes all three lies outside the box
    found = layer_inputs({"a.weight": delta @ truth, "a.bias": delta.sum(1)}, "a.weight", 3)
    assert found is not None
    nearest = (truth[:, None] - found[None]).abs().amax(2).min(1).values
    assert bool((nearest < 1e-5).all())


def test_a_silent_first_layer_gives_grey() -> None:
    seen = observe(make_learner("mlp(hidden=8)"), make_batch())
    silent = seen.replace(updates=(Update({n: torch.zeros_like(v) for n, v in seen.update.weights.items()}, examples=1),))
    (candidate,) = launch(LinearLayer(), [silent], make_context())
    assert torch.equal(candidate.inputs, torch.full_like(candidate.inputs, 0.5))
    assert layer_inputs({"a.weight": torch.ones(2, 2)}, "a.weight", 1) is None


class Squares(nn.Module):
    """Starts with a linear layer that does not see the input itself."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(128, CLASSES, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.first(inputs.flatten(1).square())
        return outputs


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("lenet", "does not start with a linear layer"),
        (Squares(), "does not see the input itself"),
        (Squares(bias=False), "has no bias"),
    ],
)
def test_where_it_does_not_apply_it_says_why(model: str | nn.Module, reason: str) -> None:
    if isinstance(model, str):
        learner = make_learner(model)
    else:
        learner = Learner.of(model, loss_by_name("cross_entropy"), TrainingSettings()).to(torch.float64)
    with pytest.raises(UsageError, match=reason):
        launch(LinearLayer(), [observe(learner, make_batch())], make_context())


def test_the_last_layer_gives_its_features_away() -> None:
    learner, batch = make_learner(), make_batch()
    found = layer_inputs(observe(learner, batch).update.weights, "linear.weight", 1)
    assert found is not None
    assert torch.allclose(found, features_at(learner, "linear.weight", batch.inputs), atol=1e-9)
    assert all(not module._forward_pre_hooks for module in learner.model.modules())


def test_feature_inversion_finds_an_input_with_these_features() -> None:
    learner, batch = make_learner(), make_batch()
    seen = observe(learner, batch)
    (candidate,) = launch(FeatureInversion(steps=150), [seen], make_context(150))
    wanted = features_at(learner, "linear.weight", batch.inputs)
    grey = features_at(learner, "linear.weight", torch.full_like(batch.inputs, 0.5))
    reached = features_at(learner, "linear.weight", candidate.inputs)
    assert float((reached - wanted).norm() / (grey - wanted).norm()) < 0.15
    assert candidate.first_loss == pytest.approx(1) and candidate.best_loss < 0.03
    assert candidate.best_loss == pytest.approx(
        float((reached - wanted).square().sum() / (grey - wanted).square().sum()), rel=0.1
    )


def test_feature_inversion_is_blind_to_a_common_factor() -> None:
    seen = observe(make_learner(), make_batch())
    clipped = seen.replace(updates=(Update(scale(seen.update.weights, 1e-3), examples=1),))
    plain, scaled = (launch(FeatureInversion(steps=15), [each], make_context())[0].inputs for each in (seen, clipped))
    assert torch.allclose(plain, scaled, atol=1e-6)


def test_feature_inversion_says_where_it_does_not_apply() -> None:
    attack = FeatureInversion()
    assert "more than one example" in str(attack.applies(observe(make_learner(), make_batch(2))))
    assert "local steps" in str(attack.applies(observe(make_learner(shares="weights"), make_batch())))
    headless = observe(make_learner(), make_batch())
    bare = {n: v for n, v in headless.update.weights.items() if n != "linear.bias"}
    assert "no linear last layer" in str(attack.applies(headless.replace(updates=(Update(bare, examples=1),))))


def test_a_weight_that_cannot_fall_geometrically_is_refused() -> None:
    with pytest.raises(UsageError, match="above 0"):
        FeatureInversion(tv=0.0)
