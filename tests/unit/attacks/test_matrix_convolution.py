"""Convolutions as matrix products give the same updates and the same second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradveil.attacks.matrix_convolution import with_matrix_convolutions
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed

MODELS = ["lenet", "convnet(width=4)", "resnet20"]


def learner_of(model: nn.Module) -> Learner:
    return Learner.of(model, loss_by_name("cross_entropy")).to(torch.float64)


def push(learner: Learner, inputs: torch.Tensor) -> torch.Tensor:
    """Return the derivative, in the inputs, of a sum over the squared gradient: a second derivative through every layer."""

    def size(x: torch.Tensor) -> torch.Tensor:
        update = learner.update(x, torch.tensor([1, 0]))
        return torch.stack([value.square().sum() for value in update.values()]).sum()

    slope: torch.Tensor = torch.func.grad(size)(inputs)
    return slope


@pytest.mark.parametrize("name", MODELS)
def test_updates_and_second_derivatives_agree(name: str) -> None:
    plain = learner_of(build_model(name, input_shape=(3, 32, 32), classes=10, seed=Seed(0)))
    matrix = with_matrix_convolutions(plain)
    assert matrix is not plain
    inputs = torch.rand((2, 3, 32, 32), generator=Seed(1).generator("x")).double()
    left, right = plain.update(inputs, torch.tensor([3, 7])), matrix.update(inputs, torch.tensor([3, 7]))
    assert all(torch.allclose(left[n], right[n], rtol=1e-8, atol=1e-10) for n in left)
    assert torch.allclose(push(plain, inputs), push(matrix, inputs), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
        nn.Conv2d(4, 6, 1, stride=2, bias=False),
        nn.Conv2d(4, 6, 5, padding=2),
    ],
    ids=str,
)
def test_every_shape_of_convolution(layer: nn.Conv2d) -> None:
    inputs = torch.rand((2, 4, 9, 8))
    model = nn.Sequential(layer)
    changed = with_matrix_convolutions(Learner.of(model, loss_by_name("cross_entropy")))
    assert type(changed.model[0]) is not nn.Conv2d  # type: ignore[index]
    assert torch.allclose(changed.forward(changed.weights, inputs), layer(inputs), atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.Conv2d(4, 4, 3, padding="same")],
)
def test_what_it_does_not_cover_stays(layer: nn.Conv2d) -> None:
    learner = Learner.of(nn.Sequential(layer), loss_by_name("cross_entropy"))
    assert with_matrix_convolutions(learner) is learner
