"""Make max pooling pass on more than one direction.

A max pool hands its slope to one of its entries, so a search learns nothing about the others; and which entry it is jumps with
every small move of the input. Measured on our ConvNet (docs/measurements.md): from the features before its first pool the picture
comes back, from those behind it not. Two stand-ins for the attacker's copy, both in units of the layer's own scale:

* soft: a mean weighted by softmax, which becomes the maximum as its sharpness grows. For a part whose gradient is matched.
* spread: the maximum itself, whose slope goes to all entries by the same weights. For a part whose output is matched.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from gradveil.attacks.engine.smooth_relu import SHARPNESS, all_children

__all__ = ["plain_pool", "with_soft_pools"]

POOLS = (nn.MaxPool1d, nn.MaxPool2d)


def plain_pool(module: nn.Module) -> bool:
    """Whether a module is a max pool whose windows neither overlap nor leave the input."""
    if not isinstance(module, POOLS):
        return False
    axes = 1 if isinstance(module, nn.MaxPool1d) else 2
    size, stride, padding, dilation = (
        _tuple(value, axes) for value in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    whole = not module.ceil_mode and not module.return_indices
    return size == stride and padding == (0,) * axes and dilation == (1,) * axes and whole


def with_soft_pools(model: nn.Module, *, spread: bool) -> nn.Module:
    """Return a copy of a model with stand-ins for its max pools; `smooth_relu.with_sharpness` sets them."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in all_children(parent):
            if plain_pool(child):
                assert isinstance(child, POOLS)
                axes = 1 if isinstance(child, nn.MaxPool1d) else 2
                setattr(parent, name, _SoftPool(_tuple(child.kernel_size, axes), spread))
    return model


def _tuple(value: int | tuple[int, ...], axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)


class _SoftPool(nn.Module):
    """Stands in for a max pool in the attacker's copy of a model."""

    def __init__(self, window: tuple[int, ...], spread: bool) -> None:
        super().__init__()
        self.window, self.spread = window, spread
        self.register_buffer(SHARPNESS, torch.tensor(1.0))

    def forward(self, z: Tensor) -> Tensor:
        parts = _windows(z, self.window)
        still = parts.detach()
        scale = (still - still.mean()).square().mean().sqrt().clamp_min(1e-12)
        sharpness = self.get_buffer(SHARPNESS)
        if not self.spread:
            return (parts * (parts / scale * sharpness).softmax(-1)).sum(-1)
        soft = (parts * (still / scale * sharpness).softmax(-1)).sum(-1)
        return soft + (still.amax(-1) - soft.detach())


def _windows(z: Tensor, window: tuple[int, ...]) -> Tensor:
    """Return (B, C, H/h, W/w, h·w), without what is left over at the far edges; the same for one axis."""
    shape: list[int] = list(z.shape[:2])
    for axis, length in enumerate(window):
        count = z.shape[2 + axis] // length
        z = z.narrow(2 + axis, 0, count * length)
        shape += [count, length]
    axes = len(window)
    split = z.reshape(shape)
    order = (0, 1, *range(2, 2 + 2 * axes, 2), *range(3, 3 + 2 * axes, 2))
    return split.permute(order).flatten(2 + axes)
