"""Training losses: functions ``(outputs, targets) -> scalar``, averaged over the batch.

Targets may be class indices or, where an attacker optimises labels too, soft targets in the shape of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.errors import UsageError
from gradveil.registry import Card, Registry, import_object

__all__ = ["LOSSES", "Loss", "loss_by_name"]

Loss = Callable[[Any, Tensor], Tensor]

LOSSES: Registry[Loss, Card] = Registry("loss", "gradveil.learning.losses")


@LOSSES.register(Card(name="cross_entropy", summary="Softmax cross-entropy on class indices or class probabilities."))
def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of -log softmax(outputs)[target]."""
    if outputs.shape[1] == 1:
        raise UsageError(
            "cross-entropy compares classes and is always 0 for a single output; for masks choose the loss "
            "'binary_cross_entropy' or 'dice'"
        )
    if targets.is_floating_point():
        return -(targets * F.log_softmax(outputs, dim=1)).sum(1).mean()
    # One-hot rather than indexing: gather has no batching rule that torch.compile keeps fast on a CPU.
    picked = torch.arange(outputs.shape[1], device=outputs.device) == targets.unsqueeze(1)
    return -(picked * F.log_softmax(outputs, dim=1)).sum(1).mean()


@LOSSES.register(Card(name="mean_squared_error", summary="Squared distance of the outputs to real-valued targets."))
def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error; class indices are read as one-hot vectors."""
    if not targets.is_floating_point():
        targets = (torch.arange(outputs.shape[1], device=outputs.device) == targets.unsqueeze(1)).to(outputs)
    return (outputs - targets.reshape(outputs.shape)).square().mean()


@LOSSES.register(
    Card(name="binary_cross_entropy", summary="Sigmoid cross-entropy per output, for several labels at once or masks.")
)
def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the sigmoid cross-entropy; class indices are read as one-hot vectors."""
    if not targets.is_floating_point() and targets.shape != outputs.shape:
        targets = (torch.arange(outputs.shape[1], device=outputs.device) == targets.unsqueeze(1)).to(outputs)
    targets = targets.reshape(outputs.shape).to(outputs)
    return (F.softplus(outputs) - outputs * targets).mean()


@LOSSES.register(
    Card(
        name="dice",
        summary="One minus the soft overlap of predicted and true mask, 2|A∩B| / (|A| + |B|), example by example.",
        paper="Milletari, Navab and Ahmadi, V-Net: Fully Convolutional Neural Networks for Volumetric Medical Segmentation, 2016",
        url="https://arxiv.org/abs/1606.04797",
    )
)
def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over examples of 1 - (2 Σ p t + 1) / (Σ p + Σ t + 1), with p the sigmoid of the outputs.

    The ones keep two empty masks at zero loss and the derivative finite. Departs from the paper: sums of p and t, not of their
    squares, as is usual since.
    """
    if not targets.is_floating_point() and targets.shape != outputs.shape:
        targets = (torch.arange(outputs.shape[1], device=outputs.device) == targets.unsqueeze(1)).to(outputs)
    truth, predicted = targets.reshape(outputs.shape).to(outputs).flatten(1), outputs.sigmoid().flatten(1)
    overlap = (2 * (predicted * truth).sum(1) + 1) / (predicted.sum(1) + truth.sum(1) + 1)
    return (1 - overlap).mean()


def loss_by_name(name: str) -> Loss:
    """Return a registered loss, or import ``module:function``."""
    if ":" in name:
        loss: Loss = import_object(name)
        return loss
    return LOSSES.get(name)
