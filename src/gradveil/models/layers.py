"""Small parts that the model families share: activations, normalisation layers by name, and input normalisation.

Every activation is a module of its own, never in place, so that others can find, inspect and replace it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradveil.errors import UsageError, suggest

__all__ = [
    "ACTIVATIONS",
    "NORMALISATIONS",
    "NORMS",
    "Normalize",
    "make_activation",
    "make_norm",
    "make_normalize",
    "picture_shape",
]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}

NORMS = ("batch", "group", "none")

NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "half": ((0.5,), (0.5,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Mean and standard deviation per channel; a single value serves any number of channels."""

MOST_GROUPS = 8


class Normalize(nn.Module):
    """Subtract a mean and divide by a standard deviation per channel: inputs stay in [0, 1] for everyone outside the model.

    Attributes:
        mean: (C, 1, ...), a constant: not trained, not sent, and not part of a state dict.
        std: The same.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], axes: int) -> None:
        """Hold the constants for inputs with ``axes`` axes after the channel axis."""
        super().__init__()
        # Not persistent: weights trained elsewhere do not hold them.
        self.register_buffer("mean", torch.tensor(mean).reshape(-1, *[1] * axes), persistent=False)
        self.register_buffer("std", torch.tensor(std).reshape(-1, *[1] * axes), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return normalised inputs."""
        return (inputs - self.mean) / self.std


def make_normalize(name: str | None, input_shape: tuple[int, ...]) -> nn.Module:
    """Return the input normalisation called ``name``, or the identity for None."""
    if name is None:
        return nn.Identity()
    if name not in NORMALISATIONS:
        raise UsageError(f"there is no normalisation called {name!r}{suggest(name, NORMALISATIONS)}")
    mean, std = NORMALISATIONS[name]
    if len(mean) not in (1, input_shape[0]):
        raise UsageError(
            f"normalize={name!r} is for {len(mean)} channels, but inputs have {input_shape[0]}; use normalize='half'"
        )
    return Normalize(mean, std, len(input_shape) - 1)


def make_activation(name: str) -> nn.Module:
    """Return a fresh activation module."""
    if name not in ACTIVATIONS:
        raise UsageError(f"there is no activation called {name!r}{suggest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def make_norm(name: str, channels: int, axes: int = 2) -> nn.Module:
    """Return a normalisation layer: ``batch``, ``group`` (at most eight groups) or ``none``.

    Args:
        name: One of `NORMS`.
        channels: Of the feature map.
        axes: 2 for pictures, 1 for signals.
    """
    if name not in NORMS:
        raise UsageError(f"there is no norm called {name!r}{suggest(name, NORMS)}")
    if name == "batch":
        return nn.BatchNorm2d(channels) if axes == 2 else nn.BatchNorm1d(channels)
    if name == "group":
        groups = next(count for count in range(min(MOST_GROUPS, channels), 0, -1) if channels % count == 0)
        return nn.GroupNorm(groups, channels)
    return nn.Identity()


def picture_shape(model: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (C, H, W), or raise for inputs that are no pictures."""
    if len(input_shape) != 3:
        raise UsageError(
            f"{model} reads pictures (channels, height, width), not inputs of shape {input_shape}; use convnet or mlp"
        )
    return input_shape[0], input_shape[1], input_shape[2]
