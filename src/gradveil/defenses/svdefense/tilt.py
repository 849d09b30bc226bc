"""How the hardened SVDefense disturbs what it sends, as client and attacker both know it."""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch import Tensor

from gradveil.defenses.svdefense.truncation import Truncation

__all__ = ["EXACT_ENTROPY", "LEFT_SHARE", "left_is_known", "tilted"]

EXACT_ENTROPY = 1e-9
"""Below it a spectrum has one value: the rest holds less than about 1e-10 of the energy, as rounding to single precision does."""
LEFT_SHARE = 0.1
"""Squared tilt of the left vectors in the hardened defense, in units of that of the right ones.

They hold few numbers, so a little noise hides them, and it costs more there: one number moves a whole row. On writers' digits at
the same total error of 2 equal tilts cost 2.4 points of accuracy (three seeds), a tenth 2.1 and a fiftieth 1.0 (six seeds).
"""


def left_is_known(name: str, rows: int, entropy: float, others: Container[str]) -> bool:
    """Tell whether nothing is hidden by tilting the left vectors of a matrix.

    With one direction they are a multiple of the slope behind the layer, which its bias tells for one example; one row has no
    other direction.
    """
    bias = f"{name.rpartition('.')[0]}.bias" if "." in name else "bias"
    return rows == 1 or (entropy < EXACT_ENTROPY and bias in others)


def tilted(found: Truncation, least_error: float, generator: torch.Generator, *, left_is_known: bool) -> tuple[Tensor, Tensor]:
    """Return ``W V`` (p, k) and V^T (k, q), tilted so that the matrix has at least this relative squared error.

    The error that is there, ``rho``, and the one that is added are orthogonal in expectation, and independent tilts multiply:
    ``rho + (1 - rho) ((1 + t_left^2) (1 + t_right^2) - 1) = least_error``.
    """
    if found.rank == 0 or found.residual >= min(1.0, least_error):
        return found.projected, found.right
    added = (least_error - found.residual) / (1 - found.residual)
    if left_is_known:
        return found.projected, _towards_chance(found.right, math.sqrt(added), generator)
    # (1 + t²) (1 + a t²) = 1 + added, solved for t²; written so that a small `added` keeps its digits.
    squared = 2 * added / (1 + LEFT_SHARE + math.sqrt((1 + LEFT_SHARE) ** 2 + 4 * LEFT_SHARE * added))
    right = _towards_chance(found.right, math.sqrt(squared), generator)
    return _towards_chance(found.projected.T, math.sqrt(LEFT_SHARE * squared), generator).T, right


def _towards_chance(rows: Tensor, length: float, generator: torch.Generator) -> Tensor:
    """Return rows that are longer by ``length`` of their own length, each in a random direction across it."""
    draws = torch.randn(rows.shape, generator=generator, device=rows.device, dtype=rows.dtype)
    sizes = rows.norm(dim=1, keepdim=True)
    units = rows / sizes.clamp_min(torch.finfo(rows.dtype).tiny)
    across = draws - (draws * units).sum(1, keepdim=True) * units
    moved: Tensor = rows + length * sizes * across / across.norm(dim=1, keepdim=True)
    return moved
