"""Multi-layer perceptron: fully connected layers on flattened inputs of any shape."""

from __future__ import annotations

import math

from torch import nn

from gradveil.errors import UsageError
from gradveil.models.base import MODELS, ModelCard
from gradveil.models.layers import make_activation, make_normalize

__all__ = ["mlp"]


@MODELS.register(
    ModelCard(
        name="mlp",
        summary="Fully connected layers on flattened inputs of any shape.",
        inputs="any shape",
        weakness="The gradient of its first layer gives an input away exactly, without any optimisation.",
    )
)
def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: int | tuple[int, ...] = (256,),
    activation: str = "relu",
    normalize: str | None = None,
) -> nn.Module:
    """Return a perceptron.

    Args:
        input_shape: Shape of one input.
        classes: Number of outputs.
        hidden: Width of each hidden layer, or of the only one; empty for a linear model.
        activation: See `gradveil.models.layers.ACTIVATIONS`.
        normalize: Input normalisation inside the model, or None.
    """
    widths = (hidden,) if isinstance(hidden, int) else hidden
    if any(width < 1 for width in widths):
        raise UsageError(f"mlp: hidden is {hidden}; every hidden layer needs at least one unit")
    layers: list[nn.Module] = [make_normalize(normalize, input_shape), nn.Flatten(1)]
    inputs = math.prod(input_shape)
    for width in widths:
        layers += [nn.Linear(inputs, width), make_activation(activation)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
