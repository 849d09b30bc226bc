"""First weights from a generator that is handed in, so that building a network never moves a global one."""

from __future__ import annotations

import math

import torch
from torch import nn

from gradveil.randomness import Seed

__all__ = ["initialise"]


def initialise(module: nn.Module, generator: torch.Generator | None) -> None:
    """Fill every convolution, linear and BatchNorm layer; parameters are on the CPU, as they are when a network is built.

    Kernels are normal with variance 2 / fan-in (He et al.), for transposed ones with the fan-in of their output; the layer before
    a sigmoid or tanh is linear and gets half of that. Biases are zero.
    """
    drawn = generator if generator is not None else Seed(0).generator("first weights")
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.ConvTranspose2d):
                reach = math.prod(layer.kernel_size) / math.prod(layer.stride)
                _fill(layer.weight, layer.in_channels * max(1.0, reach), 2.0, drawn)
            elif isinstance(layer, nn.Conv2d):
                _fill(layer.weight, layer.in_channels * math.prod(layer.kernel_size), 2.0, drawn)
            elif isinstance(layer, nn.Linear):
                _fill(layer.weight, layer.in_features, 1.0, drawn)
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)) and layer.bias is not None:
                layer.bias.zero_()


def _fill(weight: torch.Tensor, fan_in: float, gain: float, generator: torch.Generator) -> None:
    weight.normal_(0.0, math.sqrt(gain / fan_in), generator=generator)
