"""The LeNet of the gradient-inversion papers: three 5×5 convolutions of 12 channels and one linear layer.

DLG, iDLG and InvLoss attack this network. At 3×32×32 with ten classes it has 15,826 parameters:

    conv1  3·12·25 + 12   =   912     32×32 → 16×16
    conv2  12·12·25 + 12  = 3,612     16×16 → 8×8
    conv3  12·12·25 + 12  = 3,612     8×8
    linear 768·10 + 10    = 7,690
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.errors import UsageError, suggest
from gradveil.models.base import MODELS, ModelCard
from gradveil.models.layers import make_activation, make_normalize, picture_shape

__all__ = ["LeNet", "lenet"]

CHANNELS = 12
STRIDES = (2, 2, 1)
INITS = ("default", "uniform")


class LeNet(nn.Module):
    """Convolutions with stride 2, 2, 1 and padding 2, each followed by an activation; then one linear layer."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int, activation: str, normalize: str | None) -> None:
        """Make the layers with PyTorch's default initialisation."""
        super().__init__()
        channels, height, width = input_shape
        self.normalize = make_normalize(normalize, input_shape)
        self.conv1 = nn.Conv2d(channels, CHANNELS, 5, padding=2, stride=STRIDES[0])
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2, stride=STRIDES[1])
        self.act2 = make_activation(activation)
        self.conv3 = nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2, stride=STRIDES[2])
        self.act3 = make_activation(activation)
        for stride in STRIDES:
            height, width = (height - 1) // stride + 1, (width - 1) // stride + 1
        self.flatten = nn.Flatten(1)
        self.linear = nn.Linear(CHANNELS * height * width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        hidden = self.act1(self.conv1(self.normalize(inputs)))
        hidden = self.act2(self.conv2(hidden))
        hidden = self.act3(self.conv3(hidden))
        logits: Tensor = self.linear(self.flatten(hidden))  # (B, 12, H/4, W/4) -> (B, 12*H/4*W/4) -> (B, classes)
        return logits


@MODELS.register(
    ModelCard(
        name="lenet",
        summary="Three 5×5 convolutions of 12 channels and a linear layer; 15,826 parameters at 3×32×32 with ten classes.",
        paper="Zhu, Liu and Han, Deep Leakage from Gradients, 2019",
        url="https://arxiv.org/abs/1906.08935",
        inputs="pictures",
        weakness="Small and smooth: with sigmoid, the easiest convolutional network to invert.",
    )
)
def lenet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    activation: str = "sigmoid",
    init: str = "default",
    normalize: str | None = None,
) -> nn.Module:
    """Return a LeNet.

    Args:
        input_shape: (C, H, W).
        classes: Number of outputs.
        activation: sigmoid as in DLG, relu, or another of `gradveil.models.layers.ACTIVATIONS`.
        init: ``default`` is PyTorch's; ``uniform`` draws every weight and bias from U(-0.5, 0.5), as DLG's released code does.
        normalize: Input normalisation inside the model, or None.
    """
    if init not in INITS:
        raise UsageError(f"lenet has no init called {init!r}{suggest(init, INITS)}")
    model = LeNet(picture_shape("lenet", input_shape), classes, activation, normalize)
    if init == "uniform":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.5, 0.5)
    return model
