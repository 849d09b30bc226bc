"""One point of a power curve as it is measured and kept: power/KEY.json in a results folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from gradveil.study.cell import Cell
from gradveil.study.codec import OMITTED, decode, named
from gradveil.study.evidence import Rung
from gradveil.study.kept import KeptCell
from gradveil.study.results import Check

__all__ = ["RUNG_FORMAT", "RungRecord", "RungTask"]

RUNG_FORMAT = "gradveil-rung-1"


@dataclass(frozen=True, kw_only=True)
class RungTask:
    """What to measure: a cell with a weaker defense, or a cell itself with a leak of some weight planted beside its release."""

    cell: Cell
    leak: float = 0.0

    def key(self, of_cell: str) -> str:
        """Return the key of the result, given that of the cell."""
        return hashlib.sha256(f"{RUNG_FORMAT}|{of_cell}|{self.leak!r}".encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """What to call it while it is measured."""
        return f"power: {self.cell.defense}" + (f" with a leak of {self.leak:g}" if self.leak else "")


@dataclass(frozen=True, kw_only=True)
class RungRecord:
    """What was measured there.

    Attributes:
        settings: Of the cell; its ensemble is the version that attacked.
        rung: The point.
        checks: Of the canaries, where the leak is the whole update.
    """

    KEYS = ("format", "key", "cell", "rung", "checks")
    format = RUNG_FORMAT

    key: str = ""
    settings: KeptCell = field(default_factory=lambda: decode(KeptCell, {}), metadata=named("cell"))
    rung: Rung
    checks: tuple[Check, ...] = field(default=(), metadata=OMITTED)

    def as_weaker(self) -> Rung:
        """Return the point as one of a ladder."""
        return replace(self.rung, spelling=self.settings.defense, leak=0.0)
