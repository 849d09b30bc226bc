"""Where a result comes from: a digest of the code, the commit, versions, machine and time."""

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
from gradveil.registry import import_object, parse_call, split_chain

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["code_version", "digest_of", "own_files_digest", "provenance"]

TRAINING_ROOMS = ("data", "models", "networks", "learning", "spectra", "proofs", "wire", "defenses", "client", "federation")
"""Rooms whose code decides a training, beside the foundations; ``spectra``, because guided noise gets its bases there."""
TRAINING_FILES = ("study/local_training.py", "study/federation.py", "study/training.py", "run/trainings.py")
CELL_ROOMS = ("attacks", "metrics", "risk", "audit")
CELL_FILES = ("study/local_training.py", "study/cell.py")
"""Of settings only what decides a number counts: a better reader of plans must not make old results worthless."""


@cache
def code_version(*, attacks: bool = True) -> str:
    """Return a digest of the package's own source: results of other code are never mixed in.

    Args:
        attacks: Whether attacks and their judging play a part, as in a cell; in a training they do not.
    """
    return digest_of(Path(gradveil.__file__).parent, attacks=attacks)


def digest_of(root: Path, *, attacks: bool) -> str:
    """Return the digest of a package folder: foundations, and all that decides a cell or a training, sub-folders included."""
    deciding = sorted(root.glob("*.py"))
    for room in (*TRAINING_ROOMS, *(CELL_ROOMS if attacks else ())):
        # Cards of shipped networks hold the hashes of their weights; the risk score has a calibration that was measured.
        deciding += sorted(path for path in (root / room).rglob("*") if path.suffix in (".py", ".json"))
    deciding += [root / name for name in (CELL_FILES if attacks else TRAINING_FILES)]
    digest = hashlib.sha256()
    for path in deciding:
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
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
            named = Path(value.removesuffix(".xz")).expanduser()
            # A network may be named by its weights, plain or packed, or by the card beside them; each decides.
            all_of_it = [named.with_suffix(end) for end in (".json", ".safetensors", ".safetensors.xz")]
            files += [path for path in (all_of_it if named in all_of_it else (Path(value).expanduser(),)) if path.is_file()]
        for path in files:
            digest.update(path.read_bytes())
    return digest.hexdigest()


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
    """Return the commit of the code that runs: what the one who copied it says, or git, which may know of another history."""
    told = os.environ.get(COMMIT)
    if told:
        return told
    try:
        root = Path(gradveil.__file__).parent
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"
