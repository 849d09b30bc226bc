"""Which cells of a grid make sense once models are cut: vertical rows beside horizontal ones."""

from __future__ import annotations

from collections.abc import Sequence

from gradveil.audit.materials import Materials
from gradveil.audit.scene import build_learner
from gradveil.client.embedding import vertical_fault
from gradveil.client.update import horizontal_fault
from gradveil.errors import UsageError
from gradveil.study.cell import Cell

__all__ = ["check_cuts", "fitting_cells"]


def check_cuts(cells: Sequence[Cell], materials: Materials) -> None:
    """Cut every model once, so that a wrong cut, or a part that does not fit, is told before the first cell runs."""
    bare = {"defense": "none", "ensemble": "", "batch_size": 1, "device": "cpu"}
    once = [cell.replace(state="given" if cell.weights else "untrained", **bare) for cell in cells if cell.cut]
    for cell in dict.fromkeys(once):
        build_learner(cell, materials.dataset(cell), materials.defense("none"), materials)


def fitting_cells(cells: Sequence[Cell], materials: Materials | None = None, *, strict: bool = True) -> list[Cell]:
    """Return the cells that mean something.

    A party of vertical learning sends one embedding per record: local steps, aggregates and several rounds have no place there. A
    defense that touches nothing that leaves its owner is left out of that side of the grid, not reported as if it had failed.

    Args:
        cells: The whole grid.
        materials: What the run has built so far.
        strict: Whether a defense, or a number of steps, that fits nowhere is an error, as where the user named it.

    Raises:
        UsageError: Nothing of the grid is left for a defense, or for vertical learning at all.
    """
    materials = materials or Materials()
    once = [
        cell for cell in cells if not cell.cut or (cell.local_steps == cell.clients == cell.rounds == 1 and not _trains(cell))
    ]
    if cells and not any(cell.cut for cell in once) and any(cell.cut for cell in cells):
        raise UsageError(
            "a party of vertical learning sends one embedding per record: set local_steps, clients and rounds to 1, and leave "
            "local_epochs, minibatch and dropout out"
        )
    faults: dict[tuple[str, bool], str | None] = {}
    for cell in once:
        if (cell.defense, bool(cell.cut)) not in faults:
            look = vertical_fault if cell.cut else horizontal_fault
            faults[cell.defense, bool(cell.cut)] = look(materials.defense(cell.defense))
    for defense in dict.fromkeys(name for name, _ in faults):
        told = [fault for (name, _), fault in faults.items() if name == defense]
        if strict and all(told):
            raise UsageError(f"{told[0]}; leave it out, or use a defense that fits")
    return [cell for cell in once if faults[cell.defense, bool(cell.cut)] is None]


def _trains(cell: Cell) -> bool:
    """Whether clients are asked to train as no party does that sends an embedding."""
    return bool(cell.local_epochs or cell.minibatch or cell.dropout)
