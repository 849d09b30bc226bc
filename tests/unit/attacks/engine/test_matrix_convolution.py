"""Convolutions as matrix products give the same updates and the same second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradveil.attacks.engine import matrix_convolution
from gradveil.attacks.engine.matrix_convolution import with_matrix_convolutions
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.study.local_training import TrainingSettings

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


@pytest.mark.parametrize("own_weights", [False, True], ids=["shared weights", "own weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_candidates_as_groups(stride: int, dtype: torch.dtype, own_weights: bool) -> None:
    """Mapped over candidates, every first and second derivative is torch's: by the library or by matrix products."""
    plain = nn.Conv2d(3, 5, 3, stride=stride, padding=1, bias=False).to(dtype)
    learner = Learner.of(nn.Sequential(plain), loss_by_name("cross_entropy"))
    matrix = with_matrix_convolutions(learner).model[0]  # type: ignore[index]
    random = Seed(2).generator("x")
    inputs, weights = torch.rand((4, 2, 3, 8, 8), generator=random).to(dtype), torch.rand((4, 5, 3, 3, 3), generator=random)
    weights = weights.to(dtype) if own_weights else weights[:1].to(dtype)

    def bent(layer: nn.Module, x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.func.functional_call(layer, {"weight": w}, (x,)).sin().sum()

    def squared_slopes(layer: nn.Module, x: torch.Tensor, w: torch.Tensor) -> Any:
        by_inputs, by_weights = torch.func.grad(lambda x, w: bent(layer, x, w), (0, 1))(x, w)
        return by_inputs.square().sum() + by_weights.square().sum()

    found = []
    for layer in (plain, matrix):
        second = torch.func.grad(lambda x, w, layer=layer: squared_slopes(layer, x, w), (0, 1))
        over = (0, 0) if own_weights else (0, None)
        found.append(torch.func.vmap(second, over)(inputs, weights if own_weights else weights[0]))
    slack = 1e-4 if dtype == torch.float32 else 1e-10
    for left, right in zip(*found, strict=True):
        assert torch.allclose(left, right, rtol=slack, atol=slack * float(left.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_that_candidates_share_get_one_gradient(dtype: torch.dtype) -> None:
    """Where the derivative is taken around the mapping, all candidates are one batch."""
    plain = nn.Conv2d(3, 5, 3, padding=1, bias=False).to(dtype)
    matrix = with_matrix_convolutions(Learner.of(nn.Sequential(plain), loss_by_name("cross_entropy"))).model[0]  # type: ignore[index]
    inputs = torch.rand((4, 2, 3, 8, 8), generator=Seed(3).generator("x")).to(dtype)

    def total(layer: nn.Module, weight: torch.Tensor) -> Any:
        mapped = torch.func.vmap(lambda x: torch.func.functional_call(layer, {"weight": weight}, (x,)).sin().sum())
        return mapped(inputs).sum()

    left, right = (torch.func.grad(lambda w, layer=layer: total(layer, w))(plain.weight.detach()) for layer in (plain, matrix))
    assert torch.allclose(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["lenet", "convnet(width=4)"])
def test_local_steps_agree(name: str) -> None:
    """After the first local step every candidate has weights of its own."""
    model = build_model(name, input_shape=(3, 32, 32), classes=10, seed=Seed(0))
    several = TrainingSettings(shares="weights", local_steps=3)
    plain = Learner.of(model, loss_by_name("cross_entropy"), several).to(torch.float64)
    matrix = with_matrix_convolutions(plain)
    inputs = torch.rand((2, 2, 3, 32, 32), generator=Seed(1).generator("x")).double()
    left, right = (torch.func.vmap(lambda x, who=who: push(who, x))(inputs) for who in (plain, matrix))
    assert torch.allclose(left, right, rtol=1e-6, atol=1e-9 * float(left.abs().max()))


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


@pytest.mark.parametrize(
    ("dtype", "own_weights", "by_library"),
    [(torch.float32, False, True), (torch.float32, True, False), (torch.float64, False, False)],
)
def test_the_library_is_asked_where_it_is_the_quicker(
    dtype: torch.dtype, own_weights: bool, by_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name, inner in (("F.conv2d", torch.nn.functional.conv2d), ("conv2d_input", vars(matrix_convolution)["conv2d_input"])):

        def noting(*given: Any, name: str = name, inner: Any = inner) -> Any:
            asked.append(name)
            return inner(*given)

        monkeypatch.setattr(f"gradveil.attacks.engine.matrix_convolution.{name}", noting)
    plain = nn.Conv2d(3, 5, 3, padding=1, bias=False).to(dtype)
    learner = Learner.of(nn.Sequential(plain), loss_by_name("cross_entropy"))
    matrix = with_matrix_convolutions(learner).model[0]  # type: ignore[index]
    inputs, weights = torch.rand((4, 2, 3, 8, 8)).to(dtype), torch.rand((4, 5, 3, 3, 3)).to(dtype)

    def total(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(matrix, {"weight": w}, (x,)).sin().sum()
        return found

    asked.clear()
    torch.vmap(torch.func.grad(total), in_dims=(0, 0 if own_weights else None))(inputs, weights if own_weights else weights[0])
    assert set(asked) == ({"F.conv2d", "conv2d_input"} if by_library else set())
