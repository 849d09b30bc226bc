"""Dropout as a function: masks come from outside, as random tensors that a learner is handed, one for every step and record.

A dropout layer draws from a global generator, which can neither be mapped nor replayed. Here each one multiplies by ``1 + n``,
where n is 0 in the mean: ``1/(1 - p) - 1`` where an entry is kept, with probability 1 - p, and -1 where it is dropped. So n is
noise like any other that a model draws: a client hands in what it drew, and whoever hands in none or zeros has the mean network,
which is the network with dropout off. Masks are buffers of the layers, so that names of weights and calls stay the same.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.errors import UsageError
from gradveil.learning.attention import plain_attention
from gradveil.tensors import Named

if TYPE_CHECKING:
    from gradveil.learning.learner import Learner

__all__ = ["HandedDropout", "draw_masks", "dropout_layers", "rewind", "with_dropout"]

MASK = "gradveil_mask_"
TINY = 1e-12
ENTRIES = (nn.Dropout,)
CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
PROBES = (2, 3)
"""Numbers of examples that are sent through a model to see which axis of a layer's input counts them."""


class HandedDropout(nn.Module):
    """Stands in for a dropout layer; one buffer for each time that a forward pass calls it.

    Attributes:
        p: Probability with which an entry is dropped.
        shapes: Shape of the mask of one example, call by call.
        axes: Axis of the input that counts examples, call by call.
    """

    def __init__(self, p: float, shapes: list[tuple[int, ...]], axes: list[int]) -> None:
        """Begin with dropout off."""
        super().__init__()
        self.p, self.shapes, self.axes = p, shapes, axes
        self.calls = 0
        for call in range(len(shapes)):
            self.register_buffer(f"{MASK}{call}", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``inputs * (1 + n)``."""
        call, self.calls = self.calls % len(self.shapes), self.calls + 1
        noise: Tensor = getattr(self, f"{MASK}{call}")
        if noise.ndim == 0:
            return inputs * (1 + noise)
        if noise.ndim > inputs.ndim:  # several rows of the input belong to one example
            noise = noise.flatten(0, 1)
        return inputs * (1 + noise.movedim(0, self.axes[call]))


def dropout_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the dropout layers that drop anything, by name; a layer under several names comes once."""
    return {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
    }


def rewind(model: nn.Module) -> None:
    """Let the next forward pass begin with the first mask of every layer, however the last one ended."""
    for layer in model.modules():
        if isinstance(layer, HandedDropout):
            layer.calls = 0


def with_dropout(learner: Learner, input_shape: tuple[int, ...]) -> Learner:
    """Return the learner with its dropout layers on; its noise has the shapes of their masks, for one step and one example.

    Args:
        learner: Its model is copied; none of its layers is on.
        input_shape: Of one input.

    Raises:
        UsageError: The model has no dropout layer, or one that cannot be handed its masks.
    """
    layers = dropout_layers(learner.model)
    if not layers:
        raise UsageError("dropout is true, and the model has no dropout layer, such as nn.Dropout; leave dropout out")
    for name, layer in layers.items():
        if type(layer) not in (*ENTRIES, *CHANNELS):
            raise UsageError(
                f"dropout is true, and layer {name!r} is {type(layer).__name__}; use nn.Dropout, or leave dropout out"
            )
    seen = _inputs_of_layers(learner, input_shape)
    model, added = copy.deepcopy(learner.model), dict[str, Tensor]()
    for name, calls in seen.items():
        layer = layers[name]
        assert isinstance(layer, nn.modules.dropout._DropoutNd)
        found = [_mask_of(name, shapes, whole=type(layer) in CHANNELS) for shapes in zip(*calls, strict=True)]
        handed = HandedDropout(layer.p, [shape for shape, _ in found], [axis for _, axis in found])
        _replace_everywhere(model, model.get_submodule(name), handed)
        added |= {f"{name}.{MASK}{call}": torch.zeros((1, 1, *shape)) for call, (shape, _) in enumerate(found)}
    reference = next(iter(learner.weights.values()))
    masks = {name: value.to(reference) for name, value in added.items()}
    buffers = {**learner.buffers, **{name: value.new_zeros(()) for name, value in masks.items()}}
    return learner.replace(model=model, buffers=buffers, noise={**learner.noise, **masks})


def draw_masks(learner: Learner, generator: torch.Generator) -> Named:
    """Return masks of the shapes in the learner's noise, as its client draws them: each step and record has its own."""
    drawn: Named = {}
    for name, like in learner.noise.items():
        layer = learner.model.get_submodule(name.rpartition(".")[0]) if name in learner.buffers else None
        if isinstance(layer, HandedDropout):
            kept = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype) >= layer.p
            drawn[name] = kept.to(like.dtype) / max(1 - layer.p, TINY) - 1
    return drawn


def _inputs_of_layers(learner: Learner, input_shape: tuple[int, ...]) -> dict[str, list[list[torch.Size]]]:
    """Return the shapes that reach every dropout layer, call by call, for each number of probes."""
    seen: dict[str, list[list[torch.Size]]] = {}
    reference = next(iter(learner.weights.values()))
    for place, count in enumerate(PROBES):
        handles = []
        for name, layer in dropout_layers(learner.model).items():
            calls = seen.setdefault(name, [[] for _ in PROBES])[place]
            handles.append(layer.register_forward_pre_hook(functools.partial(_note, calls)))
        try:
            with torch.no_grad(), plain_attention():
                inputs = reference.new_zeros((count, *input_shape))
                handed = learner.zero_noise(count)
                functional_call(learner.model, (learner.weights, learner.buffers), (inputs,), handed)
        finally:
            for handle in handles:
                handle.remove()
    return {name: calls for name, calls in seen.items() if calls[0]}


def _note(calls: list[torch.Size], _: nn.Module, handed: tuple[Any, ...]) -> None:
    calls.append(handed[0].shape)


def _mask_of(name: str, shapes: tuple[torch.Size, ...], *, whole: bool) -> tuple[tuple[int, ...], int]:
    """Return the shape of the mask of one example, and the axis that counts examples.

    Args:
        name: Of the layer.
        shapes: Of its input, for each number of probes.
        whole: Whether channels are dropped as wholes.
    """
    first, second = shapes
    axis = next((axis for axis in range(len(first)) if first[axis] != second[axis]), None)
    each = 0 if axis is None else first[axis] // PROBES[0]
    if axis is None or (first[axis], second[axis]) != (PROBES[0] * each, PROBES[1] * each) or (each > 1 and (axis or whole)):
        raise UsageError(
            f"dropout is true, and the records of a batch have no axis of their own where layer {name!r} drops; leave dropout out"
        )
    rest = [size for place, size in enumerate(first) if place != axis]
    rest = [*rest[:1], *[1] * len(rest[1:])] if whole else rest
    return (each, *rest) if each > 1 else tuple(rest), axis


def _replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new
