"""Which networks have a gradient that is smooth in the input, told by the operations they run and not by their names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.learning import Learner, loss_by_name
from gradveil.learning.smoothness import why_not_smooth
from gradveil.models import build_model
from gradveil.randomness import Seed

SHAPE = (3, 16, 16)


def asked(model: nn.Module, loss: str = "cross_entropy") -> str:
    learner = Learner.of(model, loss_by_name(loss))
    inputs = torch.rand((1, *SHAPE), generator=Seed(0).generator("inputs"))
    return why_not_smooth(learner, inputs, torch.tensor([1]))


class Functional(nn.Module):
    """A network whose activation is no module."""

    def __init__(self, activation: object) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Linear(768, 8), nn.Linear(8, 4), activation

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.activation(self.first(x.flatten(1)))  # type: ignore[operator]
        out: Tensor = self.last(hidden)
        return out


@pytest.mark.parametrize(
    "spelling",
    [
        "lenet",
        "lenet(activation='tanh')",
        "lenet(activation='gelu')",
        "lenet(activation='elu')",
        "mlp(hidden=[8], activation='silu')",
        "resnet20(activation='softplus')",
        "resnet20(activation='sigmoid', norm='group')",
    ],
)
def test_smooth_networks_are_smooth(spelling: str) -> None:
    assert asked(build_model(spelling, input_shape=SHAPE, classes=4, seed=Seed(0))) == ""


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "mean_squared_error", "dice"])
def test_losses_are_smooth(loss: str) -> None:
    assert asked(build_model("mlp(activation='tanh')", input_shape=SHAPE, classes=4, seed=Seed(0)), loss) == ""


@pytest.mark.parametrize(
    ("spelling", "word"),
    [
        ("lenet(activation='relu')", "ReLU"),
        ("resnet20", "ReLU"),
        ("mlp(activation='leaky_relu')", "leaky ReLU"),
        ("convnet(activation='gelu')", "max pooling"),
    ],
)
def test_kinks_are_named(spelling: str, word: str) -> None:
    found = asked(build_model(spelling, input_shape=SHAPE, classes=4, seed=Seed(0)))
    assert "kinks" in found and word in found


@pytest.mark.parametrize(
    ("activation", "word"),
    [
        (F.relu, "ReLU"),
        (torch.abs, "absolute value"),
        (lambda x: x.clamp(min=0), "clamp"),
        (lambda x: torch.maximum(x, 0.1 * x), "maximum"),
        (F.hardtanh, "hard tanh"),
        (F.selu, "ELU with a bend"),
        (lambda x: F.elu(x, alpha=0.5), "ELU with a bend"),
        (lambda x: F.prelu(x, torch.tensor([0.2])), "PReLU"),
        (lambda x: x.relu_(), "ReLU"),
        (lambda x: x.round(), "rounding"),
    ],
)
def test_functions_inside_a_forward_pass_are_seen(activation: object, word: str) -> None:
    found = asked(Functional(activation))
    assert "kinks" in found and word in found


@pytest.mark.parametrize(
    "activation",
    [
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
        lambda x: x * (x > 0),
        lambda x: x * x.long(),
        torch.digamma,
        lambda x: x if float(x.sum()) > 0 else 2 * x,
        lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True) * x,
    ],
)
def test_of_what_is_not_known_nothing_is_claimed(activation: object) -> None:
    assert "cannot tell" in asked(Functional(activation))


def test_smooth_functions_inside_a_forward_pass_are_smooth() -> None:
    for activation in (torch.tanh, F.gelu, F.celu, F.elu, torch.square, lambda x: x**3, F.softplus):
        assert asked(Functional(activation)) == ""
