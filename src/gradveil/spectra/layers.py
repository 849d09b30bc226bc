"""Linear and convolution layers as bilinear forms: from what they read and the derivative by what they write to their weights.

`gradveil.spectra.layered` sums over them; the formulas are told there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Call", "WeightLayer", "plain_layers"]


@dataclass(frozen=True)
class Call:
    """One call of a layer: what it read and δ at what it wrote, in the layer's own shapes."""

    read: Tensor
    delta: Tensor


class WeightLayer:
    """The bilinear form of one linear or convolution layer: columns of what it reads, and the maps L and Lᵀ."""

    def __init__(self, name: str, module: nn.Module, calls: list[Call]) -> None:
        """Unfold what each call read and wrote."""
        self.name, self.module, self.calls = name, module, calls
        self.bias = module.bias is not None
        self._reads = [self._with_one(self._columns(call.read.unsqueeze(0)), 1.0)[0] for call in calls]
        self._deltas = [self._places(call.delta.unsqueeze(0))[0] for call in calls]

    def double(self) -> WeightLayer:
        """Return the layer in double precision."""
        if self._reads[0].dtype == torch.float64:
            return self
        return WeightLayer(self.name, self.module, [Call(call.read.double(), call.delta.double()) for call in self.calls])

    @property
    def parameters(self) -> int:
        """Weights, with the bias."""
        return self._deltas[0].shape[1] * self._reads[0].shape[1]

    @property
    def places(self) -> int:
        """Places t, over all calls."""
        return sum(len(delta) for delta in self._deltas)

    @property
    def factors(self) -> int:
        """Entries of x_i."""
        return sum(call.read.numel() + call.delta.numel() for call in self.calls)

    def explicit(self, directions: int) -> bool:
        """Whether storing W_i takes fewer multiplications than x_i and LᵀL."""
        as_factors = self.factors * directions / 2 + 3 * self.parameters * self.places
        return self.parameters * directions / 2 + self.parameters * self.places <= as_factors

    def stack(self, reads: list[Tensor], deltas: list[Tensor]) -> Tensor:
        """Return x_i for a few directions, (n, factors), from the tangents of all calls."""
        pairs = zip(deltas, reads, strict=True)
        return torch.cat([part.reshape(len(part), -1) for pair in pairs for part in pair], dim=1)

    def to_weights(self, factors: Tensor) -> Tensor:
        """Return L x_i, (n, out, in), of a few directions."""
        total: Tensor | None = None
        parts = zip(self.calls, self._split(factors), self._reads, self._deltas, strict=True)
        for call, (delta, read), fixed_read, fixed_delta in parts:
            moved = self._places(delta).transpose(1, 2) @ fixed_read
            # Added in place: sums of late layers are the largest things here.
            if isinstance(self.module, nn.Linear) or read.device.type != "cpu":
                moved.baddbmm_(fixed_delta.T.expand(len(moved), -1, -1), self._with_one(self._columns(read), 0.0))
            else:
                (moved[..., :-1] if self.bias else moved).add_(self._correlated(call.delta, read))
            total = moved if total is None else total + moved
        assert total is not None
        return total

    def _correlated(self, delta: Tensor, read: Tensor) -> Tensor:
        """Return Σ_t δ_t ȧ_tᵀ, (n, out, in), of a convolution, as one convolution of ȧ with δ for its kernel.

        Unfolding ȧ would copy it once per value of the layer's kernel: on a CPU that took most of the time of K.
        """
        kernel, dilation, padding, stride = self._geometry()
        small, wide = self._picture(delta.unsqueeze(0)), self._picture(read)  # (B, out, h, w), (n·B, in, H, W)
        wide = wide.reshape(len(read), len(small), *wide.shape[1:]).transpose(1, 2)
        found = F.conv2d(wide.flatten(0, 1), small.transpose(0, 1), None, dilation, padding, stride)
        found = found[..., : kernel[0], : kernel[1]].reshape(len(read), wide.shape[1], small.shape[1], -1)
        return found.transpose(1, 2).flatten(2)

    def from_weights(self, weights: Tensor) -> Tensor:
        """Return Lᵀ W, (n, factors)."""
        parts = []
        for call, fixed_read, fixed_delta in zip(self.calls, self._reads, self._deltas, strict=True):
            at_delta = fixed_read @ weights.transpose(1, 2)  # (n, T, out)
            at_read = fixed_delta @ (weights[..., :-1] if self.bias else weights)  # (n, T, in)
            parts += [self._unplace(at_delta, call.delta), self._uncolumn(at_read, call.read)]
        return torch.cat([part.reshape(len(weights), -1) for part in parts], dim=1)

    def _split(self, factors: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for call in self.calls:
            middle, end = start + call.delta.numel(), start + call.delta.numel() + call.read.numel()
            delta, read = factors[:, start:middle], factors[:, middle:end]
            yield delta.reshape(-1, *call.delta.shape), read.reshape(-1, *call.read.shape)
            start = end

    def _with_one(self, columns: Tensor, value: float) -> Tensor:
        return F.pad(columns, (0, 1), value=value) if self.bias else columns

    def _columns(self, read: Tensor) -> Tensor:
        """Return what the layer reads at every place, (n, T, in)."""
        if isinstance(self.module, nn.Linear):
            return read.reshape(len(read), -1, read.shape[-1])
        return self._gather(F.unfold(self._picture(read), *self._geometry()), len(read))

    def _uncolumn(self, columns: Tensor, like: Tensor) -> Tensor:
        """Return the adjoint of `_columns`."""
        if isinstance(self.module, nn.Linear):
            return columns
        picture = self._picture(like.unsqueeze(0))
        places = columns.shape[1] // len(picture)
        spread = columns.reshape(-1, places, columns.shape[2]).transpose(1, 2)  # (n·B, in, T)
        return F.fold(spread, picture.shape[-2:], *self._geometry())

    def _places(self, delta: Tensor) -> Tensor:
        """Return δ at every place, (n, T, out)."""
        if isinstance(self.module, nn.Linear):
            return delta.reshape(len(delta), -1, delta.shape[-1])
        return self._gather(self._picture(delta).flatten(2), len(delta))

    def _unplace(self, places: Tensor, like: Tensor) -> Tensor:
        if isinstance(self.module, nn.Linear):
            return places
        pictures = len(self._picture(like.unsqueeze(0)))
        return places.reshape(len(places) * pictures, -1, places.shape[2]).transpose(1, 2)

    def _gather(self, spread: Tensor, directions: int) -> Tensor:
        """(n·B, C, T) -> (n, B·T, C)."""
        return spread.transpose(1, 2).reshape(directions, -1, spread.shape[1])

    def _picture(self, values: Tensor) -> Tensor:
        """(n, B, C, *space) -> (n·B, C, H, W); signals become pictures of height one."""
        assert isinstance(self.module, (nn.Conv1d, nn.Conv2d))
        flat = values.reshape(-1, *values.shape[2:])
        return flat.unsqueeze(2) if isinstance(self.module, nn.Conv1d) else flat

    def _geometry(self) -> tuple[Any, Any, Any, Any]:
        """Return kernel, dilation, padding and stride, as `F.unfold` takes them."""
        conv = self.module
        assert isinstance(conv, (nn.Conv1d, nn.Conv2d))
        told = (conv.kernel_size, conv.dilation, conv.padding, conv.stride)
        if isinstance(conv, nn.Conv2d):
            return told
        kernel, dilation, padding, stride = (int(each[0]) for each in told)
        return (1, kernel), (1, dilation), (0, padding), (1, stride)


def plain_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear and convolution layers whose parameters are theirs alone."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if name and _is_plain(module) and all(users[id(parameter)] == 1 for parameter in module.parameters())
    }


def _is_plain(module: nn.Module) -> bool:
    # Exact types: a subclass, as of a low-rank adapter, may compute something else.
    if type(module) is nn.Linear:
        return True
    if type(module) not in (nn.Conv1d, nn.Conv2d):
        return False
    assert isinstance(module, (nn.Conv1d, nn.Conv2d))
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
