"""What the defenses of `shadow_xray.py` cost in F1 and accuracy, in a training that learns something.

No plan says it: F1 on one half of the test records, because the other half chose the settings; a plan takes all of them.

Several seeds and no attack. The same hospitals train a small ConvNet with five local epochs of plain SGD, which SCAFFOLD needs.
Model and settings were chosen on the undefended run of seed 1 and one half of the test records; these figures are of other seeds
and the other half.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gradveil.federation.engine import run_training
from studies.shadow_xray import ROWS, load, settings
from studies.shared import grouped, table

MODEL = Path(__file__).resolve().parent / "small_convnet.py"
CHEAP = "shadow(rounds={rounds}, until=1, latent_steps=10, fit_steps=1)"
"""The noise has the height of the paper's at every round; where it lies comes from fewer steps."""


def units(asked: SimpleNamespace) -> list[str]:
    """Name rows and seeds."""
    return list(grouped(asked))


def measure(unit: str, asked: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Train one row with one seed."""
    options = grouped(asked)[unit]
    options.model = f"{MODEL}:make(width={options.width})"
    data, test, _ = load(options)
    half = test.take(list(range(1, len(test), 2)))
    training = settings(options.row, options)
    if options.row == "shadow":
        training = dataclasses.replace(training, defense=CHEAP.format(rounds=options.rounds))
    begun = time.process_time()
    result = run_training(training, dataset=data, test=half)
    last = result.rounds[-1]
    return {
        "row": options.row,
        "seed": options.seed,
        "defense": training.defense,
        "tested_on": len(half),
        "f1": last.f1,
        "accuracy": last.accuracy,
        "f1_by_round": [each.f1 for each in result.rounds if each.f1 is not None],
        "client_seconds": round(sum(each.client_seconds or 0.0 for each in result.rounds), 3),
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show one line a row, its seeds in order."""
    # Results from before provenance are one document with all rows.
    found = sorted((row for each in documents.values() for row in each.get("rows", [each])), key=lambda row: int(row["seed"]))
    lines = []
    for row in (row for row in ROWS if any(each["row"] == row for each in found)):
        own = [each for each in found if each["row"] == row]
        lines.append([row, *(" / ".join(f"{each[name]:.3f}" for each in own) for name in ("f1", "accuracy"))])
    return {"": table("row | F1 by seed | accuracy by seed", lines)}
