"""What a run is: its provenance, the cards of everything it used, and what it did not test."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import gradveil
from gradveil.attacks import resolve
from gradveil.data import DATASETS
from gradveil.defenses import build_defense, parts_of
from gradveil.metrics import METRICS
from gradveil.registry import import_object, parse_call, split_chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradveil.audit.cells import Cell
    from gradveil.audit.plan import Plan

__all__ = ["NOT_TESTED", "code_version", "describe_cells", "describe_run", "own_files_digest", "provenance"]

NOT_TESTED = (
    "membership inference: whether a record was used at all",
    "property inference: what the data have in common",
    "what the final trained model remembers",
    "attackers who alter the model they send",
    "generative and learned attackers with priors trained on similar data",
    "attackers stronger or more patient than the named ensemble",
)


TRAINING_ROOMS = ("", "data", "models", "learning", "defenses", "generators", "metrics", "risk", "wire", "federation")
"""What decides a training; ``risk`` too, where guided noise gets its bases and a training its guarantee."""


@cache
def code_version(*, attacks: bool = True) -> str:
    """Return a digest of the package's own source: results of other code are never mixed in.

    Args:
        attacks: Whether attacks and their judging play a part, as in a cell; in a training they do not.
    """
    digest = hashlib.sha256()
    root = Path(gradveil.__file__).parent
    rooms = (*TRAINING_ROOMS, "attacks") if attacks else TRAINING_ROOMS
    deciding = [path for room in rooms for path in sorted((root / room).glob("*.py"))]
    # Of the audit itself only what decides a number counts: a better plan reader must not make old results worthless.
    judging = ("cells", "subjects", "parties", "measure", "judge", "limits", "checks", "certified", "floors", "risks", "regions")
    deciding += [root / "audit" / f"{name}.py" for name in (judging if attacks else ("trainings",))]
    deciding += [root / "risk" / "calibration.json"] if attacks else []
    # The cards of the shipped networks hold the hashes of their weights.
    deciding += sorted((root / "generators" / "weights").glob("*.json"))
    for path in deciding:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def own_files_digest(spellings: Iterable[str]) -> str:
    """Return a digest of the user's files that spellings name: code, and weights of networks; imports are not followed.

    A run that goes on after such a file changed would mix two methods under one name.
    """
    digest = hashlib.sha256()
    for spelling in (part for text in spellings for part in split_chain(text)):
        name, settings = parse_call(spelling)
        module, colon, _ = name.rpartition(":")
        if colon and not module.endswith(".py"):
            import_object(name)
            module = getattr(sys.modules[module], "__file__", None) or ""
        files = [Path(module)] if module else []
        for value in (value for value in settings.values() if isinstance(value, str)):
            named = Path(value).expanduser()
            # A network may be named by its weights or by the card beside them; each decides.
            both = (named.with_suffix(".json"), named.with_suffix(".safetensors"))
            files += [path for path in (both if named.suffix in (".json", ".safetensors") else (named,)) if path.is_file()]
        for path in files:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def describe_run(plan: Plan, keys: list[str], command: str) -> dict[str, Any]:
    """Return run.json of docs/results-format.md for a plan."""
    return describe_cells(plan.cells(), keys, command, plan.title) | {"plan": plan.as_dict()}


def describe_cells(cells: Sequence[Cell], keys: list[str], command: str, title: str) -> dict[str, Any]:
    """Return run.json for a list of cells."""
    parts = {part.card.name: part.card for cell in cells for part in parts_of(build_defense(cell.defense))}
    attacks = {m.attack.card.name: m.attack.card for cell in cells for m in resolve(cell.ensemble, cell.threat().sees).members}
    return {
        "format": "gradveil-run-1",
        "version": gradveil.__version__,
        "title": title,
        "command": command,
        "plan": {},
        "cells": keys,
        "builtin_data": all(cell.data in DATASETS.names() for cell in cells),
        "not_tested": list(NOT_TESTED),
        "provenance": provenance(cells[0].seed, cells[0].device),
        "cards": {
            "defenses": {name: parts[name].as_dict() for name in sorted(parts)},
            "attacks": {name: attacks[name].as_dict() for name in sorted(attacks)},
            "metrics": {card.name: card.as_dict() for card in METRICS.cards()},
        },
    }


COMMIT = "GRADVEIL_COMMIT"


def provenance(seed: int, device: str) -> dict[str, Any]:
    """Return what a result came from: code, versions, machine, seed and time. Audits and trainings note the same."""
    name = torch.cuda.get_device_name(0) if device == "cuda" else device
    return {
        "gradveil": gradveil.__version__,
        "code": code_version(),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": name,
        "cores": os.cpu_count(),
        "threads": 1,
        "seed": seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str:
    """Return the commit of the code that runs; where it was copied without its history, what the one who copied it says."""
    elsewhere = os.environ.get(COMMIT) or "unknown"
    try:
        root = Path(gradveil.__file__).parent
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return elsewhere
    return done.stdout.strip() or elsewhere
