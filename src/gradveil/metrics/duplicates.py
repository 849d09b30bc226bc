"""Records stored more than once: to point at either copy is to point at the record, so they count as one."""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.errors import UsageError

__all__ = ["NEAR", "duplicate_groups"]

NEAR = 0.001
"""Two records are one where their squared distance is at most this share of the median over pairs, about 40 dB for photographs: a
picture saved twice, and not two pictures of one person."""

PAIRS = 2048
STRIPS = 64
CHUNK_ENTRIES = 2**23  # 64 MB of double precision at once


def duplicate_groups(candidates: Tensor, near: float = NEAR) -> Tensor:
    """Return for each candidate the row of the first one it is a copy of: its own where it is the first.

    Copies of copies belong together. Sums over strips of the input never exceed its distance, so they tell almost all pairs apart
    before any is compared as a whole: cost is M² of 64 numbers and one subtraction for each pair that comes near.

    Args:
        candidates: (M, ...).
        near: Share of the median squared distance of pairs; 0 finds exact copies alone.

    Returns:
        (M,) rows.

    >>> duplicate_groups(torch.tensor([[0.0], [1.0], [0.0], [0.4]])).tolist()
    [0, 1, 0, 3]
    """
    if candidates.ndim == 0 or not len(candidates) or not 0 <= near < 1:
        raise UsageError(f"no duplicates to look for in shape {tuple(candidates.shape)} at a share of {near}")
    flat = candidates.detach().reshape(len(candidates), -1)
    limit = near * _median_distance(flat)
    parents = list(range(len(flat)))
    strips = _strips(flat)
    step = max(1, CHUNK_ENTRIES // len(flat))
    for start in range(0, len(flat), step):
        rows = strips[start : start + step]
        bound = torch.cdist(rows, strips, compute_mode="donot_use_mm_for_euclid_dist").square()
        left, right = (bound <= limit * (1 + 1e-6) + 1e-12).nonzero().unbind(1)
        left = left + start
        _join(parents, flat, left[left < right], right[left < right], limit)
    return torch.tensor([_root(parents, row) for row in range(len(flat))], device=candidates.device)


def _join(parents: list[int], flat: Tensor, left: Tensor, right: Tensor, limit: float) -> None:
    step = max(1, CHUNK_ENTRIES // flat.shape[1])
    for start in range(0, len(left), step):
        one, other = left[start : start + step], right[start : start + step]
        alike = (flat[one].double() - flat[other].double()).square().sum(1) <= limit
        for a, b in zip(one[alike].tolist(), other[alike].tolist(), strict=True):
            first, second = sorted((_root(parents, a), _root(parents, b)))
            parents[second] = first


def _root(parents: list[int], row: int) -> int:
    while parents[row] != row:
        parents[row] = parents[parents[row]]
        row = parents[row]
    return row


def _strips(flat: Tensor) -> Tensor:
    """Return the coordinates along a few orthonormal directions, each one strip of the input."""
    parts = flat.double().tensor_split(min(STRIPS, flat.shape[1]), dim=1)
    return torch.stack([part.sum(1) / part.shape[1] ** 0.5 for part in parts], dim=1)


def _median_distance(flat: Tensor) -> float:
    """Return the median squared distance of pairs, from a sample where there are many."""
    count = len(flat)
    if count < 2:
        return 0.0
    if count * (count - 1) // 2 <= PAIRS:
        left, right = torch.triu_indices(count, count, offset=1)
    else:
        generator = torch.Generator().manual_seed(0)
        left = torch.randint(count, (PAIRS,), generator=generator)
        right = (left + torch.randint(1, count, (PAIRS,), generator=generator)) % count
    step = max(1, CHUNK_ENTRIES // flat.shape[1])
    parts = [
        (flat[left[i : i + step]].double() - flat[right[i : i + step]].double()).square().sum(1)
        for i in range(0, len(left), step)
    ]
    return float(torch.cat(parts).median())
