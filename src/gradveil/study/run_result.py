"""A whole run as a value: what was asked, where it ran, and the cells that are done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError
from gradveil.study.codec import BESIDE, OMITTED, named
from gradveil.study.results import CellResult

__all__ = ["RUN_FORMAT", "Run"]

RUN_FORMAT = "gradveil-run-1"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: what was asked, where it ran, and the cells that are done, in plan order.

    Attributes:
        plans: Of a study of several grids, one plan each.
        keys: Of all its cells, done or not.
        cells: Those that are done.
        notes: What was odd about the folder.
        out: The folder.
    """

    KEYS = (
        "format",
        "version",
        "title",
        "command",
        "plan",
        "plans",
        "cells",
        "builtin_data",
        "not_tested",
        "provenance",
        "cards",
    )
    format = RUN_FORMAT

    version: str = "unknown"
    title: str = ""
    command: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    plans: tuple[Mapping[str, Any], ...] = field(default=(), metadata=OMITTED)
    keys: tuple[str, ...] = field(default=(), metadata=named("cells"))
    builtin_data: bool = False
    not_tested: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    cards: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    cells: tuple[CellResult, ...] = field(default=(), metadata=BESIDE)
    notes: tuple[str, ...] = field(default=(), metadata=BESIDE)
    out: Path = field(default=Path(), metadata=BESIDE)

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of the listed cells that are not done."""
        done = {cell.key for cell in self.cells}
        return tuple(key for key in self.keys if key not in done)

    def cell(self, **settings: Any) -> CellResult:
        """Return the one cell with these settings, as in ``run.cell(defense="none", batch_size=4)``.

        Raises:
            UsageError: No cell that is done has them, or several have.
        """
        alike = [cell for cell in self.cells if settings.items() <= cell.settings.as_dict().items()]
        if len(alike) != 1:
            asked = ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "no settings"
            defenses = ", ".join(str(cell.settings.said("defense")) for cell in self.cells)
            cure = "name more settings" if alike else f"there are {defenses}"
            raise UsageError(f"{len(alike) or 'no'} cells of this run have {asked}; {cure}")
        return alike[0]
