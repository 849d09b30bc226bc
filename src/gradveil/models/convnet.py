"""The ConvNet of "Inverting Gradients": eight 3×3 convolutions, two poolings, one linear layer; for pictures and for signals.

With ``width=64, norm="batch"`` and 3×32×32 inputs it is that paper's ConvNet64 (2,904,970 parameters with ten classes). The
default is a quarter as wide, with group normalisation: per-example gradients then exist, and no BatchNorm mode has to be chosen.
"""

from __future__ import annotations

import math

from torch import nn

from gradveil.errors import UsageError, suggest
from gradveil.models.base import MODELS, ModelCard
from gradveil.models.layers import make_activation, make_norm, make_normalize

__all__ = ["convnet"]

# Channels of each convolution as multiples of the width; None pools.
PLAN = (1, 2, 2, 4, 4, 4, None, 4, 4, None)
POOLS = ("max", "average")
WINDOW = 3


@MODELS.register(
    ModelCard(
        name="convnet",
        summary="Eight 3×3 convolutions with pooling and a linear layer, in two dimensions for pictures or one for signals.",
        paper="Geiping et al., Inverting Gradients - How easy is it to break privacy in federated learning?, 2020",
        url="https://arxiv.org/abs/2003.14053",
        inputs="pictures and signals",
        cost="0.19 million parameters and 117 million multiplications per 32×32 picture; lenet needs 0.7 million.",
    )
)
def convnet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 16,
    norm: str = "group",
    activation: str = "relu",
    pool: str = "max",
    normalize: str | None = None,
) -> nn.Module:
    """Return a ConvNet.

    Args:
        input_shape: (C, H, W) or (C, T).
        classes: Number of outputs.
        width: Channels of the first convolution; the paper's is 64.
        norm: group, batch or none, after each convolution.
        activation: See `gradveil.models.layers.ACTIVATIONS`.
        pool: max as in the paper, or average, which is smooth.
        normalize: Input normalisation inside the model, or None.
    """
    axes = len(input_shape) - 1
    if axes not in (1, 2):
        raise UsageError(f"convnet reads pictures (C, H, W) or signals (C, T), not inputs of shape {input_shape}; use mlp")
    if width < 1:
        raise UsageError(f"convnet: width is {width}; give at least one channel")
    if pool not in POOLS:
        raise UsageError(f"convnet has no pool called {pool!r}{suggest(pool, POOLS)}")
    layers: list[nn.Module] = [make_normalize(normalize, input_shape)]
    channels, size = input_shape[0], input_shape[1:]
    for factor in PLAN:
        if factor is None:
            window = tuple(min(WINDOW, length) for length in size)
            layers.append(_pool(pool, window))
            size = tuple(length // part for length, part in zip(size, window, strict=True))
        else:
            layers += [
                _convolution(axes, channels, factor * width),
                make_norm(norm, factor * width, axes),
                make_activation(activation),
            ]
            channels = factor * width
    return nn.Sequential(*layers, nn.Flatten(1), nn.Linear(channels * math.prod(size), classes))


def _convolution(axes: int, inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1) if axes == 2 else nn.Conv1d(inputs, outputs, 3, padding=1)


def _pool(kind: str, window: tuple[int, ...]) -> nn.Module:
    if len(window) == 2:
        pair = (window[0], window[1])
        return nn.MaxPool2d(pair) if kind == "max" else nn.AvgPool2d(pair)
    return nn.MaxPool1d(window[0]) if kind == "max" else nn.AvgPool1d(window[0])
