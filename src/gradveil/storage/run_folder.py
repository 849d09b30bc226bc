"""The results folder: whole files only, one cell at a time, so that a run can be killed at any moment and continued.

A cell is three files, and its JSON is written last: where it is, the other two are whole. Every file is written beside its place,
brought to the disk, and renamed. A JSON file that cannot be read all the same (a full disk, an edit by hand) is put aside under
``*.corrupt``, said so, and the cell is measured again. Cells are keyed by content, so runs of different plans share a folder.
Trainings, which measure utility, and points of power curves are kept in the same way in folders of their own; a cell gets its
utility and its power when they are done.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradveil.errors import GradveilError, UsageError
from gradveil.storage.files import json_bytes, locked_folder, write_whole
from gradveil.study.codec import decode, encode
from gradveil.study.evidence import Power
from gradveil.study.results import CellResult, Check, Utility
from gradveil.study.run_result import Run
from gradveil.study.rung import RungRecord
from gradveil.study.training_result import TrainingRecord

__all__ = ["Store", "npz_bytes"]

logger = logging.getLogger("gradveil")
KEY = re.compile(r"[0-9a-f]{16}")
R = TypeVar("R", CellResult, TrainingRecord, RungRecord)


class Store:
    """A results folder as docs/results-format.md describes it."""

    def __init__(self, out: Path) -> None:
        """Make the folder where it is missing.

        Raises:
            UsageError: It cannot be made or written to, or holds a training.
        """
        self.out = Path(out)
        if (self.out / "training.json").is_file() and not (self.out / "run.json").is_file():
            # Both would write report.html, and the later one would hide the other.
            raise UsageError(f"{str(self.out)!r} holds a training of `gradveil train`; choose another folder with --out")
        self.notes: list[str] = []
        try:
            (self.out / "cells").mkdir(parents=True, exist_ok=True)
            probe = self.out / f".writable.{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            self._refuse(self.out, error)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs out of the folder inside the block; what a killed run left behind is no obstacle.

        Raises:
            UsageError: Another run is at work here.
        """
        with locked_folder(self.out):
            yield

    def read_cell(self, key: str) -> CellResult | None:
        """Return a finished cell, or None where it is missing; a damaged one is put aside and counts as missing."""
        return self._read(self._path("cells", key, ".json"), key, CellResult)

    def read_training(self, key: str) -> TrainingRecord | None:
        """Return a finished training, or None where it is missing; a damaged one is put aside and counts as missing."""
        return self._read(self._path("utility", key, ".json"), key, TrainingRecord)

    def read_rung(self, key: str) -> RungRecord | None:
        """Return a finished point of a power curve, or None where it is missing; a damaged one counts as missing."""
        return self._read(self._path("power", key, ".json"), key, RungRecord)

    def _read(self, path: Path, key: str, kind: type[R]) -> R | None:
        try:
            found = json.loads(path.read_bytes())
            if isinstance(found, dict) and found.get("format") == kind.format and found.get("key") == key:
                return decode(kind, found, path.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
        except (ValueError, RecursionError):
            pass  # half-written or damaged
        self._put_aside(path)
        return None

    def write_cell(self, result: CellResult, pictures: Mapping[str, NDArray[Any]]) -> None:
        """Write a finished cell: pictures, then timing, then the result, which says that it is whole; its partial work goes.

        Args:
            result: Under its key.
            pictures: Arrays by name; none are written where there are none.
        """
        texts = {".timing.json": json_bytes(result.timing), ".json": json_bytes(result)}
        if pictures:
            self._write(self._path("cells", result.key, ".npz"), npz_bytes(pictures))
        for suffix, text in texts.items():
            self._write(self._path("cells", result.key, suffix), text)
        shutil.rmtree(self.partial_folder(result.key), ignore_errors=True)

    def clear_shelves(self, unfinished: Collection[str]) -> None:
        """Remove what cells kept on the way, but for those that this run will finish.

        They hold reconstructions, so none may stay because a run was killed just before it tidied up, or because a changed plan,
        seed or code gave its cells other keys.
        """
        for folder in (*(self.out / "cells").glob("*.work"), *(self.out / "power").glob("*.work")):
            if folder.name.removesuffix(".work") not in unfinished:
                shutil.rmtree(folder, ignore_errors=True)

    def partial_folder(self, key: str, room: str = "cells") -> Path:
        """Return where a cell, or a point of a curve, keeps what its attackers found until it is done."""
        return self._path(room, key, ".work")

    def write_rung(self, record: RungRecord) -> None:
        """Write a finished point of a power curve; its partial work goes. Its pictures are not kept at all."""
        self._write(self._path("power", record.key, ".json"), json_bytes(record))
        shutil.rmtree(self.partial_folder(record.key, "power"), ignore_errors=True)

    def give_power(self, key: str, power: Power, checks: Sequence[Check]) -> None:
        """Write a power curve and its canaries into a finished cell; one that has them already or is not done is left alone."""
        cell = self.read_cell(key)
        if cell is None:
            return
        names = {check.name for check in checks}
        given = replace(cell, power=power, checks=(*(each for each in cell.checks if each.name not in names), *checks))
        if encode(given) != encode(cell):
            self._write(self._path("cells", key, ".json"), json_bytes(given))

    def give_utility(self, key: str, utility: Utility) -> None:
        """Write what trainings found into a finished cell; one that has it already or is not done is left alone."""
        cell = self.read_cell(key)
        if cell is not None and encode(cell.utility) != encode(utility):
            self._write(self._path("cells", key, ".json"), json_bytes(replace(cell, utility=utility)))

    def write_training(self, record: TrainingRecord) -> None:
        """Write a finished training: timing, then the record, which says that it is whole; its checkpoints go."""
        for suffix, content in ((".timing.json", record.timing), (".json", record)):
            self._write(self._path("utility", record.key, suffix), json_bytes(content))
        shutil.rmtree(self.work_folder(record.key), ignore_errors=True)

    def work_folder(self, key: str) -> Path:
        """Return where a training keeps its checkpoints until it is done."""
        return self._path("utility", key, ".work")

    def write_run(self, run: Run) -> None:
        """Write run.json.

        Raises:
            UsageError: The one that is there is of a version that this one would not understand.
        """
        before = _format_of(self.out / "run.json")
        if before not in ("", run.format):
            raise UsageError(f"{str(self.out)!r} holds results in another format ({before}); choose another folder with --out")
        self._write(self.out / "run.json", json_bytes(run))

    def _path(self, room: str, key: str, suffix: str) -> Path:
        if not KEY.fullmatch(key):
            raise GradveilError(f"{key!r} is no key of a cell: 16 hex digits are needed")
        return self.out / room / f"{key}{suffix}"

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            self._refuse(path, error)

    def _put_aside(self, path: Path) -> None:
        aside = next(
            name for name in (path.with_name(f"{path.name}.corrupt{n or ''}") for n in range(10_000)) if not name.exists()
        )
        try:
            path.replace(aside)
        except OSError as error:
            self._refuse(path, error)
        note = f"{path.name} was half-written or damaged; it is kept as {aside.name}, and what it held is measured again"
        self.notes.append(note)
        logger.warning(note)

    def _refuse(self, path: Path, error: OSError) -> NoReturn:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot write to {str(path)!r}: {reason}; choose another folder with --out, or make room; finished cells are kept"
        ) from error


def _format_of(path: Path) -> str:
    """Return the format a JSON file says it has; nothing where it is missing, damaged or says none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return ""
    return str(found.get("format", "")) if isinstance(found, dict) else ""


def npz_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return arrays as the bytes of an `.npz`: the same arrays give the same bytes, whatever the time or their order."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in sorted(arrays):
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(arrays[name]), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
            archive.writestr(info, member.getvalue())
    return buffer.getvalue()
