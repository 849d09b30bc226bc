"""What a federation adds to one client's update: running statistics of BatchNorm, a drift correction, and plain autograd.

An attacker replays a client through `Learner`, whose gradients can be mapped and differentiated again. An honest client needs
neither: `ClientLearner` computes the same gradients with plain autograd, which costs less, and lets BatchNorm layers keep their
running statistics on the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.adversary import prefixed
from gradveil.learning.learner import Learner
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.recording import Recorded
from gradveil.tensors import Named, detach

__all__ = ["ClientLearner", "LocalTraining", "RunningStatistics", "StepRecorder", "tracked_buffers"]

MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """What the server sends to a client beside the weights.

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

    Last minibatches of uneven clients have shapes of their own, so a shape is recorded when it has been seen a few times.
    """

    PATIENCE = 3

    def __init__(self) -> None:
        """Record nothing yet."""
        self._steps: Recorded | None = None
        self._fits = True

    def __call__(self, compute: Callable[[Named], Named], given: Named) -> Named:
        """Return ``compute(given)``; every caller's ``compute`` must be the same function of what it is given."""
        if self._fits:
            self._steps = self._steps or Recorded(compute, patience=self.PATIENCE)
            try:
                return self._steps(given)
            except torch.OutOfMemoryError:
                self._fits = False
            # Recordings keep their memory; without them the step may fit.
            self._steps.forget()
            torch.cuda.empty_cache()
        return compute(given)


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
        groups = {"weight": weights, "buffer": self.buffers, "noise": self.noise_at(0) if noise is None else noise}
        groups["running"] = self.tracker.buffers if self.tracker else {}
        given = {f"{group}|{name}": value for group, named in groups.items() for name, value in named.items()}
        given |= {"inputs": inputs, "targets": targets}
        found = self._step(given) if self.recorder is None else self.recorder(self._step, given)
        if self.tracker:
            self.tracker.buffers = prefixed(found, "running|")
        return prefixed(found, "weight|")

    def _step(self, given: Named) -> Named:
        """Return the gradient and the running statistics after the step, as a function of nothing but what is given."""
        leaves = {name: value.detach().requires_grad_() for name, value in prefixed(given, "weight|").items()}
        tracker = RunningStatistics(prefixed(given, "running|"))
        here = self.replace(buffers=prefixed(given, "buffer|"))
        with torch.enable_grad(), tracker.watching(self.model) if self.tracker else contextlib.nullcontext():
            loss = here.objective(leaves, given["inputs"], given["targets"], prefixed(given, "noise|"))
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        gradient = {f"weight|{name}": value for name, value in zip(leaves, found, strict=True)}
        return gradient | {f"running|{name}": value for name, value in tracker.buffers.items()}
