"""The shadow defense with faults of its released code, to be measured and rejected. None is registered.

Three things differ from `gradveil.defenses.shadow.defense`. Released noise is stacked over the channels on the last axis and then
*viewed* as channels first, so it does not lie where its pixel lies. The released momentum keeps a tenth of the old map where the
paper keeps nine tenths. And a mask that keeps the complement of the most salient pixels, as the released metrics do, takes noise
off the background instead of the foreground.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from gradveil.defenses.base import ClientView, State
from gradveil.defenses.shadow.defense import Shadow
from gradveil.defenses.shadow.noise import softmax_map
from gradveil.learning.learner import Learner
from gradveil.models.grad_cam import grad_cam_pp, top_share
from gradveil.records import Batch
from gradveil.tensors import Named

__all__ = ["ComplementShadow", "ReversedShadow", "ScatteredShadow", "scattered"]


def scattered(maps: Tensor, channels: int) -> Tensor:
    """Return maps (B, H, W) as the released code lays them out over channels (B, C, H, W): stacked last, then viewed as first."""
    count, height, width = maps.shape
    return maps.unsqueeze(-1).expand(-1, -1, -1, channels).reshape(count, channels, height, width)


@dataclass(frozen=True, kw_only=True)
class ScatteredShadow(Shadow):
    """Noise that does not lie on the pixel it was made for."""

    def noise(self, batch: Batch, view: ClientView, state: State) -> tuple[Tensor, State]:
        """Scatter the noise over rows and channels."""
        found, state = super().noise(batch, view, state)
        return scattered(found.squeeze(1), batch.inputs.shape[1]), state


@dataclass(frozen=True, kw_only=True)
class ReversedShadow(Shadow):
    """Keeps 1 - β of the old noise map instead of β."""

    def noise(self, batch: Batch, view: ClientView, state: State) -> tuple[Tensor, State]:
        """Run with the shares the wrong way round."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        turned = Shadow(**{**settings, "noise_momentum": 1 - self.noise_momentum})
        return turned.noise(batch, view, state)


@dataclass(frozen=True, kw_only=True)
class ComplementShadow(Shadow):
    """Takes noise off everything but the most salient pixels."""

    def _foreground(self, learner: Learner, gradient: Named, batch: Batch, handed: Named) -> Tensor:
        rate = learner.settings.learning_rate
        stepped = {name: value - rate * gradient[name] for name, value in learner.weights.items()}
        saliency = grad_cam_pp(lambda x: learner.logits(stepped, x, handed), learner.model, batch.inputs, batch.targets)
        return softmax_map((1 - top_share(saliency, self.foreground)) * saliency, self.temperature)
