"""What a federation adds to one client's update: running statistics of BatchNorm, a drift correction, and plain autograd.

An attacker replays a client through `Learner`, whose gradients can be mapped and differentiated again. An honest client needs
neither: `ClientLearner` computes the same gradients with plain autograd, which costs less, and lets BatchNorm layers keep their
running statistics on the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.adversary import prefixed, with_prefix
from gradveil.learning.learner import Learner
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.recording import Recorded
from gradveil.tensors import Named, detach

__all__ = ["ClientLearner", "LocalTraining", "RunningStatistics", "StepRecorder", "tracked_buffers"]

WEIGHT, BUFFER, NOISE, RUNNING = "weight|", "buffer|", "noise|", "running|"
MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """What a federation gives a client beside the weights.

    Attributes:
        correction: Added to the gradient of every local step, after the defense; SCAFFOLD's c - c_i.
        buffers: Running statistics to go on from, by name; empty tracks none.
        recorder: Steps of earlier clients, to be replayed on a GPU; None computes every step anew.
    """

    correction: Named | None = None
    buffers: Named = field(default_factory=dict)
    recorder: StepRecorder | None = None


def tracked_buffers(model: nn.Module) -> list[str]:
    """Return the names of the running statistics of a model, in the model's order."""
    layers = batch_norm_layers(model)
    tracked = {f"{name}.{kind}" for name in layers for kind in (MEAN, VARIANCE, COUNT)}
    return [name for name, _ in model.named_buffers() if name in tracked]


class RunningStatistics:
    """Follows the running mean and variance of BatchNorm layers, with torch's own arithmetic.

    The layers themselves run on the statistics of the batch and track nothing (`set_batch_norm_mode`), because tracking in place
    cannot be mapped or replayed. Here they are lent statistics to track, for the forward passes of training and no others.
    """

    def __init__(self, buffers: Named) -> None:
        """Start from the global statistics, which are not changed."""
        self.buffers = detach(buffers)

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Follow every forward pass of ``model`` inside the block."""
        layers = {name: layer for name, layer in batch_norm_layers(model).items() if f"{name}.{MEAN}" in self.buffers}
        try:
            for name, layer in layers.items():
                assert isinstance(layer, _BatchNorm)
                layer.training = layer.track_running_stats = True
                layer.running_mean, layer.running_var = self.buffers[f"{name}.{MEAN}"], self.buffers[f"{name}.{VARIANCE}"]
                layer.num_batches_tracked = self.buffers[f"{name}.{COUNT}"]
            yield
        finally:
            for layer in layers.values():
                assert isinstance(layer, _BatchNorm)
                layer.training = layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None


class StepRecorder:
    """Keeps the recorded steps of all clients of one federation: they share model, loss and most shapes.

    Last minibatches of uneven clients have shapes of their own, so a shape is recorded when it has been seen a few times, and the
    first few shapes only: every recording holds the weights and a gradient.
    """

    PATIENCE = 3
    MOST = 8

    def __init__(self, model: nn.Module) -> None:
        """Record nothing yet, and never a model whose BatchNorm counts its batches in Python."""
        self.steps: Recorded | None = None
        self._possible = all(getattr(layer, "momentum", 0.1) is not None for layer in batch_norm_layers(model).values())

    def __call__(self, learner: ClientLearner, given: Named) -> Named:
        """Return one step of ``learner``; all learners must be those of one federation."""
        if self._possible:
            self.steps = self.steps or Recorded(learner.bare().step, patience=self.PATIENCE, most=self.MOST)
            try:
                return self.steps(given)
            except torch.OutOfMemoryError:
                self._possible = False
            # Recordings keep their memory; without them the step may fit.
            self.steps.forget()
            torch.cuda.empty_cache()
        return learner.step(given)


@dataclass(frozen=True, eq=False)
class ClientLearner(Learner):
    """A learner that only trains: plain autograd, and running statistics where asked for.

    Attributes:
        tracker: Follows the forward passes of training, and no others.
        recorder: Where recorded steps are kept.
    """

    tracker: RunningStatistics | None = None
    recorder: StepRecorder | None = None

    @classmethod
    def from_learner(
        cls, learner: Learner, tracker: RunningStatistics | None, recorder: StepRecorder | None = None
    ) -> ClientLearner:
        """Return the same training as ``learner``, in one go."""
        own = {f.name: getattr(learner, f.name) for f in dataclasses.fields(Learner)}
        return cls(**own, tracker=tracker, recorder=recorder)

    def gradient(self, weights: Named, inputs: Tensor, targets: Tensor, noise: Named | None = None) -> Named:
        """Return the gradient of the batch loss with respect to the weights."""
        if self.per_example:  # called under vmap, where plain autograd cannot go
            return super().gradient(weights, inputs, targets, noise)
        given = with_prefix(weights, WEIGHT) | with_prefix(self.buffers, BUFFER)
        given |= with_prefix(self.noise_at(0) if noise is None else noise, NOISE)
        given |= with_prefix(self.tracker.buffers, RUNNING) if self.tracker else {}
        given |= {"inputs": inputs, "targets": targets}
        found = self.step(given) if self.recorder is None else self.recorder(self, given)
        if self.tracker:
            self.tracker.buffers = prefixed(found, RUNNING)
        return prefixed(found, WEIGHT)

    def bare(self) -> ClientLearner:
        """Return the same without a client's tensors: all that `step` needs."""
        tracker = RunningStatistics({}) if self.tracker else None
        return dataclasses.replace(self, weights={}, buffers={}, noise={}, running={}, tracker=tracker, recorder=None)

    def step(self, given: Named) -> Named:
        """Return the gradient and the running statistics after the step, as a function of nothing but what is given."""
        leaves = {name: value.detach().requires_grad_() for name, value in prefixed(given, WEIGHT).items()}
        tracker = RunningStatistics(prefixed(given, RUNNING))
        here = self.replace(buffers=prefixed(given, BUFFER))
        with torch.enable_grad(), tracker.watching(self.model) if self.tracker else contextlib.nullcontext():
            loss = here.objective(leaves, given["inputs"], given["targets"], prefixed(given, NOISE))
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return with_prefix(dict(zip(leaves, found, strict=True)), WEIGHT) | with_prefix(tracker.buffers, RUNNING)
