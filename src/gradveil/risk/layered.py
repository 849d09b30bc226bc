"""The Gram matrix K = JᵀJ of a gradient, summed layer by layer, without forming the p × m Jacobian J.

The gradient of a layer's weight is Σ_t δ_t a_tᵀ over places t, with a_t what the layer reads there (and a 1 for its bias) and δ_t
the derivative of the loss by what it writes. Along input direction i it changes by

    W_i = Σ_t δ̇_ti a_tᵀ + δ_t ȧ_tiᵀ = L x_i,     x_i = (δ̇_i, ȧ_i),

so the layer's part of K is ⟨W_i, W_j⟩ = ⟨x_i, LᵀL x_j⟩. L and its adjoint are small products, x_i has T (C_in + C_out) entries,
and W_j is formed for a few j at a time only. Where that is no gain (early convolutions, with many places and few channels) W_i is
stored itself. Everything that is no plain linear or convolution layer (normalisation, tied and grouped weights) is stored by
columns of forward-mode products. Whatever a forward pass does with its weights outside the layers would be missed, so every
result is checked against ‖J v‖² = vᵀ K v for random v, where J v takes the ordinary road (`gradveil.risk.spectra`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from gradveil.learning.learner import Learner
from gradveil.risk.jacobians import Jacobian, checked, guarded, load_forward_mode
from gradveil.tensors import Named

__all__ = ["layered_gram", "layered_push"]

STORE_BYTES = 6 * 2**30
"""What may be kept of all directions at once; layers beyond it wait for another sweep over the directions."""
PANEL = 256
"""Rows of K per matrix product."""
SWEEP = {"cpu": 64, "cuda": 512}
"""Directions at once; on a CPU more makes buffers that are fetched from the system anew each time."""


@dataclass(frozen=True)
class _Call:
    """One call of a layer: what it read and δ at what it wrote, in the layer's own shapes."""

    read: Tensor
    delta: Tensor


class _Layer:
    """The bilinear form of one linear or convolution layer: columns of what it reads, and the maps L and Lᵀ."""

    def __init__(self, name: str, module: nn.Module, calls: list[_Call]) -> None:
        self.name, self.module, self.calls = name, module, calls
        self.bias = module.bias is not None
        self._reads = [self._with_one(self._columns(call.read.unsqueeze(0)), 1.0)[0] for call in calls]
        self._deltas = [self._places(call.delta.unsqueeze(0))[0] for call in calls]

    def double(self) -> _Layer:
        """Return the layer in double precision."""
        if self._reads[0].dtype == torch.float64:
            return self
        return _Layer(self.name, self.module, [_Call(call.read.double(), call.delta.double()) for call in self.calls])

    @property
    def parameters(self) -> int:
        return self._deltas[0].shape[1] * self._reads[0].shape[1]

    @property
    def places(self) -> int:
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


class _Probe:
    """A copy of the learner that tells what its layers read, and the derivative of the loss by what they write."""

    def __init__(self, learner: Learner, target: Tensor) -> None:
        model = copy.deepcopy(learner.model)
        self.learner, self.target = learner.replace(model=model), target
        self.modules = _plain_layers(model)
        own = {f"{name}.{part}" for name, module in self.modules.items() for part, _ in module.named_parameters()}
        self.others = {name: value for name, value in learner.weights.items() if name not in own}
        self._order: list[str] = []
        self._reads: list[Tensor] = []
        self._written: list[Tensor] = []
        self._added: list[Tensor] | None = None
        for name, module in self.modules.items():
            module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], written: Tensor) -> Tensor:
            self._order.append(name)
            self._reads.append(arguments[0])
            if self._added is None:
                self._written.append(written)
                return written
            return written + self._added[len(self._order) - 1]

        return hook

    def start(self, point: Tensor) -> list[str]:
        """Run once, to learn which layers are called, in which order and with which shapes."""
        self._order, self._reads, self._written = [], [], []
        self.learner.objective(self.learner.weights, point.unsqueeze(0), self.target)
        self.zeros = [torch.zeros_like(written) for written in self._written]
        self._written = []
        return list(self._order)

    def parts(self, point: Tensor, others: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor], Named]:
        """Return δ and what is read, per call, and the gradient of other parameters, as a function of the input."""

        def loss(added: list[Tensor], chosen: Named) -> tuple[Tensor, list[Tensor]]:
            self._order, self._reads, self._added = [], [], added
            try:
                value = self.learner.objective({**self.learner.weights, **chosen}, point.unsqueeze(0), self.target)
            finally:
                self._added = None
            return value, self._reads

        chosen = {name: self.others[name] for name in others}
        (deltas, gradient), reads = grad(loss, argnums=(0, 1), has_aux=True)(self.zeros, chosen)
        return list(deltas), list(reads), dict(gradient)


