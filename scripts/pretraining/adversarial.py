"""Train a generator against a discriminator: non-saturating loss, R1 penalty, averaged weights.

Both losses are the softplus of the score (Goodfellow et al. 2014); R1 (Mescheder et al. 2018) penalises the discriminator's
gradient at the data, every sixteenth step with sixteenfold weight; what is kept is a running average of the generator's weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.randomness import Seed
from scripts.pretraining.augment import augment
from scripts.pretraining.discriminator import Discriminator
from scripts.pretraining.training import TrainingSettings, adam_tensors, restore_adam

__all__ = ["AdversarialRecipe", "AdversarialTrainer"]

R1_EVERY = 16
HALF_LIFE = 10_000
"""Pictures after which a weight counts half in the average; shorter while the training is young."""

SETTLE_BATCHES = 50


@dataclass(frozen=True, kw_only=True)
class AdversarialRecipe:
    """What differs between generators.

    Attributes:
        betas: Of both Adams.
        penalty: Weight of R1.
        generator_rate: The generator's learning rate by the discriminator's. The style generator has equalised layers as the
            discriminator has; plain layers need less.
        flip: Mirror the pictures of the data half of the time.
        widths: Kernels of the discriminator at each size; None is as many as the style generator has.
    """

    betas: tuple[float, float] = (0.0, 0.99)
    penalty: float = 0.05
    generator_rate: float = 1.0
    flip: bool = True
    widths: dict[int, int] | None = None


class AdversarialTrainer:
    """Steps of a generator's training; the generator has ``latent``, ``size`` and ``channels``."""

    def __init__(
        self, network: nn.Module, pictures: Tensor, chances: Tensor, settings: TrainingSettings, recipe: AdversarialRecipe
    ) -> None:
        """Move everything to the device and make the discriminator.

        Args:
            network: Untrained generator.
            pictures: Bytes (N, C, size, size).
            chances: How often each is drawn (N,).
            settings: Budget, seed and device.
            recipe: What suits this generator.
        """
        self._settings, self._recipe = settings, recipe
        self._seed = Seed(settings.seed).child("adversarial")
        self._latent = int(network.latent)  # type: ignore[arg-type]
        opponent = Discriminator(
            int(network.size),  # type: ignore[arg-type]
            int(network.channels),  # type: ignore[arg-type]
            recipe.widths,
            generator=self._seed.generator("discriminator"),
        )
        self._network = _move(network, settings.device).train().requires_grad_(True)
        self._opponent = _move(opponent, settings.device)
        self._average = copy.deepcopy(self._network).requires_grad_(False)
        self._pictures, self._chances = pictures.to(settings.device), chances.to(settings.device)
        self._adams = [
            torch.optim.Adam(each.parameters(), lr=settings.learning_rate, betas=recipe.betas, fused=settings.device == "cuda")
            for each in (self._network, self._opponent)
        ]

    def step(self, index: int, done: float) -> dict[str, Tensor]:
        """Teach the discriminator once and the generator once."""
        generator = self._seed.generator("step", round=index, device=self._settings.device)
        # Constant, then down to a tenth in the last quarter, where the average settles.
        rate = self._settings.learning_rate * min(1.0, 0.1 + 3.6 * (1 - done))
        for adam, ratio in zip(self._adams, (self._recipe.generator_rate, 1.0), strict=True):
            for group in adam.param_groups:
                group["lr"] = rate * ratio
        opponent_loss = self._teach_opponent(index, generator)
        generator_loss = self._teach_generator(generator)
        self._follow(index)
        return {"discriminator": opponent_loss, "generator": generator_loss}

    def _draw(self, generator: torch.Generator) -> Tensor:
        rows = torch.multinomial(self._chances, self._settings.batch, replacement=True, generator=generator)
        images = self._pictures[rows].to(torch.float32) / 255
        if self._recipe.flip:
            turned = torch.rand((len(images), 1, 1, 1), generator=generator, device=images.device) < 0.5
            images = torch.where(turned, images.flip(3), images)
        return images.contiguous(memory_format=torch.channels_last)

    def _codes(self, generator: torch.Generator) -> Tensor:
        return torch.randn((self._settings.batch, self._latent), generator=generator, device=self._settings.device)

    def _scores(self, images: Tensor) -> Tensor:
        """Judge pictures, on a GPU in bfloat16: it halves the traffic, and real and generated pictures are rounded alike."""
        with torch.autocast(self._settings.device, dtype=torch.bfloat16, enabled=self._settings.device == "cuda"):
            scores: Tensor = self._opponent(images)
        return scores.float()

    def _teach_opponent(self, index: int, generator: torch.Generator) -> Tensor:
        self._opponent.requires_grad_(True)
        real = self._draw(generator)
        with torch.no_grad():
            fake = self._network(self._codes(generator))
        loss = F.softplus(-self._scores(augment(real, generator))).mean()
        loss = loss + F.softplus(self._scores(augment(fake, generator))).mean()
        told = loss.detach()
        if index % R1_EVERY == 0:
            real = real.requires_grad_(True)
            scores = self._opponent(augment(real, generator)).sum()
            (slope,) = torch.autograd.grad(scores, real, create_graph=True)
            loss = loss + 0.5 * self._recipe.penalty * R1_EVERY * slope.square().sum((1, 2, 3)).mean()
        self._adams[1].zero_grad()
        loss.backward()
        self._adams[1].step()
        return told

    def _teach_generator(self, generator: torch.Generator) -> Tensor:
        self._opponent.requires_grad_(False)
        fake = self._network(self._codes(generator))
        loss = F.softplus(-self._scores(augment(fake, generator))).mean()
        self._adams[0].zero_grad()
        loss.backward()
        self._adams[0].step()
        return loss.detach()

    def _follow(self, index: int) -> None:
        """Move the average towards the generator."""
        seen = (index + 1) * self._settings.batch
        share = 1 - 0.5 ** (self._settings.batch / min(HALF_LIFE, 0.05 * seen + 1))
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.parameters()), list(self._network.parameters()), share)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of all three networks and both Adams' memories."""
        named = {"network": self._network, "opponent": self._opponent, "average": self._average}
        found = {f"{part}.{name}": value for part, net in named.items() for name, value in net.state_dict().items()}
        return found | adam_tensors(self._adams[0], "adam0") | adam_tensors(self._adams[1], "adam1")

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned."""
        for part, net in (("network", self._network), ("opponent", self._opponent), ("average", self._average)):
            start = f"{part}."
            net.load_state_dict({k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)})
        restore_adam(self._adams[0], "adam0", tensors)
        restore_adam(self._adams[1], "adam1", tensors)

    def result(self) -> nn.Module:
        """Return the averaged generator on the CPU, in eval mode; BatchNorm's statistics are taken anew for the average."""
        norms = [layer for layer in self._average.modules() if isinstance(layer, nn.BatchNorm2d)]
        if norms:
            for layer in norms:
                layer.reset_running_stats()
                layer.momentum = None
            generator = self._seed.generator("statistics", device=self._settings.device)
            with torch.no_grad():
                for _ in range(SETTLE_BATCHES):
                    self._average.train()(self._codes(generator))
        return self._average.cpu().eval()


def _move(network: nn.Module, device: str) -> nn.Module:
    return network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
