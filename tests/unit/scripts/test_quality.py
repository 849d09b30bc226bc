"""The measures of generators and of the evaluation network, on cases whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.networks.style import StyleGenerator
from gradveil.randomness import Seed
from scripts.pretraining.quality import (
    RandomFeatures,
    calibration,
    generator_quality,
    kernel_distance,
    memorisation,
    precision_recall,
)


def normal(count: int, width: int, role: str, shift: float = 0.0) -> Tensor:
    return torch.randn((count, width), generator=Seed(0).generator(role)) + shift


def test_the_kernel_distance_is_near_zero_for_one_distribution_and_grows_with_the_shift() -> None:
    same, near, far = (kernel_distance(normal(300, 8, "a", shift), normal(300, 8, "b")) for shift in (0.0, 0.5, 1.0))
    assert abs(same) < 0.05
    assert same < near < far


def test_the_kernel_distance_equals_the_double_sum() -> None:
    x, y = normal(4, 3, "x").double(), normal(5, 3, "y").double()
    y = (y - y.mean(0)) / y.std(0)  # so that bringing it to mean and spread changes nothing

    def kernel(a: Tensor, b: Tensor) -> float:
        return float((a @ b / 3 + 1) ** 3)

    within_x = sum(kernel(x[i], x[j]) for i in range(4) for j in range(4) if i != j) / 12
    within_y = sum(kernel(y[i], y[j]) for i in range(5) for j in range(5) if i != j) / 20
    between = sum(kernel(a, b) for a in x for b in y) / 20
    assert kernel_distance(x, y) == pytest.approx(within_x + within_y - 2 * between, rel=1e-9)


def test_precision_falls_where_pictures_are_foreign_and_recall_where_they_repeat() -> None:
    real = normal(200, 2, "real")
    precision, recall = precision_recall(normal(200, 2, "fresh"), real)
    assert precision > 0.8
    assert recall > 0.8
    assert precision_recall(normal(200, 2, "far", 50.0), real)[0] == 0
    one_place = real[:1] + 1e-4 * normal(200, 2, "jitter")
    assert precision_recall(one_place, real)[1] < 0.05


def test_copies_are_noticed() -> None:
    train, fresh = (torch.rand((60, 1, 16, 16), generator=Seed(0).generator(role)) for role in ("train", "fresh"))
    assert memorisation(train[:20], train, fresh) < 0.01
    assert memorisation(fresh[:30], train, fresh[30:]) == pytest.approx(1.0, abs=0.1)


def test_comparing_too_few_is_refused() -> None:
    with pytest.raises(UsageError, match="at least"):
        kernel_distance(normal(1, 2, "a"), normal(9, 2, "b"))


def test_features_are_the_same_everywhere(untouched_global_rng: None) -> None:
    images = torch.rand((2, 1, 64, 64), generator=Seed(0).generator("i"))
    assert torch.equal(RandomFeatures()(images), RandomFeatures()(images))
    assert RandomFeatures()(images).shape == (2, 672)


def test_a_generator_is_measured_with_its_anchors() -> None:
    pictures = torch.randint(90, 160, (120, 1, 8, 8), generator=Seed(0).generator("p"), dtype=torch.uint8)
    network = StyleGenerator(8, 1, 8, 2, {4: 4, 8: 4}).eval().requires_grad_(False)
    found = generator_quality(network, pictures[:80], pictures[80:], Seed(2))
    assert found == generator_quality(network, pictures[:80], pictures[80:], Seed(2))
    assert abs(found["kernel_distance_of_training_pictures"]) < found["kernel_distance_of_noise"]
    assert found["pictures_compared"] == 40


class Knowing(nn.Module):
    """Answers the spread of the pictures, which for black ones is the ratio, plus an error."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.error = nn.Parameter(torch.tensor(error))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).std(1) * 12**0.5 + self.error


def test_calibration_finds_the_bias() -> None:
    black = torch.zeros((50, 1, 32, 32))
    right, wrong = (calibration(Knowing(error), black, Seed(0)) for error in (0.0, 0.07))
    assert right["bias"] < 0.01
    assert right["monotone"]
    assert wrong["bias"] == pytest.approx(0.07, abs=0.01)
    assert len(right["mean"]) == 11


def test_calibration_notices_answers_that_do_not_rise() -> None:
    class Falling(Knowing):
        def forward(self, images: Tensor) -> Tensor:
            return 1 - super().forward(images)

    assert not calibration(Falling(0.0), torch.zeros((20, 1, 32, 32)), Seed(0))["monotone"]