def _plain_layers(model: nn.Module) -> dict[str, nn.Module]:
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


def layered_gram(jacobian: Jacobian, *, store_bytes: int = STORE_BYTES) -> Tensor:
    """Return K = JᵀJ (m, m) of a plain gradient.

    Args:
        jacobian: With its learner.
        store_bytes: What may be kept of all directions at once.
    """
    assert jacobian.learner is not None and jacobian.target is not None
    load_forward_mode()
    probe = _Probe(jacobian.learner, jacobian.target)
    return guarded(lambda: _gram(jacobian, probe, store_bytes))


def layered_push(jacobian: Jacobian) -> Callable[[Tensor], Tensor]:
    """Return the product J v of a plain gradient, (n, m) -> (n, p), by layers.

    Forward mode through the whole gradient would differentiate each layer's weight gradient as a convolution of its own, one per
    direction. Here only δ̇ and ȧ go that way, as one batch; L then makes them into weights by matrix products: three times as fast
    for a ResNet-18 on a CPU. Whoever uses it checks it against `Jacobian.push`: weights used outside their layers are missed.
    """
    assert jacobian.learner is not None and jacobian.target is not None
    load_forward_mode()
    probe, point, weights = _Probe(jacobian.learner, jacobian.target), jacobian.at, jacobian.learner.weights
    order, others = guarded(lambda: probe.start(point)), tuple(probe.others)
    layers = guarded(lambda: _layers_of(probe, order, point))

    def along(direction: Tensor) -> Any:
        moved: Any = jvp(lambda x: probe.parts(x, others), (point,), (direction.reshape(point.shape),))
        return moved[1]

    def push(directions: Tensor) -> Tensor:
        deltas, reads, gradient = guarded(lambda: vmap(along)(directions))
        made = {name: value.reshape(len(directions), -1) for name, value in gradient.items()}
        for name, layer in layers.items():
            rows = [i for i, each in enumerate(order) if each == name]
            moved = layer.to_weights(layer.stack([reads[i] for i in rows], [deltas[i] for i in rows]))
            made[f"{name}.weight"] = (moved[..., :-1] if layer.bias else moved).reshape(len(directions), -1)
            if layer.bias:
                made[f"{name}.bias"] = moved[..., -1]
        # A layer that is never called has no gradient to move.
        zeros = {
            name: directions.new_zeros((len(directions), value.numel())) for name, value in weights.items() if name not in made
        }
        return checked(torch.cat([(made | zeros)[name] for name in weights], dim=1)).detach()

    return push


def _layers_of(probe: _Probe, order: list[str], point: Tensor) -> dict[str, _Layer]:
    deltas, reads, _ = probe.parts(point, ())
    return {
        name: _Layer(name, probe.modules[name], [_Call(reads[i], deltas[i]) for i, each in enumerate(order) if each == name])
        for name in dict.fromkeys(order)
    }


