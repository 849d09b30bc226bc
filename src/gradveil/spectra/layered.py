"""The Gram matrix K = JᵀJ of a gradient, summed layer by layer, without forming the p × m Jacobian J.

The gradient of a layer's weight is Σ_t δ_t a_tᵀ over places t, with a_t what the layer reads there (and a 1 for its bias) and δ_t
the derivative of the loss by what it writes. Along input direction i it changes by

    W_i = Σ_t δ̇_ti a_tᵀ + δ_t ȧ_tiᵀ = L x_i,     x_i = (δ̇_i, ȧ_i),

so the layer's part of K is ⟨W_i, W_j⟩ = ⟨x_i, LᵀL x_j⟩. L and its adjoint are small products, x_i has T (C_in + C_out) entries,
and W_j is formed for a few j at a time only. Where that is no gain (early convolutions, with many places and few channels) W_i is
stored itself. Everything that is no plain linear or convolution layer (normalisation, tied and grouped weights) is stored by
columns of forward-mode products. Whatever a forward pass does with its weights outside the layers would be missed, so every
result is checked against ‖J v‖² = vᵀ K v for random v, where J v takes the ordinary road (`gradveil.spectra.spectrum`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from gradveil.spectra.jacobians import checked, guarded, load_forward_mode
from gradveil.spectra.joint import JointJacobian
from gradveil.spectra.layers import Call, WeightLayer, plain_layers
from gradveil.tensors import Named

__all__ = ["joint_push", "layer_of", "layered_blocks", "layered_bytes", "layered_grams"]

STORE_BYTES = 6 * 2**30
"""What may be kept of all directions at once; layers beyond it wait for another sweep over the directions."""
PANEL = 256
"""Rows of K per matrix product."""
SWEEP = {"cpu": 64, "cuda": 512}
"""Directions at once; on a CPU more makes buffers that are fetched from the system anew each time."""


Parts = tuple[list[Tensor], list[Tensor], Named]
"""δ and what is read, per call of a layer, and the gradient of other parameters."""


class _Probe:
    """A copy of the learner that tells what its layers read, and the derivative of the loss by what they write."""

    def __init__(self, joint: JointJacobian) -> None:
        first = joint.members[0]
        assert first.learner is not None and first.target is not None
        learner = first.learner
        model = copy.deepcopy(learner.model)
        self.learner = learner.replace(model=model)
        self.modules = plain_layers(model)
        own = {f"{name}.{part}" for name, module in self.modules.items() for part, _ in module.named_parameters()}
        self.others = {name: value for name, value in learner.weights.items() if name not in own}
        self._order: list[str] = []
        self._reads: list[Tensor] = []
        self._written: list[Tensor] = []
        self._added: list[Tensor] | None = None
        for name, module in self.modules.items():
            module.register_forward_hook(self._hook(name))
        self.records = [(member.at, member.target) for member in joint.members if member.target is not None]
        self.order = self._start(*self.records[0])

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], written: Tensor) -> Tensor:
            self._order.append(name)
            self._reads.append(arguments[0])
            if self._added is None:
                self._written.append(written)
                return written
            return written + self._added[len(self._order) - 1]

        return hook

    def _start(self, point: Tensor, target: Tensor) -> list[str]:
        """Run once, to learn which layers are called, in which order and with which shapes."""
        self.learner.objective(self.learner.weights, point.unsqueeze(0), target)
        self.zeros = [torch.zeros_like(written) for written in self._written]
        self._written = []
        return list(self._order)

    def _parts(self, point: Tensor, target: Tensor, others: tuple[str, ...]) -> Parts:
        """Return the parts of one record's gradient, as a function of the input."""

        def loss(added: list[Tensor], chosen: Named) -> tuple[Tensor, list[Tensor]]:
            self._order, self._reads, self._added = [], [], added
            try:
                value = self.learner.objective({**self.learner.weights, **chosen}, point.unsqueeze(0), target)
            finally:
                self._added = None
            return value, self._reads

        chosen = {name: self.others[name] for name in others}
        (deltas, gradient), reads = grad(loss, argnums=(0, 1), has_aux=True)(self.zeros, chosen)
        return list(deltas), list(reads), dict(gradient)

    def layers(self) -> list[dict[str, WeightLayer]]:
        """Return the layers at every record."""
        return [self._layers_at(*self._parts(point, target, ())[:2]) for point, target in self.records]

    def _layers_at(self, deltas: list[Tensor], reads: list[Tensor]) -> dict[str, WeightLayer]:
        return {
            name: WeightLayer(name, self.modules[name], [Call(reads[i], deltas[i]) for i in self.calls(name)])
            for name in dict.fromkeys(self.order)
        }

    def calls(self, name: str) -> list[int]:
        """Return which calls are those of a layer."""
        return [place for place, each in enumerate(self.order) if each == name]

    def moved(self, directions: Tensor, others: tuple[str, ...]) -> list[Parts]:
        """Return how the parts of each record change along directions (n, R or 1, m): per record, with n in front.

        Of one record nothing is mapped over records: on a CPU that would cost more than it gives.
        """
        count = len(self.records)
        alone, label = self.records[0]
        points = torch.stack([point for point, _ in self.records])
        targets = torch.stack([target for _, target in self.records])

        def along(direction: Tensor) -> Any:
            if count == 1:
                made: Any = jvp(lambda x: self._parts(x, label, others), (alone,), (direction.reshape(alone.shape),))
                return made[1]
            tangent = direction.expand(count, -1).reshape(points.shape)
            made = jvp(lambda x: vmap(lambda one, y: self._parts(one, y, others))(x, targets), (points,), (tangent,))
            return made[1]

        deltas, reads, gradient = vmap(along)(directions)
        if count == 1:
            return [(deltas, reads, gradient)]
        return [
            ([each[:, at] for each in deltas], [each[:, at] for each in reads], {name: g[:, at] for name, g in gradient.items()})
            for at in range(count)
        ]


