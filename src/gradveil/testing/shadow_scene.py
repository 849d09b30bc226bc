"""A small generator on disk, and clients, for tests of the shadow defense."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.defenses.base import ClientView
from gradveil.defenses.shadow.defense import Shadow
from gradveil.learning.learner import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.networks.store import save_network
from gradveil.networks.style import StyleGenerator
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.study.local_training import TrainingSettings

__all__ = ["LATENT", "batch", "generator", "learner", "shadow", "view"]

WIDTHS = {4: 8, 8: 8, 16: 8, 32: 8, 64: 8}
LATENT = 8


@cache
def generator(channels: int = 3, *, grey: bool = False) -> str:
    """Return the path of an untrained generator of 32 pixels; ``grey`` gives one grey picture whatever its code."""
    network = StyleGenerator(32, channels, latent=LATENT, depth=2, widths=WIDTHS)
    if grey:
        for parameter in network.synthesis.parameters():
            parameter.data.zero_()
    name = "style-32" if channels == 3 else "style-32-grey"
    settings = {"latent": LATENT, "depth": 2, "widths": WIDTHS}
    path = Path(mkdtemp()) / "generator.safetensors"
    save_network(network, path, {"network": name, "settings": settings}, half=False)
    return str(path)


def shadow(channels: int = 3, **settings: Any) -> Shadow:
    """Return the defense with a small generator and few steps."""
    return Shadow(**{"generator": generator(channels), "latent_steps": 3, "fit_steps": 2, **settings})


class Net(nn.Module):
    """A small convolutional network, with BatchNorm on request; several outputs, or a map of them."""

    def __init__(self, channels: int = 3, classes: int = 4, *, norm: bool = False, maps: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.act = nn.ReLU()
        self.head: nn.Module = nn.Conv2d(6, 1, 1) if maps else nn.LazyLinear(classes)
        self.maps = maps

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.act(self.norm(self.conv(inputs)))
        out: Tensor = self.head(hidden if self.maps else hidden.mean((2, 3)))
        return out


def learner(
    size: int = 16, channels: int = 3, loss: Any = cross_entropy, *, norm: bool = False, maps: bool = False, **settings: Any
) -> Learner:
    """Return a learner of `Net` for images of ``size`` pixels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = Net(channels, norm=norm, maps=maps)
        net(torch.zeros(2, channels, size, size))
    return Learner.of(net, loss, TrainingSettings(**settings))


def batch(count: int = 3, size: int = 16, channels: int = 3, seed: int = 0, *, ids: bool = True) -> Batch:
    """Return smooth random images with labels."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand((count, channels, 4, 4), generator=generator)
    images = nn.functional.interpolate(small, size=(size, size), mode="bilinear").contiguous()
    names = tuple(f"record {index}" for index in range(count)) if ids else ()
    return Batch(images, torch.randint(4, (count,), generator=generator), names)


def view(own: Learner, round_index: int = 0, seed: int = 1) -> ClientView:
    """Return a client's view."""
    return ClientView(learner=own, seed=Seed(seed), round=round_index, weights=own.weights)
