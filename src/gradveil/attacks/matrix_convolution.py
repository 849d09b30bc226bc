"""Make convolutions of the attacker's copy fast for many candidates at once.

Mapped over candidates, the weight gradient of a convolution and everything derived from it become convolutions with one
group per candidate, which libraries run far below the speed of the machine. Written as unfolding and a matrix product, the
same arithmetic is batched matrix products, in the first and in the second derivative. On a GPU that is 1.3 to 2.2 times faster
for every network measured, and slower on a CPU; see docs/measurements.md.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.learning.learner import Learner

__all__ = ["quicker", "with_matrix_convolutions"]

PIXELS = 64 * 64
"""Largest pictures for which it pays whatever the network: columns take as many times their memory as a kernel has entries."""
WEIGHTS = 2_000_000
"""Weights from which the gradients outweigh the columns."""


@dataclass(frozen=True)
class _Window:
    """How a convolution walks over a picture."""

    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    picture: tuple[int, int]

    def columns(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Return what `F.unfold` returns, by one strided copy: torch's kernel is launched once per picture."""
        (down, right), (tall, wide) = self.padding, self.kernel
        padded = F.pad(input, (right, right, down, down)) if down or right else input
        for axis in (2, 3):
            span = self.dilation[axis - 2] * (self.kernel[axis - 2] - 1) + 1
            padded = padded.unfold(axis, span, self.stride[axis - 2])  # one window axis at the end for each
        windows = padded[..., :: self.dilation[0], :: self.dilation[1]]  # (B, C, H', W', k, k)
        count = windows.shape[2] * windows.shape[3]
        return windows.permute(0, 1, 4, 5, 2, 3).reshape(input.shape[0], input.shape[1] * tall * wide, count)

    def picture_of(self, columns: Tensor) -> Tensor:
        """Return the transpose of `columns`: every entry is added where it came from."""
        return F.fold(columns, self.picture, self.kernel, self.dilation, self.padding, self.stride)


class _Unfold(torch.autograd.Function):
    """Unfolding, whose derivative is folding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(picture: Tensor, window: _Window) -> Tensor:
        return window.columns(picture)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.window = inputs[1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, None]:
        return _Fold.apply(slope, ctx.window), None  # type: ignore[no-untyped-call]


class _Fold(torch.autograd.Function):
    """Folding, whose derivative is unfolding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(columns: Tensor, window: _Window) -> Tensor:
        return window.picture_of(columns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.window = inputs[1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, None]:
        return _Unfold.apply(slope, ctx.window), None  # type: ignore[no-untyped-call]


class _MatrixConv2d(nn.Conv2d):
    """The same weights under the same names, and the same result up to rounding."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        outputs, inputs = self.weight.shape[0], self.weight.shape[1]
        batch, _, height, width = input.shape
        pads, strides, kernel = self.padding, self.stride, self.kernel_size
        assert not isinstance(pads, str)
        high = (height + 2 * pads[0] - self.dilation[0] * (kernel[0] - 1) - 1) // strides[0] + 1
        wide = (width + 2 * pads[1] - self.dilation[1] * (kernel[1] - 1) - 1) // strides[1] + 1
        if kernel == (1, 1) and pads == (0, 0):
            columns = input[:, :, :: strides[0], :: strides[1]].reshape(batch, inputs, high * wide)
        else:
            window = _Window(kernel, self.dilation, pads, strides, (height, width))
            # (B, C, H, W) -> (B, C·k·k, H'·W')
            columns = _Unfold.apply(input, window)  # type: ignore[no-untyped-call]
        rows = self.weight.reshape(outputs, -1)
        result = rows @ columns
        if self.bias is not None:
            result = result + self.bias[:, None]
        return result.reshape(batch, outputs, high, wide)


def with_matrix_convolutions(learner: Learner) -> Learner:
    """Return a learner whose two-dimensional convolutions are matrix products; grouped and padded-by-content ones stay."""
    model = copy.deepcopy(learner.model)
    changed = False
    for module in model.modules():
        plain = type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
        if plain and not isinstance(module.padding, str):
            module.__class__ = _MatrixConv2d
            changed = True
    return learner.replace(model=model) if changed else learner


def quicker(learner: Learner, input_shape: tuple[int, ...]) -> Learner:
    """Return the learner as an attack should run it where its weights are."""
    on_gpu = any(weight.device.type == "cuda" for weight in learner.weights.values())  # a part of a network may have no weights
    pays = math.prod(input_shape[1:]) <= PIXELS or learner.parameters >= WEIGHTS
    return with_matrix_convolutions(learner) if on_gpu and pays else learner
