"""What running statistics of BatchNorm tell: the mean and variance of every layer's inputs over the client's batch.

A client that trains with the statistics of its batch also moves the running ones, and sends them: after one step

    new = (1 - m) old + m batch,        so        batch = old - (old - new) / m

for the mean and for the (unbiased) variance of each channel. After several steps it is a weighted mean over the steps. This file
holds both directions: what an attacker recovers from an upload, and the same numbers as a differentiable function of dummies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.errors import UsageError
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.tensors import Named

if TYPE_CHECKING:
    from gradveil.learning.learner import Learner

__all__ = [
    "MEAN",
    "VARIANCE",
    "batch_statistics",
    "blend",
    "check_statistics",
    "recover_statistics",
    "running_statistics",
    "statistics_distance",
]

MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"
TINY = 1e-12


def running_statistics(model: nn.Module) -> Named:
    """Return copies of the running statistics of a model, by the names of its buffers; empty where it has none."""
    found: Named = {}
    for name, layer in batch_norm_layers(model).items():
        for kind in (MEAN, VARIANCE, COUNT):
            value = getattr(layer, kind)
            if value is not None:
                found[f"{name}.{kind}"] = value.detach().clone()
    return found


def batch_statistics(learner: Learner, weights: Named, inputs: Tensor, noise: Named | None = None) -> Named:
    """Return mean and unbiased variance, per channel, of what enters each BatchNorm layer, by the names of the running ones.

    Functional, and safe under ``torch.func.vmap`` and ``grad``: a forward pass that listens.
    """
    found: Named = {}

    def listen(name: str) -> Any:
        def hook(_: nn.Module, handed: tuple[Tensor, ...]) -> None:
            features = handed[0]
            axes = [axis for axis in range(features.ndim) if axis != 1]
            count = features.numel() // features.shape[1]
            mean = features.mean(axes)
            shaped = mean.reshape(1, -1, *[1] * (features.ndim - 2))
            found[f"{name}.{MEAN}"] = mean
            # Divided by n - 1, as torch does for the running variance.
            found[f"{name}.{VARIANCE}"] = (features - shaped).square().sum(axes) / max(count - 1, 1)

        return hook

    handles = [layer.register_forward_pre_hook(listen(name)) for name, layer in batch_norm_layers(learner.model).items()]
    try:
        learner.forward(weights, inputs, noise)
    finally:
        for handle in handles:
            handle.remove()
    return found


def check_statistics(learner: Learner, input_shape: tuple[int, ...], sizes: Sequence[int]) -> None:
    """Refuse a training in which BatchNorm would normalise a channel by a single value, which has no variance.

    Args:
        learner: Its settings say which statistics are used.
        input_shape: Of one input.
        sizes: Records in each local step.
    """
    layers = batch_norm_layers(learner.model) if learner.settings.batch_norm == "train" else {}
    if not layers or min(sizes) > 1:
        return
    counts: dict[str, int] = {}

    def listen(name: str) -> Any:
        def hook(_: nn.Module, handed: tuple[Tensor, ...]) -> None:
            counts[name] = handed[0].numel() // handed[0].shape[1] // 2

        return hook

    handles = [layer.register_forward_pre_hook(listen(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            reference = next(iter(learner.weights.values()))
            learner.forward(learner.weights, reference.new_zeros((2, *input_shape)), learner.zero_noise(2))
    finally:
        for handle in handles:
            handle.remove()
    alone = next((name for name, count in counts.items() if count == 1), None)
    if alone is not None:
        last = "the last minibatch holds" if len(set(sizes)) > 1 else "a local step takes"
        raise UsageError(
            f"{last} one record, and BatchNorm layer {alone!r} in train mode would have one value per channel; choose a "
            "minibatch that leaves at least two records, set batch_norm = 'eval', or use a model with GroupNorm"
        )


def _factors(learner: Learner, layer: str, steps: int) -> list[float]:
    """Return how much of each step's statistics goes into the running ones at that step."""
    module = batch_norm_layers(learner.model)[layer]
    assert isinstance(module, _BatchNorm)
    if module.momentum is not None:
        return [float(module.momentum)] * steps
    seen = learner.running.get(f"{layer}.{COUNT}")
    before = 0 if seen is None else int(seen)
    return [1 / (before + step + 1) for step in range(steps)]


def _weights(factors: Sequence[float]) -> list[float]:
    """Return the weight of every step in the running statistics after the last."""
    weights, left = [], 1.0
    for factor in reversed(factors):
        weights.append(left * factor)
        left *= 1 - factor
    return weights[::-1]


def blend(learner: Learner, steps: Sequence[Named]) -> Named:
    """Return the mean over local steps in which statistics arrive: weighted as the running ones weigh them."""
    if len(steps) == 1:
        return dict(steps[0])
    found: Named = {}
    for name in steps[0]:
        shares = _weights(_factors(learner, name.rpartition(".")[0], len(steps)))
        parts = [share * each[name] for share, each in zip(shares, steps, strict=True)]
        found[name] = torch.stack(parts).sum(0) / sum(shares)
    return found


def recover_statistics(learner: Learner, sent: Mapping[str, Tensor], examples: int) -> Named:
    """Return the statistics of the batch behind an upload, exactly: its mean over local steps, in the weights of `blend`.

    Args:
        learner: The client's training; its running statistics are those the client started from.
        sent: The upload's buffers, in gradient sign: old minus new.
        examples: Behind the upload of one client.
    """
    steps = 1 if learner.settings.shares == "gradient" else learner.settings.steps(examples)
    found: Named = {}
    for name, moved in sent.items():
        if name in learner.running and not name.endswith(COUNT):
            total = sum(_weights(_factors(learner, name.rpartition(".")[0], steps)))
            found[name] = learner.running[name] - moved / total
    return found


def statistics_distance(simulated: Named, observed: Named) -> Tensor:
    """Return how far statistics are apart: the mean over layers, in units of each layer's own variance; zero at the truth.

    Per layer and channel the squared differences of means and of standard deviations, over the layer's mean variance. Papers sum
    un-squared norms instead, whose slope does not vanish at the truth and whose size follows the widest layer.
    """
    terms = []
    for name, mean in simulated.items():
        if not name.endswith(MEAN) or name not in observed:
            continue
        other = name.removesuffix(MEAN) + VARIANCE
        unit = observed[other].clamp_min(0).mean() + TINY
        spread = (simulated[other] + TINY).sqrt() - (observed[other].clamp_min(0) + TINY).sqrt()
        terms.append(((mean - observed[name]).square().mean() + spread.square().mean()) / unit)
    return torch.stack(terms).mean()
