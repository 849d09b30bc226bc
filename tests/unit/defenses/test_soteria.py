"""Soteria: which columns go, that the batched Jacobian is the slow one, and that everything else arrives exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.soteria_mask import measure
from gradveil.adversary import MASK
from gradveil.attacks.engine.labels import recover_labels
from gradveil.client.update import run_client
from gradveil.defenses import ClientView, build_defense
from gradveil.defenses.soteria import Soteria, column_mask, feature_sensitivities, last_linear_layer
from gradveil.errors import UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch, ThreatModel
from gradveil.study.local_training import TrainingSettings
from gradveil.testing.defenses_scene import Scene, draw_batch

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "defenses_pruned_and_orthogonal.json").read_text()
)


def make_learner(spelling: str, shape: tuple[int, ...] = (3, 16, 16)) -> Learner:
    model = build_model(spelling, input_shape=shape, classes=4, seed=Seed(0))
    return Learner.of(model, loss_by_name("cross_entropy"), TrainingSettings())


def slowly(learner: Learner, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """One backward pass per feature and example, as released code does it."""
    module = learner.model.get_submodule(last_linear_layer(learner.model).removesuffix(".weight"))
    caught: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0]))
    leaf = inputs.clone().requires_grad_(True)
    learner.forward(learner.weights, leaf)
    handle.remove()
    features = caught[0]
    norms = torch.zeros_like(features)
    for index in range(features.shape[1]):
        (slope,) = torch.autograd.grad(features[:, index].sum(), leaf, retain_graph=True, allow_unused=False)
        norms[:, index] = slope.reshape(len(inputs), -1).norm(dim=1)
    return features.detach(), norms.detach()


@pytest.mark.parametrize("row", GOLDEN["soteria_masks"]["value"]["kept"], ids=str)
def test_the_mask_with_each_epsilon(row: dict[str, Any]) -> None:
    golden = GOLDEN["soteria_masks"]["value"]
    features, sensitivities = torch.tensor([golden["features"]]), torch.tensor([golden["sensitivities"]])
    assert column_mask(features, sensitivities, golden["rate"], row["epsilon"]).tolist() == row["mask"]


@pytest.mark.parametrize("model", ["lenet", "lenet(activation='relu')", "resnet20(norm='group')", "mlp(hidden=(20, 12))"])
def test_one_batched_pass_gives_what_one_backward_per_feature_gives(model: str) -> None:
    learner = make_learner(model)
    inputs = torch.rand((2, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    features, norms = feature_sensitivities(learner, inputs)
    expected, slow = slowly(learner, inputs)
    assert torch.allclose(features, expected, atol=1e-6)
    assert torch.allclose(norms, slow, rtol=1e-4, atol=1e-7)
    assert bool((slow > 0).any())


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, inputs = make_learner("mlp(hidden=(20, 12))"), torch.rand((3, 3, 16, 16))
    _, together = feature_sensitivities(learner, inputs)
    monkeypatch.setattr("gradveil.defenses.soteria.AT_ONCE", 7)
    _, apart = feature_sensitivities(learner, inputs)
    assert torch.allclose(together, apart, rtol=1e-5)


def test_dead_features_do_not_use_up_the_rate() -> None:
    """90 of 100 features are dead: a percentile over all of them would be zero, and nothing would be pruned."""
    features, sensitivities = torch.zeros((2, 100)), torch.zeros((2, 100))
    features[:, :10], sensitivities[:, :10] = 1.0, torch.arange(1.0, 11.0)
    for epsilon in (0.0, 0.1):
        mask = column_mask(features, sensitivities, 0.8, epsilon)
        assert torch.isfinite(mask).all()
        assert mask[:10].tolist() == [0] * 8 + [1] * 2
    assert not column_mask(torch.zeros((1, 5)), torch.zeros((1, 5)), 0.8, 0.0).any()


def test_a_saturated_feature_goes_first_and_a_moving_zero_stays() -> None:
    features, sensitivities = torch.tensor([[1.0, 0.0, 0.5, 0.5]]), torch.tensor([[0.0, 0.2, 0.3, 0.4]])
    assert column_mask(features, sensitivities, 0.3, 0.0).tolist() == [0, 1, 1, 1]
    assert column_mask(features, sensitivities, 0.99, 0.0).tolist() == [0, 1, 0, 0]


def test_a_negative_feature_counts_by_its_size() -> None:
    sensitivities = torch.tensor([[1.0, 2.0, 3.0]])
    plus = column_mask(torch.tensor([[2.0, 2.0, 2.0]]), sensitivities, 0.5, 0.1)
    minus = column_mask(torch.tensor([[-2.0, 2.0, -2.0]]), sensitivities, 0.5, 0.1)
    assert plus.tolist() == minus.tolist() == [0, 1, 1]


def test_only_columns_of_the_last_weight_are_touched_at_every_step() -> None:
    learner = make_learner("lenet")
    batch = Batch(torch.rand((3, 3, 16, 16)), torch.tensor([0, 2, 3]))
    gradient = learner.update(batch.inputs, batch.targets)
    view = ClientView(learner=learner, seed=Seed(0), weights=learner.weights, raw_batch=batch, batch=batch)
    sent, _ = Soteria(rate=0.8).protect_gradient(gradient, view, {})
    zero = (sent["linear.weight"] == 0).all(0)
    features = zero.numel()
    assert int(zero.sum()) == -(-8 * (features - 1) // 10)
    assert torch.equal(sent["linear.weight"][:, ~zero], gradient["linear.weight"][:, ~zero])
    assert all(torch.equal(value, gradient[name]) for name, value in sent.items() if name != "linear.weight")
    elsewhere = {n: w + 0.3 * torch.sin(torch.arange(w.numel())).reshape(w.shape) for n, w in learner.weights.items()}
    later, _ = Soteria(rate=0.8).protect_gradient(gradient, view.replace(step=1, weights=elsewhere), {})
    assert not torch.equal((later["linear.weight"] == 0).all(0), zero), "the mask follows the local weights"


def test_the_attacker_reads_mask_and_label_and_the_rest_is_exact() -> None:
    defense = Soteria(rate=0.8)
    scene = Scene.of(defense)
    one = Batch(draw_batch(0).inputs[:1], draw_batch(0).targets[:1])
    observation = scene.observe(defense, 1, one)
    adversary = observation.adversary
    evidence = adversary.evidence(observation, 0)
    assert float(evidence[MASK + "head.weight"].mean()) == pytest.approx(0.2, abs=0.02)
    assert all(evidence[MASK + name].all() for name in observation.update.weights if name != "head.weight")
    comparison = adversary.compare(evidence, adversary.replay(scene.learner, one.inputs, one.targets, {}), {})
    assert max(float(value.abs().max()) for value in comparison.residuals().values() if value.numel()) < 1e-6
    assert adversary.arrives(observation).exact() == frozenset(observation.update.weights) - {"head.weight"}
    assert recover_labels(observation).tolist() == one.targets.tolist()
    assert not adversary.arrives(observation).incomplete
    many = observation.replace(threat=ThreatModel(clients=2))
    assert adversary.arrives(many).incomplete


def test_local_steps_on_minibatches_are_defended() -> None:
    defense = build_defense("soteria(rate=0.9)")
    settings = TrainingSettings(shares="weights", epochs=2, minibatch=2, learning_rate=0.05)
    scene = Scene.of(defense, settings=settings)
    sent = scene.deliver(defense, run_client(scene.learner, scene.batch, defense, Seed(1)).payload).weights
    raw = scene.learner.update(scene.batch.inputs, scene.batch.targets)
    assert bool((sent["head.weight"] == 0).all(0).any())
    assert not bool((raw["head.weight"] == 0).all(0).any())


def test_a_layer_that_sees_several_positions_is_summed_over_them() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv1d(2, 6, 3, padding=1)
            self.head = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.head(torch.sigmoid(self.embed(inputs)).transpose(1, 2)).mean(1)
            return outputs

    learner = Learner.of(Tokens(), loss_by_name("cross_entropy"))
    features, norms = feature_sensitivities(learner, torch.rand((2, 2, 5)))
    assert features.shape == norms.shape == (2, 6)


def test_models_without_a_linear_layer_and_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="this model has none"):
        last_linear_layer(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()))
    assert last_linear_layer(nn.Linear(2, 2)) == "weight"
    for wrong in ({"rate": 1.0}, {"rate": -0.1}, {"epsilon": -1.0}):
        with pytest.raises(UsageError, match="soteria"):
            Soteria(**wrong)


def test_the_benchmark_compares_like_with_like() -> None:
    result = measure("lenet", 2, torch.device("cpu"), rounds=1, side=8)
    assert result["features"] == 48
    assert result["columns_that_differ"] == 0 and result["largest_difference"] < 1e-5
    assert result["speedup"] > 0 and min(result["milliseconds"].values()) > 0
