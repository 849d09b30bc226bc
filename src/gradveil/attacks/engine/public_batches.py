"""Public records put together as a client would hold them: the right labels in the right order, in folds that share no record."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks.base import PublicRecords
from gradveil.randomness import Seed

__all__ = ["FOLDS", "PublicBatches", "by_brightness", "public_batches"]

FOLDS = 4
POOL = 16
"""Records of one fold that a label is drawn from in batches: those of other labels join in where its own are fewer."""


@dataclass(frozen=True)
class PublicBatches:
    """R batches, and the fold of each.

    Attributes:
        inputs: (R, B, ...).
        targets: (R, B, ...), as they are sent.
        folds: (R,).
    """

    inputs: Tensor
    targets: Tensor
    folds: Tensor

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.inputs)


def public_batches(public: PublicRecords, labels: Tensor | None, size: int, count: int, seed: Seed) -> PublicBatches:
    """Return at most so many batches with these labels, of single records each once.

    Records of the label asked for come first. Where there are too few of them, others are sent with that label, whatever they
    are: what a client computes depends on the label that goes with a record.

    Args:
        public: The records, at least four for every record of a batch.
        labels: (B,) classes in the order of the batch; None where targets are no classes, or nothing depends on them: then every
            record keeps its own.
        size: Records B of a batch.
        count: Batches wanted.
        seed: Where they are drawn from.
    """
    generator = seed.numpy("public batches")
    order = torch.from_numpy(generator.permutation(len(public.inputs)))
    if size == 1:
        rows = _own_first(public, order, None if labels is None else int(labels[0]))[:count, None]
        folds = torch.arange(len(rows)) % FOLDS
    else:
        folds = torch.arange(count) % FOLDS
        wanted = [None] * size if labels is None else labels.tolist()
        most = max(POOL, 2 * size)
        pools = {(fold, label): _pool(public, order[fold::FOLDS], label, most) for fold in range(FOLDS) for label in set(wanted)}
        rows = torch.stack([_draw([pools[fold, label] for label in wanted], generator) for fold in folds.tolist()])
    targets = public.targets[rows] if labels is None else labels.cpu().expand(len(rows), size)
    return PublicBatches(public.inputs[rows], targets, folds)


def by_brightness(pictures: Tensor, labels: Tensor) -> Tensor:
    """Return (R, B, ...) pictures with those of one label in the order of their mean, among the places of that label.

    An update does not tell in which order equal labels stood, and the mean over orders is a blur.
    """
    ordered = pictures.clone()
    mean = pictures.flatten(2).mean(2)
    for label in labels.unique():
        places = (labels == label).nonzero()[:, 0]
        rank = mean[:, places].argsort(1)
        here = torch.arange(len(pictures), device=pictures.device)[:, None]
        ordered[:, places] = pictures[here, places[rank]]
    return ordered


def _own_first(public: PublicRecords, order: Tensor, label: int | None) -> Tensor:
    if label is None:
        return order
    own = public.targets[order].cpu() == label
    return torch.cat([order[own], order[~own]])


def _pool(public: PublicRecords, order: Tensor, label: int | None, few: int) -> Tensor:
    """Return the records of one fold that may stand for a label: its own, and others up to a few."""
    if label is None:
        return order
    own = int((public.targets[order].cpu() == label).sum())
    return _own_first(public, order, label)[: max(own, few)]


def _draw(pools: list[Tensor], generator: np.random.Generator) -> Tensor:
    """Draw one record from every pool, none twice."""
    taken: list[int] = []
    for pool in pools:
        free = [row for row in pool.tolist() if row not in taken]
        taken.append(free[int(generator.integers(len(free)))])
    return torch.tensor(taken)
