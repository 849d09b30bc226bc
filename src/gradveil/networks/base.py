"""The registry of networks: one entry per name, each a function that builds the untrained network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from gradveil.registry import Card, Registry

__all__ = ["NETWORKS", "Builder", "NetworkCard"]

Builder = Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class NetworkCard(Card):
    """What a network is and how it is trained.

    Attributes:
        family: How it is trained: ``evaluation`` (against known noise fractions) or ``generator`` (against a discriminator).
        size: Side of its pictures.
        channels: 1 for grey, 3 for colour.
        flip: Mirrored pictures are as good as the originals; not so for chest X-rays, where the heart has a side.
    """

    family: str
    size: int
    channels: int
    flip: bool = True


NETWORKS: Registry[Builder, NetworkCard] = Registry("network", home="gradveil.networks", hyphens=True)
