"""What a federation adds to one client's update: running statistics of BatchNorm, a drift correction, and plain autograd.

An attacker replays a client through `Learner`, whose gradients can be mapped and differentiated again. An honest client needs
neither: `ClientLearner` computes the same gradients with plain autograd, which is a quarter faster on a small ConvNet, and sees
the statistics of BatchNorm layers on the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.learning.learner import Learner
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.tensors import Named

__all__ = ["ClientLearner", "LocalTraining", "RunningStatistics", "tracked_buffers"]

MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """What the server sends to a client beside the weights.

    Attributes:
        correction: Added to the gradient of every local step, after the defense; SCAFFOLD's c - c_i.
        buffers: Running statistics to go on from, by name; empty tracks none.
    """

    correction: Named | None = None
    buffers: Named = field(default_factory=dict)


def tracked_buffers(model: nn.Module) -> list[str]:
    """Return the names of the running statistics of a model, in the model's order."""
    layers = batch_norm_layers(model)
    tracked = {f"{name}.{kind}" for name in layers for kind in (MEAN, VARIANCE, COUNT)}
    return [name for name, _ in model.named_buffers() if name in tracked]


class RunningStatistics:
    """Follows the running mean and variance of BatchNorm layers as torch does in training mode.

    The layers themselves run on the statistics of the batch and track nothing (`set_batch_norm_mode`), because tracking in place
    cannot be replayed. Here the same numbers are made from what enters each layer.
    """

    def __init__(self, buffers: Named) -> None:
        """Start from the global statistics, which are not changed."""
        self.buffers = dict(buffers)

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Follow every forward pass of ``model`` inside the block."""
        handles = [
            layer.register_forward_pre_hook(lambda module, inputs, name=name: self._follow(name, module, inputs[0]))
            for name, layer in batch_norm_layers(model).items()
            if f"{name}.{MEAN}" in self.buffers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _follow(self, name: str, layer: nn.Module, inputs: Tensor) -> None:
        assert isinstance(layer, _BatchNorm)
        axes = [axis for axis in range(inputs.ndim) if axis != 1]
        variance, mean = torch.var_mean(inputs, axes)  # unbiased, as torch keeps it
        count = self.buffers[f"{name}.{COUNT}"] + 1
        # Without a momentum torch keeps the plain average over all batches.
        share = layer.momentum if layer.momentum is not None else 1 / count
        for kind, value in ((MEAN, mean), (VARIANCE, variance)):
            before = self.buffers[f"{name}.{kind}"]
            self.buffers[f"{name}.{kind}"] = before + share * (value - before)
        self.buffers[f"{name}.{COUNT}"] = count


@dataclass(frozen=True, eq=False)
class ClientLearner(Learner):
    """A learner that only trains: plain autograd, and running statistics where asked for.

    Attributes:
        running: Follows the forward passes of training, and no others.
    """

    running: RunningStatistics | None = None

    @classmethod
    def from_learner(cls, learner: Learner, running: RunningStatistics | None) -> ClientLearner:
        """Return the same training as ``learner``, in one go."""
        return cls(**{f.name: getattr(learner, f.name) for f in dataclasses.fields(Learner)}, running=running)

    def gradient(self, weights: Named, inputs: Tensor, targets: Tensor, noise: Named | None = None) -> Named:
        """Return the gradient of the batch loss with respect to the weights."""
        if self.per_example:  # called under vmap, where plain autograd cannot go
            return super().gradient(weights, inputs, targets, noise)
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        with torch.enable_grad(), self.running.watching(self.model) if self.running else contextlib.nullcontext():
            loss = self.objective(leaves, inputs, targets, noise)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))
