"""Distances of large updates with few passes over memory, for a GPU.

A step of an attack on ResNet-18 spent a quarter of its time on passes that are saved here, between two updates of eleven million
entries for each candidate: every square, product and sum that autograd writes out is a pass over a gigabyte. Here derivatives
are written down, norms are reduced without writing squares, and the one difference that the value needs is kept for the slope.

On a CPU the plain formulas stay: they sum in pairs, which is more exact there, and published figures were made with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["squared_distance", "unit_distance"]


def unit_distance(left: Sequence[Tensor], right: Sequence[Tensor], tiny: float) -> Tensor:
    """Return |s/|s| - o/|o||² / 2 over lists of tensors taken as one vector each; ``tiny`` is added to squared norms.

    With a = (|s|² + tiny)^-½, b likewise and d = s a - o b, the derivative in s is a d - a² <d, s a> s, and the inner product is
    L + tiny (b² - a²) / 2, where L is the value: the second term, nothing but for silent updates, is what |s a| lacks to one.
    """
    value: Tensor = _UnitDistance.apply(tiny, *left, *right)[0]  # type: ignore[no-untyped-call]
    return value


def squared_distance(left: Tensor, right: Tensor) -> Tensor:
    """Return |s - o|²."""
    value: Tensor = _SquaredDistance.apply(left, right)[0]  # type: ignore[no-untyped-call]
    return value


def _energy(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(value).square() for value in tensors]).sum()


class _UnitDistance(torch.autograd.Function):
    """Of ``(tiny, s_1, …, s_n, o_1, …, o_n)``: the value, then what the derivative needs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tiny: float, *both: Tensor) -> tuple[Tensor, ...]:
        left, right = both[: len(both) // 2], both[len(both) // 2 :]
        left_scale, right_scale = (_energy(left) + tiny).rsqrt(), (_energy(right) + tiny).rsqrt()
        apart = [torch.addcmul(o * -right_scale, s, left_scale) for s, o in zip(left, right, strict=True)]
        return (0.5 * _energy(apart), left_scale, right_scale, *apart)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.tiny, ctx.count = inputs[0], (len(inputs) - 1) // 2
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[1:], *output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        n = ctx.count
        left, right = ctx.saved_tensors[:n], ctx.saved_tensors[n : 2 * n]
        value, left_scale, right_scale, *apart = ctx.saved_tensors[2 * n :]
        wanted = ctx.needs_input_grad[1:]
        lacking = 0.5 * ctx.tiny * (right_scale.square() - left_scale.square())
        found: list[Tensor | None] = [None] * (2 * n)
        for i, d in enumerate(apart):
            if wanted[i]:
                found[i] = torch.addcmul(d * (slope * left_scale), left[i], -slope * left_scale.square() * (value + lacking))
            if wanted[n + i]:
                found[n + i] = torch.addcmul(
                    d * (-slope * right_scale), right[i], -slope * right_scale.square() * (value - lacking)
                )
        return (None, *found)


class _SquaredDistance(torch.autograd.Function):
    """The value, and the difference that its derivative needs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        apart = left - right
        return torch.linalg.vector_norm(apart).square(), apart

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (apart,) = ctx.saved_tensors
        towards = apart * (2 * slope)
        return towards, -towards if ctx.needs_input_grad[1] else None
