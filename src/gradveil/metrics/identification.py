"""The headline: is the original the nearest of many candidates to its reconstruction?

PSNR needs a threshold that nobody agrees on. Identification asks what the owner of the data cares about: could an attacker who
holds the reconstruction point out the record it came from? By chance that happens once in M candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradveil.errors import UsageError

__all__ = ["IIP", "MINIMUM_CANDIDATES", "among_nearest", "identified", "owner_hits", "ranks"]

MINIMUM_CANDIDATES = 100
"""Fewest candidates among which a share identified may be called that in a report."""

IIP = (1, 3, 5)
"""Numbers of nearest neighbours at which papers give the image identifiability precision."""

# Two candidates at the same distance up to the rounding of a sum (an image and its mirror, seen from a grey guess) are a tie.
TIE = 1e-12
CHUNK_ENTRIES = 2**23  # 64 MB of double precision at once


def ranks(
    reconstructions: Tensor,
    originals_index: Tensor | Sequence[int],
    candidates: Tensor,
    embed: Callable[[Tensor], Tensor] | None = None,
    copies: Tensor | None = None,
) -> Tensor:
    """Return the rank of each original among the candidates, by mean squared error to the reconstruction.

    The rank is 1 plus the number of *other* candidates that are as near or nearer: ties count against the attacker, so a constant
    guess is never an identification. Copies of the original never count, and several copies of another record count as one.

    Args:
        reconstructions: (N, ...) in [0, 1].
        originals_index: (N,) position of each reconstruction's original in ``candidates``.
        candidates: (M, ...) in [0, 1], the originals among them.
        embed: (B, ...) to features (B, D): ranks then go by the cosine between features, as papers do with a deep network.
        copies: (M,) for each candidate the row of the first one it is a copy of, as `duplicate_groups` returns them; without it,
            every candidate counts.

    Returns:
        (N,) integers from 1 (identified) to M.

    Raises:
        UsageError: If shapes differ, an index is out of range, or a value is not finite.

    Example:
        >>> candidates = torch.tensor([[0.0], [0.4], [1.0]])
        >>> ranks(torch.tensor([[0.1], [0.1]]), [0, 2], candidates).tolist()
        [1, 3]
    """
    index = torch.as_tensor(originals_index, dtype=torch.int64, device=candidates.device)
    _check(reconstructions, index, candidates)
    if embed is not None:
        # Between directions, the squared distance is two minus twice the cosine: the same order.
        return ranks(_directions(embed(reconstructions)), index, _directions(embed(candidates)), copies=copies)
    rebuilt = reconstructions.reshape(len(reconstructions), -1)  # (N, D)
    pool = candidates.reshape(len(candidates), -1)  # (M, D)
    every = torch.arange(len(pool), device=candidates.device)
    same = every if copies is None else copies.to(candidates.device)
    firsts = same == every  # one of each set of copies stands for all
    step = max(1, CHUNK_ENTRIES // pool.shape[1])
    result = torch.ones(len(rebuilt), dtype=torch.int64, device=candidates.device)
    for rows in _chunks(len(rebuilt), step):
        guesses = rebuilt[rows].double()
        own = (guesses - pool[index[rows]].double()).square().sum(dim=1)  # (n,)
        for columns in _chunks(len(pool), step):
            near = _as_near(guesses, pool[columns].double(), own)  # (n, m)
            others = firsts[columns] & (same[index[rows], None] != same[columns])
            result[rows] += (near & others).sum(dim=1)
    return result


def owner_hits(reconstructions: Tensor, owners: Tensor, candidates: Tensor, pool_owners: Tensor, copies: Tensor) -> Tensor:
    """Return for each reconstruction whether the nearest of all candidates belongs to an owner.

    Ties with a candidate of somebody else count against the attacker, except where the owner has a copy of it.

    Args:
        reconstructions: (N, ...) in [0, 1].
        owners: (N,) whose candidate should be the nearest, as a number.
        candidates: (M, ...) in [0, 1].
        pool_owners: (M,) whose each candidate is.
        copies: (M,) for each candidate the row of the first one it is a copy of.

    Example:
        >>> pool, own = torch.tensor([[0.0], [0.2], [1.0]]), torch.tensor([7, 7, 8])
        >>> owner_hits(torch.tensor([[0.1], [0.7]]), torch.tensor([7, 7]), pool, own, torch.arange(3)).tolist()
        [True, False]
    """
    rebuilt = reconstructions.reshape(len(reconstructions), -1).double()
    pool = candidates.reshape(len(candidates), -1).double()
    hits = []
    for guess, owner in zip(rebuilt, owners.tolist(), strict=True):
        distance = (pool - guess).square().sum(1)
        own = pool_owners == owner
        rest = ~torch.isin(copies, copies[own])
        nearest = distance[own].min() if bool(own.any()) else distance.new_tensor(float("inf"))
        hits.append(bool(nearest * (1.0 + TIE) < distance[rest].min()) if bool(rest.any()) else bool(own.any()))
    return torch.tensor(hits)


def identified(rank: Tensor) -> Tensor:
    """Return, for each rank, whether the original was strictly the nearest candidate."""
    return rank == 1


def among_nearest(rank: Tensor, k: int) -> Tensor:
    """Return, for each rank, whether the very original was among the k nearest candidates.

    The share of records for which it was is the image identifiability precision IIP-k (Hatamizadeh et al. 2023, as the shadow
    paper defines it). Released code counts neighbours of the same *client* instead, which is another number.

    >>> among_nearest(torch.tensor([1, 3, 4]), 3).tolist()
    [True, True, False]
    """
    if k < 1:
        raise UsageError(f"k is {k}; look at 1 neighbour at least")
    return rank <= k


def _directions(features: Tensor) -> Tensor:
    flat = features.detach().double().flatten(1)
    return flat / flat.square().sum(dim=1, keepdim=True).sqrt().clamp_min(1e-300)


def _as_near(guesses: Tensor, pool: Tensor, own: Tensor) -> Tensor:
    """Tell which of the pool (m, D) are at most ``own`` (n,) away from the guesses (n, D), in squared distance."""
    squares = guesses.square().sum(dim=1, keepdim=True) + pool.square().sum(dim=1)  # (n, m)
    distance = squares - 2.0 * guesses @ pool.T
    limit = own[:, None] * (1.0 + TIE)
    near = distance <= limit
    # One matrix product gives all distances, but the subtraction cancels: where its rounding could decide, subtract first.
    rounding = 4.0 * (pool.shape[1] + 4) * torch.finfo(torch.float64).eps * squares
    doubtful = ((distance - limit).abs() <= rounding).nonzero()  # (k, 2)
    for rows in _chunks(len(doubtful), max(1, CHUNK_ENTRIES // pool.shape[1])):
        left, right = doubtful[rows].unbind(dim=1)
        near[left, right] = (guesses[left] - pool[right]).square().sum(dim=1) <= limit[left, 0]
    return near


def _chunks(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def _check(reconstructions: Tensor, index: Tensor, candidates: Tensor) -> None:
    if reconstructions.ndim == 0 or reconstructions.shape[1:] != candidates.shape[1:] or candidates.numel() == 0:
        raise UsageError(
            f"reconstructions {tuple(reconstructions.shape)} and candidates {tuple(candidates.shape)} do not fit: "
            "give (N, ...) and (M, ...) with equal shapes after the first axis"
        )
    if index.shape != reconstructions.shape[:1]:
        raise UsageError(
            f"{len(reconstructions)} reconstructions need as many indices of originals, not shape {tuple(index.shape)}"
        )
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(candidates):
        raise UsageError(f"an index of an original lies outside the {len(candidates)} candidates")
    for name, values in (("reconstructions", reconstructions), ("candidates", candidates)):
        if not bool(torch.isfinite(values).all()):
            raise UsageError(f"the {name} have entries that are not finite")
