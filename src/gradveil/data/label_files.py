"""Label files: CSV with a header, `.npy`, or IDX; and the table a CSV of an image folder gives.

A CSV needs a header. Its label column is called label, class, target or y; an owner column, where there is one, owner,
patient, subject, writer, speaker, client or user (also with ``_id``). Any other name can be given.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradveil.data.idx import read_idx
from gradveil.errors import UsageError, suggest

__all__ = ["OWNER_NAMES", "Table", "read_labels", "read_npy", "read_table"]

FILE_NAMES = ("file", "filename", "file_name", "image", "path")
LABEL_NAMES = ("label", "labels", "class", "target", "y")
OWNER_NAMES = ("owner", "patient", "subject", "writer", "speaker", "client", "user")


@dataclass(frozen=True)
class Table:
    """Columns of a label file, one entry per record; None where the file has no such column."""

    labels: NDArray[Any]
    owners: tuple[str, ...] | None = None
    files: tuple[str, ...] | None = None
    splits: tuple[str, ...] | None = None


def read_labels(path: Path, *, label_column: str | None = None, owner_column: str | None = None) -> Table:
    """Read a label file of any kind."""
    if not path.is_file():
        raise UsageError(f"there is no label file {str(path)!r}")
    if path.suffix.lower() == ".csv":
        return read_table(path, label_column=label_column, owner_column=owner_column)
    if path.suffix.lower() == ".npy":
        return Table(read_npy(path))
    if path.suffix.lower() in (".txt", ".json", ".tsv", ".xlsx", ".npz"):
        raise UsageError(f"cannot read labels from {str(path)!r}; give a .csv with a header, a .npy, or an IDX file")
    return Table(read_idx(path))


def read_npy(path: Path) -> NDArray[Any]:
    """Read one array without ever unpickling."""
    try:
        with path.open("rb") as handle:
            array = np.load(handle, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UsageError(f"cannot read {str(path)!r}: it is damaged, or holds Python objects, which are never loaded") from error
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{str(path)!r} is not one array; rename it to .npz if it is an archive")
    return array


def read_table(path: Path, *, label_column: str | None = None, owner_column: str | None = None) -> Table:
    """Read a CSV with a header: a label column, and file and owner columns where there are any."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle, strict=True)
            header = list(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {str(path)!r} as CSV ({error}); save it as UTF-8 with commas") from error
    if not rows:
        raise UsageError(f"{str(path)!r} has no rows; write a header such as file,label and one row per record")
    label = _column(path, header, label_column, LABEL_NAMES, "label_column")
    if label is None:
        raise UsageError(
            f"{str(path)!r} has the columns {', '.join(header)}, none of which is called label; rename one, or "
            "name it with label_column=NAME, on the command line --read label_column=NAME"
        )
    owner = _column(path, header, owner_column, _with_id(OWNER_NAMES), "owner_column")
    file = _column(path, header, None, FILE_NAMES, "")
    split = _column(path, header, None, ("split",), "")
    for number, row in enumerate(rows, start=2):
        if any(row[column] in (None, "") for column in (label, owner, file, split) if column):
            raise UsageError(
                f"{str(path)!r}, line {number}: a cell is empty; fill in {', '.join(c for c in (file, label, owner, split) if c)}"
            )
    return Table(
        labels=np.array([row[label] for row in rows]),
        owners=tuple(row[owner] for row in rows) if owner else None,
        files=tuple(row[file] for row in rows) if file else None,
        splits=tuple(row[split].strip().lower() for row in rows) if split else None,
    )


def _with_id(names: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, *(f"{name}_id" for name in names), *(f"{name}id" for name in names))


def _column(path: Path, header: list[str], asked: str | None, known: tuple[str, ...], option: str) -> str | None:
    """Return the column asked for, which must exist, or the first with a known name, or None."""
    if asked is not None:
        if asked not in header:
            raise UsageError(f"{str(path)!r} has no column {asked!r}, as {option} asks{suggest(asked, header)}")
        return asked
    return next((column for name in known for column in header if column.strip().lower() == name), None)