def layered_grams(joint: JointJacobian, *, store_bytes: int = STORE_BYTES) -> Tensor:
    """Return K = JᵀJ of plain gradients, (R, m, m).

    Args:
        joint: Records with their learner.
        store_bytes: What may be kept of all directions at once.
    """
    load_forward_mode()
    return guarded(lambda: _grams(joint, _Probe(joint), store_bytes))


def layered_blocks(joint: JointJacobian, directions: Tensor, *, store_bytes: int = STORE_BYTES) -> Named:
    """Return D J_lᵀ J_l Dᵀ of one record for each layer l and directions D (n, m), as (n, n) in double precision.

    What is kept at once does not grow with the number of weights: layers that do not fit wait for another sweep.

    Args:
        joint: One record with its learner.
        directions: (n, m) rows.
        store_bytes: What may be kept of all directions at once.
    """
    load_forward_mode()
    return guarded(lambda: _blocks(joint, _Probe(joint), directions, store_bytes))


def layer_of(tensor: str) -> str:
    """Return the layer that a tensor of a release belongs to.

    >>> layer_of("block.conv1.weight"), layer_of("scale")
    ('block.conv1', 'scale')
    """
    return tensor.rpartition(".")[0] or tensor


def layered_bytes(joint: JointJacobian) -> int:
    """Return what is kept of all directions of one record where one sweep over them suffices."""
    probe = _Probe(joint)
    widths = _widths(probe, probe.layers()[0], joint.inputs)
    return sum(widths.values()) * joint.inputs * joint.at.element_size()


def joint_push(joint: JointJacobian) -> Callable[[Tensor], Tensor]:
    """Return the product J v of plain gradients, (R, n, m) -> (R, n, p), by layers.

    Forward mode through the whole gradient would differentiate each layer's weight gradient as a convolution of its own, one per
    direction. Here only δ̇ and ȧ go that way, as one batch; L then makes them into weights by matrix products: three times as fast
    for a ResNet-18 on a CPU. Whoever uses it checks it against `Jacobian.push`: weights used outside their layers are missed.
    """
    load_forward_mode()
    probe = guarded(lambda: _Probe(joint))
    weights, others, layers = probe.learner.weights, tuple(probe.others), guarded(probe.layers)

    def one(parts: Parts, own: dict[str, WeightLayer], count: int) -> Tensor:
        deltas, reads, gradient = parts
        made = {name: value.reshape(count, -1) for name, value in gradient.items()}
        for name, layer in own.items():
            rows = probe.calls(name)
            moved = layer.to_weights(layer.stack([reads[i] for i in rows], [deltas[i] for i in rows]))
            made[f"{name}.weight"] = (moved[..., :-1] if layer.bias else moved).reshape(count, -1)
            if layer.bias:
                made[f"{name}.bias"] = moved[..., -1]
        # A layer that is never called has no gradient to move.
        zeros = {name: joint.at.new_zeros((count, value.numel())) for name, value in weights.items() if name not in made}
        return torch.cat([(made | zeros)[name] for name in weights], dim=1)

    def push(directions: Tensor) -> Tensor:
        parts = guarded(lambda: probe.moved(directions.transpose(0, 1), others))
        count = directions.shape[1]
        # Laid out with directions in front, as products the other way want them: of millions of weights a copy would tell.
        rows = torch.stack([one(each, own, count) for each, own in zip(parts, layers, strict=True)], dim=1)
        return checked(rows).detach().transpose(0, 1)

    return push


