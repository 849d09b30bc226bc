"""What a run is: its provenance, the cards of everything it used, and what it did not test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import gradveil
from gradveil.attacks import resolve
from gradveil.audit.materials import Materials
from gradveil.audit.threat import threat_of
from gradveil.data import DATASETS
from gradveil.defenses import parts_of
from gradveil.metrics import METRICS
from gradveil.provenance import provenance
from gradveil.study.cell import Cell
from gradveil.study.plan import Plan
from gradveil.study.run_result import Run

__all__ = ["NOT_TESTED", "describe_cells", "describe_run"]

NOT_TESTED = (
    "membership inference: whether a record was used in any round of the training",
    "property inference: what the data have in common",
    "what the final trained model remembers",
    "attackers who alter the model they send",
    "generative attackers, and networks trained to turn updates into data",
    "attackers stronger or more patient than the named ensemble",
)


def describe_run(plan: Plan, cells: Sequence[Cell], keys: Sequence[str], command: str, materials: Materials) -> Run:
    """Return what run.json says about a plan."""
    return replace(describe_cells(cells, keys, command, plan.title, materials), plan=plan.as_dict())


def describe_cells(
    cells: Sequence[Cell], keys: Sequence[str], command: str, title: str, materials: Materials | None = None
) -> Run:
    """Return what run.json says about a list of cells."""
    materials = materials or Materials()
    parts = {part.card.name: part.card for cell in cells for part in parts_of(materials.defense(cell.defense))}
    attacks = {m.attack.card.name: m.attack.card for cell in cells for m in resolve(cell.ensemble, threat_of(cell).sees).members}
    return Run(
        version=gradveil.__version__,
        title=title,
        command=command,
        keys=tuple(keys),
        builtin_data=all(cell.data in DATASETS.names() for cell in cells),
        not_tested=NOT_TESTED,
        provenance=provenance(cells[0].seed, cells[0].device),
        cards={
            "defenses": {name: parts[name].as_dict() for name in sorted(parts)},
            "attacks": {name: attacks[name].as_dict() for name in sorted(attacks)},
            "metrics": {card.name: card.as_dict() for card in METRICS.cards()},
        },
    )
