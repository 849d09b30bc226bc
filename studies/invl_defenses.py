"""Tables 2 to 4 of the InvRE paper in small: guided noise against plain noise, pruning and dropout, one row at a time.

No plan says it: accuracy is that of a client whose data is one minibatch a round, or of parties that predict with a defense they
did not train with, and cost counts kept bases; a plan trains with the defense it attacks.

Settings are the paper's for CIFAR-10, whose δ is a variance. Attacks: plain and informed; the ensemble
quick-no-simulation-1 leaves out those that run a defense on every candidate. Accuracy and cost: see `invl_horizontal.py` and
`invl_vertical.py`. What a kept basis costs in protection: `invl_kept.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gradveil.run.describe import describe_cells
from gradveil.run.pool import run_cells
from gradveil.study.cell import Cell
from studies import invl_horizontal, invl_tables, invl_vertical
from studies.shared import grouped

FORMAT = "gradveil-invl-1"


@dataclass(frozen=True)
class Row:
    """One defense of a table.

    Attributes:
        title: As the paper calls it, or ours.
        spelling: As `gradveil.defenses.build_defense` reads it; ``{refresh}`` is filled in.
        trained: What is trained with where the spelling's own basis, anew for every record and round, is out of reach.
    """

    title: str
    spelling: str
    trained: str = ""


SHARED = "invl_dnp(delta=0.08, basis='class', refresh={refresh})"
HORIZONTAL = (
    Row("Clean", "none"),
    Row("Prune", "pruning(rate=0.995)"),
    Row("Dropout", "entry_dropout(rate=0.995)"),
    Row("DNP", "data_noise(std=0.26458)"),
    Row("InvL-DNP", "invl_dnp(delta=0.08)", SHARED),
    Row("InvL-DNP, class basis", SHARED),
    Row("GNP", "gaussian_noise(std=0.3873)"),
    Row("InvL-GNP", "invl_gnp(delta=0.25)", "invl_gnp(delta=0.25, refresh={refresh})"),
    Row("InvL-GNP, kept basis", "invl_gnp(delta=0.25, refresh={refresh})"),
    Row("DNP, matched", "data_noise(std=0.29715)"),
    Row("DNP10", "data_noise(std=0.31623)"),
    Row("InvL-GNP, public centres", "invl_gnp(delta=0.25, centres='public', refresh={refresh})"),
)
VERTICAL = (
    Row("Clean", "none"),
    Row("Prune", "embedding_pruning(rate=0.9)"),
    Row("Dropout", "embedding_dropout(rate=0.9)"),
    Row("DNP", "data_noise(std=0.23452)"),
    Row("InvL-DNP", "invl_dnp(delta=0.06)"),
    Row("ENP", "embedding_noise(delta=0.7)"),
    *(Row(f"ENP {delta:g}", f"embedding_noise(delta={delta:g})") for delta in (0.3, 0.1, 0.03)),
    Row("InvL-ENP", "invl_enp(delta=1.0)"),
    Row(
        "InvL-ENP, public basis",
        "invl_enp(delta=1.0, basis='public')",
        "invl_enp(delta=1.0, basis='public', refresh={refresh})",
    ),
)


def units(settings: SimpleNamespace) -> list[str]:
    """Name the rows of every part."""
    return list(grouped(settings))


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Measure one part of one row."""
    options = grouped(settings)[unit]
    options.out, data = work, Path(options.data)
    row = next(row for row in (VERTICAL if options.vertical else HORIZONTAL) if row.title == options.row)
    if options.factor > 1:
        smaller = work / f"{data.stem}_shrunk{options.factor}.npz"
        if not smaller.exists():
            invl_vertical.shrink(data, smaller, options.factor)
        options.data = str(smaller)
    begun = time.perf_counter()
    found = {"attack": attack, "accuracy": accuracy, "cost": cost}[options.part](row, options, unit)
    return {
        "format": FORMAT,
        "part": options.part,
        "title": row.title,
        "vertical": options.vertical,
        "data": data.name,
        "factor": options.factor,
        "model": options.model,
        "seed": options.seed,
        "seconds": round(time.perf_counter() - begun, 1),
        **found,
    }


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show updates at both sizes of pictures, and embeddings."""
    return {
        "updates_16x16": invl_tables.updates(documents, "horizontal_16x16"),
        "updates_32x32": invl_tables.updates(documents, "horizontal_32x32"),
        "embeddings": invl_tables.embeddings(documents, "vertical_16x16"),
    }


def attack(row: Row, options: SimpleNamespace, unit: str) -> dict[str, Any]:
    """Attack the row's records, plain and informed."""
    spelling = row.spelling.format(refresh=1)
    # All draws of records are attacked at the weights of one training.
    weights = invl_vertical.weights_of(SimpleNamespace(**{**vars(options), "seed": 0})) if options.vertical else ""
    cell = Cell(
        data=options.data,
        model=options.model,
        weights=weights,
        state="given" if weights else "untrained",
        records=options.records,
        ensemble=options.ensemble,
        device=options.device,
        seed=options.seed,
        defense=spelling,
        risk="off",
        **({"cut": options.cut, "parts": options.parts} if options.vertical else {}),
    )
    folder = options.out / "cells" / unit
    command = "gradveil study run studies/invl_defenses.toml"
    run_cells([cell], folder, lambda keys: describe_cells([cell], keys, command, f"{row.title} of the InvRE paper"), workers=1)
    (path,) = (each for each in (folder / "cells").glob("*.json") if not each.name.endswith(".timing.json"))
    result = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: result.get(name) for name in ("n", "plain", "informed", "bar", "checks", "attackers", "risk")}
    where = {"cut": options.cut, "parts": options.parts, "state": cell.state} if options.vertical else {}
    return {"defense": spelling, "records": options.records, "ensemble": options.ensemble, "cell": result["key"], **where, **kept}


def accuracy(row: Row, options: SimpleNamespace, unit: str) -> dict[str, Any]:
    """Train with the row's defense."""
    if options.vertical:
        trained = (row.trained or row.spelling).format(refresh=options.refresh)
        each = row.title in ("InvL-DNP", "InvL-ENP")  # a basis for every record of every step would take days
        found: dict[str, Any] = invl_vertical.accuracy(row.spelling, "" if each else trained, options)
    else:
        found = invl_horizontal.accuracy((row.trained or row.spelling).format(refresh=options.refresh), options)
    return found


def cost(row: Row, options: SimpleNamespace, unit: str) -> dict[str, Any]:
    """Time one client's round with the row's defense, over the same without one."""
    found: dict[str, Any] = invl_horizontal.cost(row.spelling.format(refresh=options.refresh), options)
    return found
