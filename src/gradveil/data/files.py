"""`load_data`: one door for built-in names and files of every kind.

| source | read by |
|---|---|
| a built-in name: photos, digits | the registry |
| file.npz | `gradveil.data.npz` |
| file.npy, with labels= | here |
| folder of pictures | `gradveil.data.image_folder` |
| IDX, plain or .gz | `gradveil.data.idx` |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gradveil.data.base import DATASETS, MOST_CLASSES, Dataset
from gradveil.data.idx import is_idx, labels_beside, read_idx
from gradveil.data.image_folder import list_folder, read_images
from gradveil.data.label_files import Table, read_labels, read_npy
from gradveil.data.layout import to_inputs, to_targets
from gradveil.data.masks import to_masks
from gradveil.data.npz import read_npz
from gradveil.errors import UsageError, suggest
from gradveil.study.reading import SPLITS

__all__ = ["load_data"]


@dataclass(frozen=True)
class _Request:
    """Everything `load_data` was asked for."""

    source: str
    labels: Path | None = None
    limit: int | None = None
    split: str | None = None
    layout: str = "auto"
    scale: str = "auto"
    size: tuple[int, int] | None = None
    colour: bool | None = None
    classes: int | None = None
    label_column: str | None = None
    owner_column: str | None = None

    @property
    def path(self) -> Path:
        return Path(self.source).expanduser()


@dataclass(frozen=True)
class _Raw:
    """What a reader found. ``inputs`` is a function of the rows wanted, so that a limit spares reading the others.

    ``rows`` are those of the split asked for; None is all.
    """

    count: int
    inputs: Callable[[list[int]], NDArray[Any]]
    labels: NDArray[Any] | None
    owners: tuple[str, ...] | None = None
    records: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None
    layout: str = "auto"
    rows: list[int] | None = None


def load_data(
    source: str,
    *,
    labels: str | None = None,
    limit: int | None = None,
    split: str | None = None,
    layout: str = "auto",
    scale: str = "auto",
    size: tuple[int, int] | None = None,
    colour: bool | None = None,
    classes: int | None = None,
    label_column: str | None = None,
    owner_column: str | None = None,
) -> Dataset:
    """Load labelled records from a built-in name, a file or a folder.

    Args:
        source: Built-in name, or path of an `.npz`, `.npy`, IDX file or folder of pictures. A built-in name wins over a
            folder of the same name; write ``./photos`` for the folder.
        labels: Label file (.csv, .npy or IDX), where the source does not hold the labels itself.
        limit: Keep at most this many records, spread evenly over the source, so that classes stored one after another all appear.
        split: train, val or test, where the source has splits; None takes train, or the whole where there are none.
        layout: Order of the axes, where it cannot be recognised; see `gradveil.data.layout`.
        scale: How values come to [0, 1]: auto, minmax (over the records kept) or none; see `gradveil.data.layout`.
        size: Height and width to which the pictures of a folder are resized.
        colour: True reads the pictures of a folder in colour, False in grey, None as they are stored.
        classes: Number of classes, where the records do not show all of them.
        label_column: Name of the CSV column or `.npz` array with labels, where it is none of the usual ones.
        owner_column: The same for owners.

    Raises:
        UsageError: In one sentence that says what to change.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}; keep at least one record")
    if split is not None and split not in SPLITS:
        raise UsageError(f"there is no split {split!r}{suggest(split, SPLITS)}")
    label_file = Path(labels).expanduser() if labels else None
    request = _Request(source, label_file, limit, split, layout, scale, size, colour, classes, label_column, owner_column)
    return _builtin(request) if source in DATASETS.names() else _assemble(_read(request), request)


def _builtin(request: _Request) -> Dataset:
    if request != _Request(source=request.source, limit=request.limit):
        raise UsageError(
            f"{request.source!r} is built-in data and takes no setting but limit; write './{request.source}' for a folder"
        )
    data = DATASETS.get(request.source)()
    return data if request.limit is None else data.take(_spread(len(data), request.limit))


def _read(request: _Request) -> _Raw:
    path = request.path
    if not path.exists():
        if path.suffix or len(path.parts) > 1:
            raise UsageError(f"there is no file or folder {request.source!r}")
        hint = suggest(request.source, DATASETS.names())
        raise UsageError(f"{request.source!r} is neither built-in data nor a file or folder here{hint}")
    _refuse_unused(request)
    if path.is_dir():
        return _read_folder(request)
    if path.suffix.lower() == ".npz":
        return _read_npz(request)
    if path.suffix.lower() == ".npy":
        return _read_array(request, read_npy(path), request.labels)
    if is_idx(path):
        return _read_array(request, read_idx(path), request.labels or labels_beside(path))
    packed = path.suffix.lower() in (".zip", ".tar", ".tgz", ".7z", ".rar")
    cure = "unpack it first and give the folder" if packed else "give an .npz, a folder of pictures, a .npy, or an IDX file"
    raise UsageError(f"cannot tell what {request.source!r} is; {cure}")


