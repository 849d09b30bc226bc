"""Folders of pictures: one sub-folder per class, or a flat folder with a labels CSV.

    data/cat/1.png data/dog/2.png                    class = sub-folder
    data/train/cat/1.png data/val/cat/9.png          the same, behind splits
    data/1.png data/2.png data/labels.csv            file,label[,owner]; the CSV may lie elsewhere and list sub-folders

Pictures are read as 8-bit grey or colour, as they are stored; if any is colour, all become colour.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradveil.data.label_files import read_table
from gradveil.errors import UsageError
from gradveil.study.reading import SPLITS

__all__ = ["Listing", "list_folder", "read_images"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
GREY = ("1", "L", "LA")
COLOUR = ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")


@dataclass(frozen=True)
class Listing:
    """Which pictures there are, of all splits, so that classes are numbered alike in each.

    Attributes:
        root: The folder that file names are relative to.
        files: One name per picture.
        labels: Numbers or words, one per picture.
        owners: One per picture, or None.
        rows: Which pictures belong to the split asked for.
    """

    root: Path
    files: tuple[str, ...]
    labels: NDArray[Any]
    owners: tuple[str, ...] | None
    rows: list[int]


def list_folder(
    folder: Path,
    labels: Path | None = None,
    split: str | None = None,
    *,
    label_column: str | None = None,
    owner_column: str | None = None,
) -> Listing:
    """Find the pictures of a folder and their labels, without opening a picture.

    Args:
        folder: With a sub-folder per class, or with a table.
        labels: The table; None takes ``labels.csv`` in the folder where there is one.
        split: train, val or test; None takes train, or everything where there are no splits.
        label_column: Name of the table's label column, where it is none of the usual ones.
        owner_column: The same for owners.
    """
    beside = folder / "labels.csv"
    if labels is None and beside.is_file():
        labels = beside
    if labels is not None:
        return _from_table(folder, labels, split, label_column, owner_column)
    inside = {entry.name for entry in _sorted(folder) if entry.is_dir()}
    # Sub-folders are splits only where all of them are: a class may be called test.
    divided = bool(inside) and (inside <= set(SPLITS) or split in inside)
    roots = [folder / name for name in SPLITS if name in inside] if divided else [folder]
    found = [(entry.name, file) for root in roots for entry in _sorted(root) if entry.is_dir() for file in _pictures(entry)]
    if not found:
        flat = any(_is_picture(entry) for entry in _sorted(folder))
        cure = "give the labels of its pictures as a CSV with the columns file,label" if flat else "it holds no pictures"
        raise UsageError(f"folder {str(folder)!r} has no sub-folder per class; {cure}")
    files = tuple(file.relative_to(folder).as_posix() for _, file in found)
    parts = [name.split("/")[0] for name in files] if divided else None
    return Listing(folder, files, np.array([word for word, _ in found]), None, _rows(folder, len(files), parts, split))


def _from_table(folder: Path, path: Path, split: str | None, label_column: str | None, owner_column: str | None) -> Listing:
    if not path.is_file():
        raise UsageError(f"there is no label file {str(path)!r}")
    table = read_table(path, label_column=label_column, owner_column=owner_column)
    if table.files is None:
        raise UsageError(f"{str(path)!r} does not say which row is which picture; add a column called file")
    first = [name.split("/")[0] for name in table.files]
    parts = list(table.splits) if table.splits else first if set(first) <= set(SPLITS) else None
    rows = _rows(path, len(table.files), parts, split)
    for row in rows:
        if not (folder / table.files[row]).is_file():
            raise UsageError(
                f"{str(path)!r} lists {table.files[row]!r}, which is not in {str(folder)!r}; correct the row or add the picture"
            )
    return Listing(folder, table.files, table.labels, table.owners, rows)


def _rows(source: Path, count: int, parts: list[str] | None, split: str | None) -> list[int]:
    """Return the rows of a split: the one asked for, else train, else, without splits, all."""
    if parts is None and split is None:
        return list(range(count))
    wanted = split or ("train" if "train" in (parts or ()) else (parts or [""])[0])
    rows = [row for row, part in enumerate(parts or ()) if part == wanted]
    if not rows:
        raise UsageError(f"{str(source)!r} has no pictures of split {wanted!r}; leave out split, or sort them into {wanted}/")
    return rows


def _sorted(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def _pictures(folder: Path) -> list[Path]:
    found = (Path(base) / name for base, _, names in os.walk(folder) for name in names if not name.startswith("."))
    return sorted(path for path in found if _is_picture(path))


def read_images(
    root: Path, files: tuple[str, ...], *, size: tuple[int, int] | None = None, colour: bool | None = None
) -> NDArray[np.uint8]:
    """Return the pictures as (N, H, W, C), with C = 1 for grey and 3 for colour.

    Args:
        root: The folder that file names are relative to.
        files: In the order wanted.
        size: Height and width to resize every picture to; None refuses pictures of different sizes.
        colour: True for colour, False for grey, None as stored. WebP and many medical JPEGs store grey pictures as colour.
    """
    pictures = [_read(root / name, size, colour) for name in files]
    first = pictures[0].shape[:2]
    for name, picture in zip(files, pictures, strict=True):
        if picture.shape[:2] != first:
            raise UsageError(
                f"pictures differ in size: {name!r} is {_size(picture)}, the first one, {files[0]!r}, is {_size(pictures[0])}; "
                "resize them to one size, or ask for it with size=(height, width), on the command line --read size=64x64"
            )
    channels = max(picture.shape[2] for picture in pictures)
    return np.stack([np.broadcast_to(picture, (*first, channels)) for picture in pictures])


def _size(picture: NDArray[np.uint8]) -> str:
    return f"{picture.shape[1]}×{picture.shape[0]}"


def _read(path: Path, size: tuple[int, int] | None, colour: bool | None) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode not in (*GREY, *COLOUR):
                raise UsageError(
                    f"{str(path)!r} has pixels of kind {image.mode!r}; save it with 8 bits per colour, or put the numbers "
                    "into a .npz and use scale='minmax'"
                )
            grey = image.mode in GREY if colour is None else not colour
            plain = image.convert("L" if grey else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(
            f"cannot read the picture {str(path)!r}; it is damaged or of an unknown kind: replace or remove it"
        ) from error
    if size is not None:
        plain = plain.resize((size[1], size[0]), Image.Resampling.LANCZOS)
    pixels = np.asarray(plain)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
