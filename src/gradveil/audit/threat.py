"""Who attacks a cell."""

from __future__ import annotations

from typing import Any

from gradveil.records import ORDINARY, Knowledge, ThreatModel
from gradveil.study.cell import Cell

__all__ = ["threat_of"]


def threat_of(cell: Cell) -> ThreatModel:
    """Return what the attacker of a cell sees and knows."""
    knows = ORDINARY | ({Knowledge.LABELS} if cell.known_labels else frozenset())
    sees: Any = cell.sees if cell.cut else "update"
    return ThreatModel(clients=cell.clients, rounds=cell.rounds, knows=knows, sees=sees)
