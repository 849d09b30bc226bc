"""Small data and settings that train in well under a second."""

from __future__ import annotations

from typing import Any

import torch

from gradveil.data import Dataset
from gradveil.study.federation import FederationSettings

CLASSES = 3


def shapes(count: int, seed: int = 0, size: int = 8) -> Dataset:
    """Noisy pictures of three shapes: the upper half, the left half, the middle."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % CLASSES
    drawn, half, quarter = torch.zeros(CLASSES, 1, size, size), size // 2, size // 4
    drawn[0, :, :half], drawn[1, :, :, :half], drawn[2, :, quarter:-quarter, quarter:-quarter] = 1, 1, 1
    noise = torch.randn((count, 1, size, size), generator=generator)
    inputs = (0.25 + 0.5 * drawn[targets] + 0.1 * noise).clamp(0, 1)
    names = tuple(f"record {index}" for index in range(count))
    return Dataset("shapes", inputs, targets, CLASSES, ("upper", "left", "middle"), names)


def settings(**changes: Any) -> FederationSettings:
    """Four clients, two of them in each of three rounds, an MLP; ``changes`` win."""
    small: dict[str, Any] = {
        "model": "mlp(hidden=8)",
        "clients": 4,
        "clients_per_round": 2,
        "rounds": 3,
        "minibatch": 4,
        "learning_rate": 0.2,
    }
    return FederationSettings(**{**small, **changes})
