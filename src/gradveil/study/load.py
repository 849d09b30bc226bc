"""Read a results folder: strict about its format, patient with files that are half-written or unknown.

A cell that cannot be read counts as not done, and a note says so; a folder of another format version is refused. A training whose
file is missing or damaged costs its curve and its time, nothing else: the cell holds the numbers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from gradveil.errors import UsageError
from gradveil.study.codec import Malformed, decode, read_json
from gradveil.study.results import CellResult, Timing, Utility
from gradveil.study.run_result import Run
from gradveil.study.training_result import TrainingRecord, TrainingResult, TrainingTiming

__all__ = ["is_training", "load_run", "load_training", "without_folders"]

T = TypeVar("T")
KEY = re.compile(r"[0-9A-Za-z_-]{1,64}")
TRAINING = "training.json"


def load_run(folder: Path | str, *, share: bool = False) -> Run:
    """Return what ``folder`` holds.

    Args:
        folder: The folder that ``gradveil audit --out`` wrote.
        share: Whether the result may leave the building; for user data, labels are then dropped and
            folders cut from every path.

    Raises:
        UsageError: If the folder is missing, holds no finished cell, or was written in a format this version does not know.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"there is no results folder {str(folder)!r}; `gradveil audit --out DIR` makes one")
    path = folder / "run.json"
    if not path.is_file():
        raise UsageError(f"{str(folder)!r} is no results folder: it has no run.json; `gradveil audit --out DIR` makes one")
    raw = _whole(path, Run.format, "audit")
    redact = share and raw.get("builtin_data") is not True
    run = decode(Run, without_folders(raw) if redact else raw, path.name)
    notes: list[str] = []
    found = [_load_cell(folder / "cells", key, redact, notes) for key in run.keys]
    cells = tuple(cell for cell in found if cell is not None)
    notes += _strangers(folder / "cells", run.keys)
    if not cells:
        why = f" ({notes[0].rstrip('.')})" if notes else ""
        raise UsageError(
            f"no cell in {str(folder)!r} is finished{why}; start or continue it with `gradveil audit --out {folder}`"
        )
    return replace(run, cells=cells, notes=tuple(notes), out=folder)


def is_training(folder: Path) -> bool:
    """Whether a folder holds a training and no audit."""
    return (folder / TRAINING).is_file() and not (folder / "run.json").is_file()


def load_training(folder: Path, *, share: bool = False) -> TrainingResult:
    """Return the training a folder holds, without its weights.

    Args:
        folder: The folder that ``gradveil train --out`` wrote.
        share: Whether the result may leave the building; for user data, folders are then cut from every path.

    Raises:
        UsageError: The file is damaged, of another format, or has no round yet.
    """
    raw = _whole(folder / TRAINING, TrainingResult.format, "train")
    found = decode(TrainingResult, raw, TRAINING)
    if not found.rounds:
        raise UsageError(
            f"the training in {str(folder)!r} has no finished round yet; the same `gradveil train` command continues it"
        )
    return decode(TrainingResult, without_folders(raw), TRAINING) if share and not found.builtin_data else found


def _whole(path: Path, known: str, command: str) -> dict[str, Any]:
    try:
        raw = read_json(path)
    except Malformed as error:
        raise UsageError(f"{str(path)!r} is damaged: no JSON object; run the same `gradveil {command}` command again") from error
    _check_format(path, raw.get("format"), known)
    return raw


def _check_format(path: Path, found: object, known: str) -> None:
    """Refuse a file of another format than the one this version reads."""
    if found != known:
        raise UsageError(f"{str(path)!r} has format {found!r} and this gradveil reads {known!r}; use the version that wrote it")


