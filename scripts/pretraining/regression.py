"""Train the evaluation network: pictures with a known fraction of noise, and that fraction as the answer.

Departs from the paper (20 passes over Tiny-ImageNet, Adam at 1e-4, batches of 128, each mixed at 0, 0.1, ..., 1): half of the
ratios are continuous; batches are larger; the learning rate starts at 1e-3 and falls to zero along a cosine; and the pictures are
varied (`scripts.pretraining.variety`), because the network also judges X-rays, digits and smooth pictures. The loss, which the
paper does not state, is the cross-entropy with the ratio as a soft target: its best answer is the expected ratio, and unlike
the squared error it does not stall at the ends, where the sigmoid is flat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.networks.evaluation import EvaluationNetwork, mix
from gradveil.randomness import Seed
from scripts.pretraining.training import TrainingSettings, adam_tensors, restore_adam
from scripts.pretraining.variety import mixed_batch

__all__ = ["EvaluationTrainer", "PaperTrainer"]

WARM_UP = 100
GRID = 11


class EvaluationTrainer:
    """Steps of the evaluation network's training."""

    def __init__(self, network: EvaluationNetwork, pictures: Tensor, chances: Tensor, settings: TrainingSettings) -> None:
        """Move everything to the device.

        Args:
            network: Untrained.
            pictures: Bytes (N, C, side, side), best at twice the network's size.
            chances: How often each is drawn (N,).
            settings: Budget, seed and device.
        """
        self._settings = settings
        self._seed = Seed(settings.seed).child("evaluation")
        network.to(settings.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._network = network.train().requires_grad_(True)
        self._pictures, self._chances = pictures.to(settings.device), chances.to(settings.device)
        self._adam = torch.optim.Adam(self._network.parameters(), lr=settings.learning_rate)

    def step(self, index: int, done: float) -> dict[str, Tensor]:
        """Mix noise into a batch and learn its fraction."""
        settings = self._settings
        images, ratios = self._batch(index)
        for group in self._adam.param_groups:
            group["lr"] = settings.learning_rate * self._schedule(index, done)
        with torch.autocast(settings.device, dtype=torch.bfloat16, enabled=settings.device == "cuda"):
            logits = self._network.logits(images.contiguous(memory_format=torch.channels_last))
        # The targets' own entropy is taken off, so that a perfect network has loss zero.
        loss = F.binary_cross_entropy_with_logits(logits.float(), ratios) - _entropy(ratios)
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()
        return {"loss": loss.detach()}

    def _batch(self, index: int) -> tuple[Tensor, Tensor]:
        generator = self._seed.generator("step", round=index, device=self._settings.device)
        rows = torch.multinomial(self._chances, self._settings.batch, replacement=True, generator=generator)
        return mixed_batch(self._pictures[rows], self._network.size, generator)

    def _schedule(self, index: int, done: float) -> float:
        """Return the share of the learning rate: a short warm-up, then a cosine down to zero."""
        return min(1.0, (index + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * done))

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and Adam's memory."""
        return {f"network.{name}": value for name, value in self._network.state_dict().items()} | adam_tensors(self._adam, "adam")

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned."""
        prefix = "network."
        self._network.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        restore_adam(self._adam, "adam", tensors)

    def result(self) -> nn.Module:
        """Return the network on the CPU, in eval mode."""
        return self._network.cpu().eval().requires_grad_(False)


class PaperTrainer(EvaluationTrainer):
    """The paper's own training, to compare with: whole pictures, the grid of ratios, a constant learning rate.

    A batch is seen eleven times in a row, at the ratios 0, 0.1, ..., 1, before the next one is drawn. Pictures come at twice the
    network's size and are reduced to it.
    """

    def _batch(self, index: int) -> tuple[Tensor, Tensor]:
        device = self._settings.device
        drawn = self._seed.generator("batch", round=index // GRID, device=device)
        rows = torch.multinomial(self._chances, self._settings.batch, replacement=True, generator=drawn)
        images = F.avg_pool2d(self._pictures[rows].to(torch.float32) / 255, 2).expand(-1, 3, -1, -1)
        generator = self._seed.generator("step", round=index, device=device)
        noise = torch.rand(images.shape, generator=generator, device=device)
        ratios = torch.full((len(images),), index % GRID / (GRID - 1), device=device)
        return mix(images, noise, ratios), ratios

    def _schedule(self, index: int, done: float) -> float:
        return 1.0


def _entropy(ratios: Tensor) -> Tensor:
    return F.binary_cross_entropy(ratios, ratios)
