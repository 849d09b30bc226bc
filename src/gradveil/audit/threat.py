"""Who attacks a cell."""

from __future__ import annotations

from typing import Any

from gradveil.records import ORDINARY, Knowledge, ThreatModel
from gradveil.study.cell import Cell

__all__ = ["threat_of", "training_sentences"]


def threat_of(cell: Cell) -> ThreatModel:
    """Return what the attacker of a cell sees and knows."""
    knows = ORDINARY | ({Knowledge.LABELS} if cell.known_labels else frozenset())
    sees: Any = cell.sees if cell.cut else "update"
    return ThreatModel(clients=cell.clients, rounds=cell.rounds, knows=knows, sees=sees)


def training_sentences(cell: Cell) -> list[str]:
    """Say what clients do in local training beyond steps on the whole batch, and what of it the attacker does not know."""
    if cell.cut:
        return []
    parts = [
        f"{cell.local_epochs} local epoch{'s' if cell.local_epochs > 1 else ''}" if cell.local_epochs else "",
        f"minibatches of {cell.minibatch}" if 0 < cell.minibatch < cell.batch_size else "",
        f"momentum {cell.momentum:g}" if cell.momentum else "",
    ]
    told = [f"Clients train with {', '.join(filter(None, parts))}, which the attacker replays."] if any(parts) else []
    if cell.shuffle and cell.local_epochs > 1 and 0 < cell.minibatch < cell.batch_size:
        told.append("Every epoch after the first has an order of its own, which the attacker does not know.")
    if cell.dropout:
        told.append("Clients train with dropout on, and the attacker does not know their masks: it replays the mean network.")
    return told
