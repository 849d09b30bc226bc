"""Public records for exposure without an audit: chosen as audits do, beside the records that are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradveil.attacks.base import PublicRecords
from gradveil.audit.party import own_data
from gradveil.audit.prior import choose_public, of_other_owners
from gradveil.data import Dataset
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.prior import FEWEST, WORDS, Prior, public_prior
from gradveil.study.cell import Cell

__all__ = ["PRIORS", "PublicSource"]

PRIORS = ("auto", "same", "other", "none", "off")
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
    _chosen: dict[tuple[str, str, str, int], PublicRecords] = field(default_factory=dict)
    _made: dict[tuple[str, str, int], Prior | None] = field(default_factory=dict)

    def prior(self, cell: Cell) -> Prior | None:
        """Return what an attacker of a cell knows of its records; None, with a sentence in ``missing``, where nobody can say."""
        key = (cell.parts, cell.cut and "cut", cell.party)
        if key not in self._made:
            self._made[key] = self._prior(cell)
        return self._made[key]

    def records(self, cell: Cell) -> PublicRecords | None:
        """Return the records behind the prior of a cell, None where there is none."""
        if self.choice != "auto":
            return self._of(cell, self.choice)
        if len(self._of(cell, "same").inputs) >= FEWEST:
            return self._of(cell, "same")
        return self._of(cell, "other") if len(self.dataset.input_shape) == 3 else None

    def others(self, cell: Cell) -> Batch | None:
        """Return candidates for a list, with their labels."""
        same = self._of(cell, "same")
        return Batch(same.inputs[:CANDIDATES], same.targets[:CANDIDATES]) if len(same.inputs) > 1 else None

    def _prior(self, cell: Cell) -> Prior | None:
        if self.choice == "other" and len(self.dataset.input_shape) != 3:
            raise UsageError("--prior other is a photograph, and these data are no pictures; use --prior same or none")
        public, name = self.records(cell), self.dataset.name
        if public is None:
            self.missing = (
                f"no exposure: it takes at least {FEWEST} public records beside the scored ones, and there are "
                f"{len(self._of(cell, 'same').inputs)}; score fewer, give more data, or ask for --prior none"
            )
            return None
        scored = own_data(cell, self.dataset).inputs[list(self.rows)]
        source, seed = WORDS[public.source].format(name, "scored"), Seed(cell.seed).child("public")
        return public_prior(public.inputs, like=scored, rank=self.rank, source=source, seed=seed)

    def _of(self, cell: Cell, source: str) -> PublicRecords:
        key = (source, cell.parts, cell.cut and "cut", cell.party)
        if key not in self._chosen:
            own, rows = own_data(cell, self.dataset), of_other_owners(self.dataset, self.rows, self.left)
            self._chosen[key] = choose_public(cell, self.dataset, own, source, near=self.rows, rows=rows)
        return self._chosen[key]
