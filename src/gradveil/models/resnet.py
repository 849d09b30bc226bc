"""CIFAR ResNets: a 3×3 stem with stride 1 and no pooling, so that small pictures keep their resolution.

* ``resnet18``: 64-128-256-512 channels, two blocks each, projection shortcuts; 11,173,962 parameters with ten classes.
* ``resnet20``: 16-32-64 channels, three blocks each, zero-padded shortcuts (option A of the paper); 269,722 parameters.

Names of tensors are those most public CIFAR checkpoints use: conv1, bn1, layer1.0.conv1, …, linear.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import UsageError, suggest
from gradveil.models.base import MODELS, ModelCard
from gradveil.models.layers import make_activation, make_norm, make_normalize, picture_shape

__all__ = ["BasicBlock", "ResNet", "ZeroPad", "resnet18", "resnet20"]

PAPER = "He et al., Deep Residual Learning for Image Recognition, 2016"
URL = "https://arxiv.org/abs/1512.03385"
SHORTCUTS = ("projection", "zero_pad")


class ZeroPad(nn.Module):
    """Shortcut without weights: take every ``stride``-th pixel and fill new channels with zeros on both sides."""

    def __init__(self, extra: int, stride: int) -> None:
        """Add ``extra`` channels."""
        super().__init__()
        self.before, self.after, self.stride = extra // 2, extra - extra // 2, stride

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (B, C + extra, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return F.pad(inputs[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, norm: str, activation: str, shortcut: str) -> None:
        """Make the layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = make_norm(norm, outputs)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = make_norm(norm, outputs)
        self.act2 = make_activation(activation)
        self.shortcut = _shortcut(shortcut, inputs, outputs, stride, norm)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's feature map."""
        hidden = self.act1(self.bn1(self.conv1(inputs)))
        result: Tensor = self.act2(self.bn2(self.conv2(hidden)) + self.shortcut(inputs))
        return result


def _shortcut(kind: str, inputs: int, outputs: int, stride: int, norm: str) -> nn.Module:
    if kind not in SHORTCUTS:
        raise UsageError(f"there is no shortcut called {kind!r}{suggest(kind, SHORTCUTS)}")
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if kind == "zero_pad":
        return ZeroPad(outputs - inputs, stride)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), make_norm(norm, outputs))


class ResNet(nn.Module):
    """Stem, stages of basic blocks (each stage but the first halves the resolution), mean over pixels, linear layer."""

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        classes: int,
        widths: tuple[int, ...],
        depth: int,
        *,
        norm: str,
        activation: str,
        shortcut: str,
        normalize: str | None,
    ) -> None:
        """Make ``len(widths)`` stages of ``depth`` blocks."""
        super().__init__()
        self.normalize = make_normalize(normalize, input_shape)
        self.conv1 = nn.Conv2d(input_shape[0], widths[0], 3, padding=1, bias=False)
        self.bn1 = make_norm(norm, widths[0])
        self.act1 = make_activation(activation)
        self.stages = len(widths)
        inputs = widths[0]
        for stage, width in enumerate(widths):
            blocks = []
            for block in range(depth):
                stride = 2 if stage and not block else 1
                blocks.append(BasicBlock(inputs, width, stride, norm=norm, activation=activation, shortcut=shortcut))
                inputs = width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.linear = nn.Linear(inputs, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        hidden = self.act1(self.bn1(self.conv1(self.normalize(inputs))))
        for stage in range(self.stages):
            hidden = self.get_submodule(f"layer{stage + 1}")(hidden)
        logits: Tensor = self.linear(hidden.mean((2, 3)))  # (B, C, h, w) -> (B, C) -> (B, classes)
        return logits


@MODELS.register(
    ModelCard(
        name="resnet18",
        summary="CIFAR ResNet-18: 3×3 stem, 64-128-256-512 channels; 11.17 million parameters.",
        paper=PAPER,
        url=URL,
        inputs="pictures",
        cost="About 560 million multiplications per 32×32 picture: attack it on a GPU.",
    )
)
def resnet18(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    norm: str = "batch",
    activation: str = "relu",
    shortcut: str = "projection",
    normalize: str | None = None,
) -> nn.Module:
    """Return a ResNet-18 for small pictures.

    Args:
        input_shape: (C, H, W).
        classes: Number of outputs.
        norm: batch as in the paper, group or none.
        activation: See `gradveil.models.layers.ACTIVATIONS`.
        shortcut: projection or zero_pad, where the resolution changes.
        normalize: Input normalisation inside the model, or None.
    """
    shape = picture_shape("resnet18", input_shape)
    return ResNet(
        shape, classes, (64, 128, 256, 512), 2, norm=norm, activation=activation, shortcut=shortcut, normalize=normalize
    )


@MODELS.register(
    ModelCard(
        name="resnet20",
        summary="CIFAR ResNet-20: 16-32-64 channels, three blocks each; 0.27 million parameters.",
        paper=PAPER,
        url=URL,
        inputs="pictures",
        cost="About 41 million multiplications per 32×32 picture.",
    )
)
def resnet20(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    norm: str = "batch",
    activation: str = "relu",
    shortcut: str = "zero_pad",
    normalize: str | None = None,
) -> nn.Module:
    """Return a ResNet-20; the settings are those of `resnet18`."""
    shape = picture_shape("resnet20", input_shape)
    return ResNet(shape, classes, (16, 32, 64), 3, norm=norm, activation=activation, shortcut=shortcut, normalize=normalize)
