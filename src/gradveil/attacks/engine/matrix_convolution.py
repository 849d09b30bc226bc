"""Make convolutions of the attacker's copy fast for many candidates at once.

Mapped over candidates, the weight gradient of a convolution and everything derived from it become convolutions with one
group per candidate, which libraries run far below the speed of the machine. Here a convolution is the trilinear form
<s, x * w> of inputs x, weights w and slopes s of the result: its three partial derivatives are the result, the slope of the
inputs and the gradient of the weights, and every derivative of these is one of the three again. So each is written once,
with candidates as groups: by the library where all candidates share the weights, by unfolding and one batched matrix product
where each has its own, as in the second derivative and after a local step. On a GPU that is faster than torch's
convolutions for every network measured, and slower on a CPU; see docs/measurements.md.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from gradveil.learning.learner import Learner

__all__ = ["quicker", "with_matrix_convolutions"]

PIXELS = 64 * 64
"""Largest pictures for which it pays whatever the network: columns take as many times their memory as a kernel has entries."""
WEIGHTS = 2_000_000
"""Weights from which the gradients outweigh the columns."""


@dataclass(frozen=True)
class _Walk:
    """How a convolution walks over a picture."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    picture: tuple[int, int]

    @property
    def places(self) -> tuple[int, int]:
        """Height and width of the result."""
        sides = zip(self.picture, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        high, wide = ((size + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for size, pad, dilation, k, stride in sides)
        return high, wide

    def columns(self, inputs: Tensor) -> Tensor:
        """Return what every place sees, by one strided copy: torch's unfolding is launched once per picture."""
        groups, _, channels = inputs.shape[:3]
        (down, right), size = self.padding, math.prod(self.kernel)
        seen = F.pad(inputs, (right, right, down, down)) if down or right else inputs
        for axis in (0, 1):
            span = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            seen = seen.unfold(3 + axis, span, self.stride[axis])  # one window axis at the end for each
        seen = seen[..., :: self.dilation[0], :: self.dilation[1]]
        # (G, B, C, H', W', k, k) -> (G, C·k·k, B·H'·W')
        return seen.permute(0, 2, 5, 6, 1, 3, 4).reshape(groups, channels * size, -1)

    def pictures(self, columns: Tensor, batch: int) -> Tensor:
        """Return the transpose of `columns`: every entry is added where it came from."""
        groups, rows = columns.shape[:2]
        apart = columns.reshape(groups, rows, batch, -1).transpose(1, 2).flatten(0, 1)
        return _apart(F.fold(apart, self.picture, self.kernel, self.dilation, self.padding, self.stride), groups)


def _by_library(weights: Tensor) -> bool:
    """Whether the candidates share the weights; in double precision, where libraries are slow, matrix products do it all."""
    return weights.shape[0] == 1 and weights.dtype != torch.float64


def _apart(together: Tensor, groups: int) -> Tensor:
    """(G·B, …) -> (G, B, …)."""
    return together.reshape(groups, -1, *together.shape[1:])


def _rows(slopes: Tensor) -> Tensor:
    """(G, B, O, H', W') -> (G, O, B·H'·W')."""
    return slopes.transpose(1, 2).flatten(3).flatten(2)


def _result(inputs: Tensor, weights: Tensor, walk: _Walk) -> Tensor:
    """(G, B, C, H, W), (G or 1, O, C, k, k) -> (G, B, O, H', W')."""
    groups, batch = inputs.shape[:2]
    if _by_library(weights):
        together = F.conv2d(inputs.flatten(0, 1), weights[0], None, walk.stride, walk.padding, walk.dilation)
        return _apart(together, groups)
    product = weights.flatten(2) @ walk.columns(inputs)
    return product.reshape(groups, -1, batch, *walk.places).transpose(1, 2)


def _slope(slopes: Tensor, weights: Tensor, walk: _Walk) -> Tensor:
    """(G, B, O, H', W'), (G or 1, O, C, k, k) -> (G, B, C, H, W)."""
    groups, batch = slopes.shape[:2]
    if _by_library(weights):
        shape = (groups * batch, weights.shape[2], *walk.picture)
        together = conv2d_input(shape, weights[0], slopes.flatten(0, 1), walk.stride, walk.padding, walk.dilation)
        return _apart(together, groups)
    return walk.pictures(weights.flatten(2).mT @ _rows(slopes), batch)


def _gradient(inputs: Tensor, slopes: Tensor, walk: _Walk) -> Tensor:
    """(G, B, C, H, W), (G, B, O, H', W') -> (G, O, C, k, k)."""
    product = _rows(slopes) @ walk.columns(inputs).mT
    return product.reshape(*product.shape[:2], inputs.shape[2], *walk.kernel)


class _Trilinear(torch.autograd.Function):
    """What the three have in common: two tensors with groups in front, the walk, and candidates that become groups."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.walk = inputs[2]

    @classmethod
    def vmap(cls, info: Any, where: tuple[int | None, ...], left: Tensor, right: Tensor, walk: _Walk) -> tuple[Tensor, int]:
        """Fold the mapped axis into the groups; weights that nothing maps and that have one group stay shared."""
        many = info.batch_size
        both = []
        for tensor, axis, may_share in ((left, where[0], False), (right, where[1], cls.shares)):
            if axis is not None:
                both.append(tensor.movedim(axis, 0).flatten(0, 1))
            else:
                shared = may_share and tensor.shape[0] == 1
                both.append(tensor if shared else tensor.expand(many, *tensor.shape).flatten(0, 1))
        return cls.apply(*both, walk).unflatten(0, (many, -1)), 0  # type: ignore[no-untyped-call]

    shares = True


class _Result(_Trilinear):
    """The convolution of inputs with weights."""

    @staticmethod
    def forward(inputs: Tensor, weights: Tensor, walk: _Walk) -> Tensor:
        return _result(inputs, weights, walk)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
        inputs, weights = ctx.saved_tensors
        return _derivatives(ctx, _Slope, slopes, weights, (inputs, slopes))


class _Slope(_Trilinear):
    """The slope of the inputs."""

    @staticmethod
    def forward(slopes: Tensor, weights: Tensor, walk: _Walk) -> Tensor:
        return _slope(slopes, weights, walk)

    @staticmethod
    def backward(ctx: Any, towards: Tensor) -> tuple[Any, ...]:
        slopes, weights = ctx.saved_tensors
        return _derivatives(ctx, _Result, towards, weights, (towards, slopes))


class _Gradient(_Trilinear):
    """The gradient of the weights."""

    shares = False

    @staticmethod
    def forward(inputs: Tensor, slopes: Tensor, walk: _Walk) -> Tensor:
        return _gradient(inputs, slopes, walk)

    @staticmethod
    def backward(ctx: Any, towards: Tensor) -> tuple[Any, ...]:
        inputs, slopes = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _Slope.apply(slopes, towards, ctx.walk) if wanted[0] else None,  # type: ignore[no-untyped-call]
            _Result.apply(inputs, towards, ctx.walk) if wanted[1] else None,  # type: ignore[no-untyped-call]
            None,
        )


def _derivatives(
    ctx: Any, partner: type[_Trilinear], towards: Tensor, weights: Tensor, pair: tuple[Tensor, Tensor]
) -> tuple[Any, ...]:
    """Return the derivatives of the result or the slope, each other's partners, in their first tensor and in the weights.

    Where groups share the weights, all groups are one batch to the gradient.
    """
    wanted = ctx.needs_input_grad
    if wanted[1] and weights.shape[0] < pair[0].shape[0]:
        pair = pair[0].flatten(0, 1).unsqueeze(0), pair[1].flatten(0, 1).unsqueeze(0)
    return (
        partner.apply(towards, weights, ctx.walk) if wanted[0] else None,  # type: ignore[no-untyped-call]
        _Gradient.apply(*pair, ctx.walk) if wanted[1] else None,  # type: ignore[no-untyped-call]
        None,
    )


class _MatrixConv2d(nn.Conv2d):
    """The same weights under the same names, and the same result up to rounding."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        assert not isinstance(self.padding, str)
        height, width = input.shape[-2:]
        walk = _Walk(self.kernel_size, self.stride, self.padding, self.dilation, (height, width))
        result: Tensor = _Result.apply(input.unsqueeze(0), self.weight.unsqueeze(0), walk).squeeze(0)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias[:, None, None]


def with_matrix_convolutions(learner: Learner) -> Learner:
    """Return a learner whose two-dimensional convolutions are as above; grouped and padded-by-content ones stay."""
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
