"""Public records for exposure: data of the same source that are not scored, or a built-in photograph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.audit.party import own_data, own_part
from gradveil.data import Dataset
from gradveil.data.public import public_images
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.prior import FEWEST, Prior, public_prior
from gradveil.study.cell import Cell

__all__ = ["PRIORS", "PublicSource"]

PRIORS = ("auto", "same", "other", "off")
MOST = 5000
"""Public records that are looked at."""
CROPS = 2000
"""Pieces of the photograph."""
ALIKE = 1e-4
"""Mean squared difference below which two records are copies: what is scored is not public."""
CANDIDATES = 64


@dataclass
class PublicSource:
    """Public records beside those that are scored, and the priors made of them.

    Attributes:
        dataset: Whose records are scored.
        rows: Which.
        left: The other rows, in random order.
        choice: One of `PRIORS`.
        rank: Directions kept; None takes what suits.
        missing: Why there is no prior, where there is none.
    """

    dataset: Dataset
    rows: Sequence[int]
    left: Sequence[int]
    choice: str
    rank: int | None = None
    missing: str = ""
    _free: list[int] | None = None
    _made: dict[tuple[str, str, int], Prior | None] = field(default_factory=dict)

    def prior(self, cell: Cell) -> Prior | None:
        """Return what an attacker of a cell knows of its records; None, with a sentence in ``missing``, where nobody can say."""
        key = (cell.parts, cell.cut and "cut", cell.party)
        if key not in self._made:
            self._made[key] = self._prior(cell)
        return self._made[key]

    def others(self, cell: Cell) -> Batch | None:
        """Return candidates for a list, with their labels."""
        rows = self._unlike()[:CANDIDATES]
        return own_data(cell, self.dataset).batch(rows) if len(rows) > 1 else None

    def _prior(self, cell: Cell) -> Prior | None:
        seed, scored = Seed(cell.seed).child("public"), own_data(cell, self.dataset).inputs[list(self.rows)]
        same = self._unlike()
        if self.choice == "same" or (self.choice == "auto" and len(same) >= FEWEST):
            public = own_data(cell, self.dataset).inputs[same]
            return public_prior(public, like=scored, rank=self.rank, source=f"{self.dataset.name}, not scored", seed=seed)
        if len(self.dataset.input_shape) != 3:
            self.missing = (
                f"no exposure: it takes at least {FEWEST} public records beside the scored ones, and there are {len(same)}; "
                "score fewer, or give more data"
            )
            if self.choice == "other":
                raise UsageError("--prior other is a photograph, and these data are no pictures; use --prior same")
            return None
        crops: Tensor = own_part(cell, public_images(self.dataset.input_shape, CROPS, seed))
        return public_prior(crops, like=scored, rank=self.rank, source="pieces of a built-in photograph", seed=seed)

    def _unlike(self) -> list[int]:
        """Return rows that are no copies of scored records, and of no owner of one."""
        if self._free is None:
            owners = self.dataset.owners
            taken = {owners[row] for row in self.rows} if owners else set()
            rows = [row for row in self.left if not owners or owners[row] not in taken][:MOST]
            flat = self.dataset.inputs.flatten(1)
            away = torch.cdist(flat[rows].float(), flat[list(self.rows)].float()).square() / flat.shape[1]
            copies = (away < ALIKE).any(1).tolist() if rows else []
            self._free = [row for row, copy in zip(rows, copies, strict=True) if not copy]
        return self._free