def _refuse_unused(request: _Request) -> None:
    """Raise for settings that this kind of source would ignore."""
    folder, archive = request.path.is_dir(), request.path.suffix.lower() == ".npz"
    if not folder and (request.size is not None or request.colour is not None):
        raise UsageError(f"size and colour are for folders of pictures; {request.source!r} is a file: prepare its arrays instead")
    if not folder and not archive and request.split is not None:
        raise UsageError(f"{request.source!r} has no splits; leave out split={request.split!r} and give the file you want")
    if folder and request.layout != "auto":
        raise UsageError(f"layout is for arrays; {request.source!r} is a folder of pictures: leave out layout={request.layout!r}")
    if request.size is not None and min(request.size) < 1:
        raise UsageError(f"size is {request.size}; give a positive height and width")


def _read_folder(request: _Request) -> _Raw:
    listing = list_folder(
        request.path, request.labels, request.split, label_column=request.label_column, owner_column=request.owner_column
    )

    def read(rows: list[int]) -> NDArray[Any]:
        return read_images(listing.root, tuple(listing.files[row] for row in rows), size=request.size, colour=request.colour)

    return _Raw(len(listing.files), read, listing.labels, listing.owners, listing.files, layout="nhwc", rows=listing.rows)


def _read_npz(request: _Request) -> _Raw:
    # The column names are the CSV's where there is one, else the archive's.
    csv = request.labels is not None
    archive = read_npz(
        request.path,
        request.split,
        label_column=None if csv else request.label_column,
        owner_column=None if csv else request.owner_column,
    )
    owners = None if archive.owners is None else tuple(str(owner) for owner in archive.owners.reshape(-1))
    raw = _Raw(_rows(archive.inputs), lambda rows: archive.inputs[rows], archive.labels, owners, class_names=archive.class_names)
    return _with_table(raw, request, request.labels)


def _read_array(request: _Request, array: NDArray[Any], labels: Path | None) -> _Raw:
    return _with_table(_Raw(_rows(array), lambda rows: array[rows], None), request, labels)


def _rows(array: NDArray[Any]) -> int:
    return int(array.shape[0]) if array.ndim else 0


def _with_table(raw: _Raw, request: _Request, labels: Path | None) -> _Raw:
    """Add what a label file says; its rows follow the order of the records."""
    if labels is None:
        return raw
    table: Table = read_labels(labels, label_column=request.label_column, owner_column=request.owner_column)
    return dataclasses.replace(raw, labels=table.labels, owners=table.owners or raw.owners, records=table.files or raw.records)


def _assemble(raw: _Raw, request: _Request) -> Dataset:
    name = request.source
    if raw.labels is None:
        raise UsageError(f"{name!r} has no labels; give them with labels=FILE (.csv, .npy or IDX), or as masks in an .npz")
    if raw.count == 0:
        raise UsageError(f"{name!r} is empty; give at least one record")
    dense = raw.labels.ndim >= 3
    targets, words = (to_masks(raw.labels, name), ("foreground",)) if dense else to_targets(raw.labels, name)
    for what, found in (("labels", len(targets)), ("owners", len(raw.owners or ())), ("record names", len(raw.records or ()))):
        if found != raw.count and (what == "labels" or found):
            raise UsageError(f"{name!r}: {raw.count} inputs but {found} {what}; give one per record, in the same order")
    # Counted over all records: neither limit nor split may change how many outputs the model needs.
    classes = request.classes or (1 if dense else max(int(targets.max()) + 1, len(words or ()), len(raw.class_names or ())))
    layout = raw.layout if request.layout == "auto" else request.layout
    pool = list(range(raw.count)) if raw.rows is None else raw.rows
    rows = pool if request.limit is None else [pool[index] for index in _spread(len(pool), request.limit)]
    return Dataset(
        name=name,
        inputs=to_inputs(raw.inputs(rows), name, layout=layout, scale=request.scale),
        targets=targets[rows],
        classes=classes,
        class_names=_class_names(classes, raw.class_names if dense and raw.class_names else words or raw.class_names),
        records=tuple(raw.records[row] for row in rows) if raw.records else tuple(f"record-{row}" for row in rows),
        owners=tuple(raw.owners[row] for row in rows) if raw.owners else None,
    )


def _class_names(classes: int, known: tuple[str, ...] | None) -> tuple[str, ...]:
    # Validation refuses more, with a sentence; here only the names must not fill the memory first.
    classes = min(classes, MOST_CLASSES)
    names = (known or ())[:classes] if classes > 0 else ()
    return (*names, *(str(number) for number in range(len(names), classes)))


def _spread(count: int, limit: int) -> list[int]:
    """Return at most ``limit`` of ``count`` rows, evenly spread."""
    kept = min(count, limit)
    return [index * count // kept for index in range(kept)]