def _gram(jacobian: Jacobian, probe: _Probe, store_bytes: int) -> Tensor:
    point, size = jacobian.at, jacobian.inputs
    order = probe.start(point)
    layers = _layers_of(probe, order, point)
    widths = {name: layer.parameters if layer.explicit(size) else layer.factors for name, layer in layers.items()}
    widths |= {name: value.numel() for name, value in probe.others.items()}
    # Tangents in single precision move singular values by about 1e-7 of the largest; sums of squares in single precision would
    # drown all below 1e-3 of it. So K is summed in double precision, whatever the tangents are in.
    gram = torch.zeros((size, size), dtype=torch.float64, device=point.device)
    for group in _groups(widths, size * point.element_size(), store_bytes):
        stores = _sweep(jacobian, probe, order, {name: layers[name] for name in group if name in layers}, group, widths)
        for name in group:
            layer = layers.get(name)
            _add(gram, stores.pop(name), layer.double() if layer is not None else None, jacobian.room)
    return gram.tril() + gram.tril(-1).T


def _groups(widths: dict[str, int], bytes_each: int, most: int) -> Iterator[list[str]]:
    """Deal the layers into groups that fit; one that does not fit by itself stands alone."""
    group: list[str] = []
    taken = 0
    for name, width in widths.items():
        if group and taken + width * bytes_each > most:
            yield group
            group, taken = [], 0
        group.append(name)
        taken += width * bytes_each
    if group:
        yield group


def _sweep(
    jacobian: Jacobian, probe: _Probe, order: list[str], layers: dict[str, _Layer], group: list[str], widths: dict[str, int]
) -> dict[str, Tensor]:
    """Walk over all input directions and keep, of every layer of the group, what its part of K is made of."""
    point, size = jacobian.at, jacobian.inputs
    others = tuple(name for name in group if name not in layers)
    stores = {name: point.new_empty((size, widths[name])) for name in group}
    calls = {name: [i for i, each in enumerate(order) if each == name] for name in layers}

    def along(direction: Tensor) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]], Named]:
        moved: Any = jvp(lambda x: probe.parts(x, others), (point,), (direction.reshape(point.shape),))
        deltas, reads, gradient = moved[1]
        return (
            {name: [deltas[i] for i in rows] for name, rows in calls.items()},
            {name: [reads[i] for i in rows] for name, rows in calls.items()},
            gradient,
        )

    activity = sum(zero.numel() for zero in probe.zeros) + size + sum(widths[name] for name in group)
    at_once = max(
        1, min(SWEEP.get(point.device.type, SWEEP["cpu"]), size, jacobian.room // (6 * activity * point.element_size()))
    )
    for start in range(0, size, at_once):
        stop = min(size, start + at_once)
        directions = torch.zeros((stop - start, size), dtype=point.dtype, device=point.device)
        directions[:, start:stop].fill_diagonal_(1)
        deltas, reads, gradient = vmap(along)(directions)
        for name, store in stores.items():
            if name in others:
                store[start:stop] = gradient[name].reshape(stop - start, -1)
                continue
            factors = layers[name].stack(reads[name], deltas[name])
            if widths[name] == factors.shape[1] and not layers[name].explicit(size):
                store[start:stop] = factors
            else:
                store[start:stop] = layers[name].to_weights(factors).reshape(stop - start, -1)
    for store in stores.values():
        checked(store)
    return stores


def _add(gram: Tensor, store: Tensor, layer: _Layer | None, working_bytes: int) -> None:
    """Add a layer's part to the lower triangle of K, a panel of rows at a time."""
    size = len(gram)
    factored = layer is not None and not layer.explicit(size)
    wide = (layer.parameters if layer is not None and factored else 0) + store.shape[1]
    panel = max(1, min(PANEL, working_bytes // (2 * wide * gram.element_size())))
    for start in range(0, size, panel):
        stop = min(size, start + panel)
        rows = store[start:stop].to(gram.dtype)
        if factored:
            assert layer is not None
            rows = layer.from_weights(layer.to_weights(rows))
        # A store in single precision is widened a panel at a time: a whole copy would take twice its memory.
        step = stop if store.dtype == gram.dtype else panel
        for first in range(0, stop, step):
            last = min(stop, first + step)
            gram[start:stop, first:last].addmm_(rows, store[first:last].to(gram.dtype).T)