def _widths(probe: _Probe, layers: dict[str, WeightLayer], size: int) -> dict[str, int]:
    """Return how many values are kept per direction, of each layer and of each other parameter."""
    widths = {name: layer.parameters if layer.explicit(size) else layer.factors for name, layer in layers.items()}
    return widths | {name: value.numel() for name, value in probe.others.items()}


def _grams(joint: JointJacobian, probe: _Probe, store_bytes: int) -> Tensor:
    size, count = joint.inputs, len(joint)
    layers = probe.layers()
    widths = _widths(probe, layers[0], size)
    # Tangents in single precision move singular values by about 1e-7 of the largest; sums of squares in single precision would
    # drown all below 1e-3 of it. So K is summed in double precision, whatever the tangents are in.
    grams = torch.zeros((count, size, size), dtype=torch.float64, device=joint.at.device)
    for group in _groups(widths, count * size * joint.at.element_size(), store_bytes):
        stores = _sweep(joint, probe, layers, group, widths)
        for name in group:
            store = stores.pop(name)
            for gram, rows, own in zip(grams, store, layers, strict=True):
                _add(gram, rows, own[name].double() if name in own else None, joint.room)
    return grams.tril_().add_(grams.tril(-1).mT)


def _blocks(joint: JointJacobian, probe: _Probe, directions: Tensor, store_bytes: int) -> Named:
    count, layers = len(directions), probe.layers()
    widths = _widths(probe, layers[0], count)
    found: Named = {}
    for group in _groups(widths, count * joint.at.element_size(), store_bytes):
        stores = _sweep(joint, probe, layers, group, widths, directions)
        for name in group:
            own = layers[0].get(name)
            gram = torch.zeros((count, count), dtype=torch.float64, device=joint.at.device)
            _add(gram, stores.pop(name)[0], None if own is None else own.double(), joint.room)
            block = name if own is not None else layer_of(name)
            found[block] = found.get(block, 0) + gram.tril_().add_(gram.tril(-1).mT)
    return found


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
    joint: JointJacobian,
    probe: _Probe,
    layers: list[dict[str, WeightLayer]],
    group: list[str],
    widths: dict[str, int],
    along: Tensor | None = None,
) -> dict[str, Tensor]:
    """Walk over all input directions, or those given, and keep, of every layer of the group, what its part of K is made of.

    Returns:
        Per layer (R, n, width), n the number of directions.
    """
    size, like = joint.inputs if along is None else len(along), joint.at
    others = tuple(name for name in group if name not in layers[0])
    stores = {name: like.new_empty((len(joint), size, widths[name])) for name in group}
    activity = sum(zero.numel() for zero in probe.zeros) + joint.inputs + sum(widths[name] for name in group)
    fitting = joint.room // (6 * activity * like.element_size() * len(joint))
    at_once = max(1, min(-(-SWEEP.get(like.device.type, SWEEP["cpu"]) // len(joint)), size, fitting))
    for start in range(0, size, at_once):
        stop = min(size, start + at_once)
        if along is None:
            directions = torch.zeros((stop - start, 1, size), dtype=like.dtype, device=like.device)
            directions[:, 0, start:stop].fill_diagonal_(1)
        else:
            directions = along[start:stop].to(like).unsqueeze(1)
        for at, (deltas, reads, gradient) in enumerate(probe.moved(directions, others)):
            for name, store in stores.items():
                if name in others:
                    store[at, start:stop] = gradient[name].reshape(stop - start, -1)
                    continue
                layer, calls = layers[at][name], probe.calls(name)
                factors = layer.stack([reads[i] for i in calls], [deltas[i] for i in calls])
                if widths[name] == factors.shape[1] and not layer.explicit(size):
                    store[at, start:stop] = factors
                else:
                    store[at, start:stop] = layer.to_weights(factors).reshape(stop - start, -1)
    for store in stores.values():
        checked(store)
    return stores


def _add(gram: Tensor, store: Tensor, layer: WeightLayer | None, working_bytes: int) -> None:
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
