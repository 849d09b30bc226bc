"""Labels are read off the last layer: exactly for one example, by counts for several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.engine.labels import classifier_layer, label_scores, plainly_certain, recover_labels
from gradveil.attacks.feature_inversion import feature_layer
from gradveil.learning import Learner, loss_by_name
from gradveil.records import Batch, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import scale
from tests.unit.attacks.scenes import CLASSES, make_batch, make_learner, observe


@pytest.mark.parametrize("model", ["lenet", "lenet(activation='relu')", "mlp(hidden=16)", "convnet", "resnet20"])
def test_one_label_is_exact_whatever_the_model(model: str) -> None:
    learner = make_learner(model, shape=(3, 16, 16))
    for label in range(CLASSES):
        batch = make_batch(shape=(3, 16, 16), seed=label).replace(targets=torch.tensor([label]))
        assert recover_labels(observe(learner, batch)).tolist() == [label]


def test_an_update_in_the_other_sign_gives_another_label() -> None:
    learner, hits = make_learner(), []
    for label in range(CLASSES):
        seen = observe(learner, make_batch().replace(targets=torch.tensor([label])))
        flipped = Update(scale(seen.update.weights, -1), examples=1)
        hits.append(recover_labels(seen.replace(updates=(flipped,))).tolist() == [label])
    assert not any(hits)


@pytest.mark.parametrize("settings", [{"local_steps": 1}, {"local_steps": 3}, {"local_steps": 2, "clients": 2}], ids=str)
def test_shared_weights_are_scaled_back_to_a_gradient(settings: dict[str, int]) -> None:
    count = settings.get("clients", 1)
    batch = make_batch(count)
    sent = observe(make_learner(shares="weights", learning_rate=1e-4, **settings), batch)  # type: ignore[arg-type]
    gradient = label_scores(observe(make_learner(clients=count), batch))
    found = label_scores(sent)
    assert found is not None and gradient is not None
    assert torch.allclose(found, gradient, atol=1e-3)
    assert recover_labels(sent).tolist() == sorted(batch.targets.tolist())


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2, 3], [4, 4, 4, 1, 1, 3, 3, 3], [2] * 7 + [0]], ids=str)
def test_counts_of_a_batch(labels: list[int]) -> None:
    batch = make_batch(len(labels)).replace(targets=torch.tensor(labels))
    assert recover_labels(observe(make_learner(), batch)).tolist() == sorted(labels)


@pytest.mark.parametrize("count", [2, 16])
def test_there_are_always_as_many_labels_as_examples(count: int) -> None:
    seen = observe(make_learner(), make_batch(count))
    for level in (1.0, -1.0, 1e-9):
        hidden = {n: torch.full_like(v, level) for n, v in seen.update.weights.items()}
        found = recover_labels(seen.replace(updates=(Update(hidden, examples=count),)))
        assert len(found) == count and bool(((found >= 0) & (found < CLASSES)).all())


class NoBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, 12), nn.Linear(12, CLASSES, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.sigmoid(self.first(inputs.flatten(1))))
        return outputs


def wrap(model: nn.Module) -> Learner:
    return Learner.of(model, loss_by_name("cross_entropy"), TrainingSettings()).to(torch.float64)


def test_without_a_bias_row_sums_tell() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        learner = wrap(NoBias())
    for label in range(CLASSES):
        batch = Batch(make_batch(seed=label).inputs, torch.tensor([label]))
        assert recover_labels(observe(learner, batch)).tolist() == [label]


def all_convolutions(bias: bool = True) -> nn.Module:
    """A network that ends in one filter per class and their means, as SqueezeNet and NiN do."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = (nn.Conv2d(2, 8, 3, stride=2), nn.Sigmoid(), nn.Conv2d(8, CLASSES, 1, bias=bias))
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize("bias", [True, False])
def test_a_filter_for_each_class_tells_labels_like_a_linear_layer(bias: bool) -> None:
    """Without a matrix every search ran for class 0, and the label level said that there is nothing to read."""
    learner = wrap(all_convolutions(bias))
    for label in range(CLASSES):
        seen = observe(learner, Batch(make_batch(seed=label).inputs, torch.tensor([label])))
        assert recover_labels(seen).tolist() == [label]
        assert not bias or plainly_certain(seen)
        assert feature_layer(seen) is None, "its input is told in the mean over places alone"
    labels = [0, 1, 1, 3]
    seen = observe(learner, make_batch(4).replace(targets=torch.tensor(labels)))
    assert not bias or recover_labels(seen).tolist() == labels


def test_a_matrix_goes_before_a_filter_and_an_early_filter_is_none() -> None:
    filters, matrix = torch.zeros(CLASSES, 4, 1, 1), torch.zeros(CLASSES, 9)
    assert classifier_layer({"a.weight": filters, "b.weight": torch.zeros(7, 9)}, CLASSES) is None
    assert classifier_layer({"b.weight": matrix, "a.weight": filters}, CLASSES) == "b.weight"
    assert classifier_layer({"b.weight": torch.zeros(7, 9), "a.weight": filters}, CLASSES) == "a.weight"


def test_without_a_classifier_layer_there_is_nothing_to_read() -> None:
    seen = observe(make_learner(), make_batch(3))
    bare = {n: v for n, v in seen.update.weights.items() if not n.startswith("linear")}
    blind = seen.replace(updates=(Update(bare, examples=3),))
    assert label_scores(blind) is None
    assert recover_labels(blind).tolist() == [0, 0, 0]


def test_the_last_matrix_with_a_row_per_class_is_the_classifier() -> None:
    weights = {"a.weight": torch.zeros(CLASSES, 4), "b.weight": torch.zeros(CLASSES, 9), "c.weight": torch.zeros(7, 9)}
    assert classifier_layer(weights, CLASSES) == "b.weight"
    assert classifier_layer({"a.bias": torch.zeros(CLASSES)}, CLASSES) is None
