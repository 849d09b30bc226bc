"""Public records that the attacker of a cell holds and learns from, and the sentence that says which.

Three priors, three cells: records of the audited data that nobody attacks (``same``), of other data (``other``), or draws from
a law that says next to nothing (``none``). What an attacker reaches with one is never pooled with another.

``gradveil risk`` takes its public records from here, too: whoever reads both reads about one attacker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.attacks.base import PublicRecords
from gradveil.audit.party import own_part
from gradveil.audit.state import CANDIDATES, Seen, order_of_records
from gradveil.data import Dataset, foreground, other_pictures, stationary
from gradveil.metrics import duplicate_groups
from gradveil.randomness import Seed
from gradveil.study.cell import Cell

__all__ = ["choose_public", "of_other_owners", "prior_sentence", "public_records", "source_of"]

ENOUGH = 64
"""Records beside attacked ones and candidates without which the audited data teach nothing."""
MOST, MADE = 4096, 1024
"""Records held of the audited data, and made of other data or of a law."""
MOST_VALUES = 2**25
"""Numbers held in all, 128 megabytes."""
OF_PHOTOS = ("photos", "segments")
"""Built-in data made of the built-in photographs."""


def source_of(cell: Cell, dataset: Dataset) -> str:
    """Return the prior that a cell has: what it asks for, and other data where the audited ones have too few records."""
    return "other" if cell.prior == "same" and len(_spare(cell, dataset)) < ENOUGH else cell.prior


def prior_sentence(cell: Cell, dataset: Dataset, seen: Seen) -> str:
    """Say what the attacker learns from."""
    source = source_of(cell, dataset)
    if source == "none":
        return "The attacker learns from draws of a stationary law with a spectrum of 1/f², grey in the mean, and from no record."
    if source == "same":
        told = ", some of which the model was trained on" if set(seen.rows) & set(_spare(cell, dataset)) else ""
        whose = " of other owners" if _by_strangers(dataset, _attacked(cell, dataset), _spare(cell, dataset)) else ""
        return f"The attacker learns from other records of the same data{whose}{told}: no candidate, and no near copy of one."
    what = "The attacker learns from records of other data, and from none of the audited ones"
    if cell.prior == "same":
        return f"{what}, of which only {len(_spare(cell, dataset))} are left beside attacked records and candidates."
    return f"{what}."


def public_records(cell: Cell, dataset: Dataset, own: Dataset, pool: Sequence[int]) -> PublicRecords:
    """Return what the attacker learns from; the same for the same cell.

    Args:
        cell: The settings.
        dataset: The audited data.
        own: What the sender has of every record.
        pool: Rows of the records under attack and of the other candidates.
    """
    source = source_of(cell, dataset)
    return choose_public(cell, dataset, own, source, near=pool, rows=_spare(cell, dataset) if source == "same" else ())


def choose_public(
    cell: Cell, dataset: Dataset, own: Dataset, source: str, *, near: Sequence[int], rows: Sequence[int]
) -> PublicRecords:
    """Return public records of a source: the one way in which audits and ``gradveil risk`` come by them.

    Args:
        cell: Whose part of the records and whose seed.
        dataset: The audited data.
        own: What the sender has of every record.
        source: ``same``, ``other`` or ``none``.
        near: Rows of which no copy may be public.
        rows: Rows of the same data that may be, in order.
    """
    most = max(1, MOST_VALUES // math.prod(own.input_shape))
    if source == "same":
        return _same(dataset, own, near, rows[: min(MOST, most)])
    seed, count, shape = Seed(cell.seed).child("prior", source), min(MADE, most), dataset.input_shape
    made = other_pictures(shape, count, seed, photos=dataset.name not in OF_PHOTOS) if source == "other" else None
    images = stationary(shape, count, seed) if made is None else made
    labels = foreground(images) if dataset.dense else torch.arange(count) % max(1, dataset.classes)
    return PublicRecords(own_part(cell, images), labels, source)


def of_other_owners(dataset: Dataset, attacked: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Return the rows of people none of whose records is attacked; all rows where hardly anybody else is there."""
    strangers = _by_strangers(dataset, attacked, rows)
    return strangers or list(rows)


def _by_strangers(dataset: Dataset, attacked: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Return the rows of other owners; nothing where the data name none, or too few are left to learn from."""
    if dataset.owners is None:
        return []
    taken = {dataset.owners[row] for row in attacked}
    found = [row for row in rows if dataset.owners[row] not in taken]
    return found if len(found) >= ENOUGH else []


def _same(dataset: Dataset, own: Dataset, pool: Sequence[int], rows: Sequence[int]) -> PublicRecords:
    if not rows:
        return PublicRecords(own.inputs[:0], dataset.targets[:0], "same")
    groups = duplicate_groups(torch.cat([own.inputs[list(pool)], own.inputs[list(rows)]]))[len(pool) :]
    kept: Tensor = torch.tensor(rows)[groups.cpu() >= len(pool)]
    return PublicRecords(own.inputs[kept], dataset.targets[kept], "same")


def _attacked(cell: Cell, dataset: Dataset) -> list[int]:
    return order_of_records(cell, dataset)[: cell.targets * cell.batch_size * cell.clients]


def _spare(cell: Cell, dataset: Dataset) -> list[int]:
    """Return rows that are neither attacked, nor candidates, nor on any list, nor of an owner under attack."""
    listed = 0 if cell.lists in ("auto", "off") else int(cell.lists)
    attacked = _attacked(cell, dataset)
    return of_other_owners(dataset, attacked, order_of_records(cell, dataset)[max(CANDIDATES, listed, len(attacked)) :])