def _load_cell(folder: Path, key: str, redact: bool, notes: list[str]) -> CellResult | None:
    path = folder / f"{key}.json"
    if not KEY.fullmatch(key):
        notes.append("run.json lists a cell under a name that is no key; it was left out.")
        return None
    if not path.is_file():
        return None
    try:
        raw = read_json(path)
        _check_format(path, raw.get("format"), CellResult.format)
        cell = decode(CellResult, without_folders(raw) if redact else raw, path.name)
    except Malformed as error:
        notes.append(f"{error}, so this cell counts as not done; delete the file and the same command measures it again.")
        return None
    pictures = path.with_suffix(".npz")
    return replace(
        cell,
        key=key,
        records=tuple(replace(record, label=None) for record in cell.records) if redact else cell.records,
        utility=_with_curves(cell.utility, folder.parent / "utility") if cell.utility is not None else None,
        timing=_beside(Timing, path.with_suffix(".timing.json")) or Timing(),
        pictures=pictures if pictures.is_file() else None,
    )


def _beside(cls: type[T], path: Path, known: str | None = None) -> T | None:
    """Return what a file holds that one can do without; None where it is missing, damaged, or of another format."""
    try:
        raw = read_json(path)
        return decode(cls, raw, path.name) if raw.get("format") == known else None
    except Malformed:
        return None


def _with_curves(utility: Utility, folder: Path) -> Utility:
    own, others = ([_load_training_of(folder, key) for key in keys] for keys in (utility.trainings, utility.baseline))
    same = bool(utility.trainings) and utility.trainings == utility.baseline
    curves = tuple(each.curve for each in own if each is not None)
    return replace(utility, curves=curves, time_ratio=1.0 if same else _time_ratio(own, others))


def _load_training_of(folder: Path, key: str) -> TrainingRecord | None:
    found = _beside(TrainingRecord, folder / f"{key}.json", TrainingRecord.format) if KEY.fullmatch(key) else None
    timing = _beside(TrainingTiming, folder / f"{key}.timing.json") if found is not None else None
    return found if found is None or timing is None else replace(found, timing=timing)


def _time_ratio(own: Sequence[TrainingRecord | None], undefended: Sequence[TrainingRecord | None]) -> float | None:
    """Return client time over that without the defense: best times of all seeds where they were measured in turns.

    Other work on the machine only ever makes a time longer, so the best of several is the nearest to the truth. Where nothing was
    measured in turns, it is the time that the clients of both trainings took.
    """
    timed = [each.timing.latency for each in own if each is not None and each.timing.latency is not None]
    timed = [each for each in timed if each.defended_ms and each.undefended_ms]
    if timed:
        return min(each.defended_ms for each in timed) / min(each.undefended_ms for each in timed)
    pairs = [(a.curve.client_seconds, b.curve.client_seconds) for a, b in zip(own, undefended, strict=False) if a and b]
    ratios = [a / b for a, b in pairs if a and b]
    return statistics.median(ratios) if ratios else None


def _strangers(folder: Path, keys: tuple[str, ...]) -> list[str]:
    known = {f"{key}{suffix}" for key in keys for suffix in (".json", ".timing.json", ".npz")}
    found = (
        sorted(path.name for path in folder.glob("*") if path.name not in known and not path.name.startswith("."))
        if folder.is_dir()
        else []
    )
    if not found:
        return []
    # Names are not repeated: on user data a stray file may be named after a record.
    files = "1 file that does" if len(found) == 1 else f"{len(found)} files that do"
    return [f"The folder holds {files} not belong to this run (left from another plan, or half-written); not used here."]


QUOTED_PATH = re.compile(r"""(["'])(?:~|[A-Za-z]:)?[/\\][^"']*[/\\]""")
BARE_PATH = re.compile(r"""(?:~|(?<![\w.:/\\~>…])[A-Za-z]:(?=\\)|(?<![\w.:/\\~>…]))[/\\](?:[^\s"'/\\]+[/\\])+""")


def without_folders(value: Any) -> Any:
    """Cut the folders from every absolute path, which may name a person, a project or a patient.

    >>> without_folders("gradveil audit --data /home/ada/ward-7/scans.npz --seed 0")
    'gradveil audit --data …/scans.npz --seed 0'
    """
    if isinstance(value, dict):
        return {without_folders(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if isinstance(value, str):
        return BARE_PATH.sub("…/", QUOTED_PATH.sub(r"\1…/", value))
    return value
