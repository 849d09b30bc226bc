"""IDX, the format MNIST and its relatives come in, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradveil.errors import UsageError

__all__ = ["is_idx", "labels_beside", "read_idx"]

# Third byte of the file; all numbers are big-endian.
DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP = b"\x1f\x8b"


def _content(path: Path, size: int = -1) -> bytes:
    """Return the first ``size`` bytes, unzipped if need be."""
    try:
        with path.open("rb") as handle:
            zipped = handle.read(2) == GZIP
        if zipped:
            with gzip.open(path, "rb") as unzipped:
                return unzipped.read(size)
        with path.open("rb") as handle:
            return handle.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}; copy or download it again") from error


def is_idx(path: Path) -> bool:
    """Tell by its first bytes whether a file is IDX."""
    magic = _content(path, 4)
    return len(magic) == 4 and magic[:2] == b"\0\0" and magic[2] in DTYPES and 1 <= magic[3] <= 4


def read_idx(path: Path) -> NDArray[Any]:
    """Return the array of an IDX file in native byte order."""
    if not is_idx(path):
        raise UsageError(f"{str(path)!r} is not an IDX file; it does not start as one")
    content = _content(path)
    axes = content[3]
    start = 4 + 4 * axes
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    dtype = np.dtype(DTYPES[content[2]])
    if len(shape) != axes or len(content) - start != math.prod(shape) * dtype.itemsize:
        raise UsageError(
            f"{str(path)!r} is damaged: its header promises shape {shape}, its length differs; copy or download it again"
        )
    return np.frombuffer(content, dtype=dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def labels_beside(path: Path) -> Path | None:
    """Return the label file that belongs to ``train-images-idx3-ubyte[.gz]`` by its usual name, if it is there."""
    for images, labels in (("images-idx3", "labels-idx1"), ("images.idx3", "labels.idx1"), ("images-idx4", "labels-idx1")):
        beside = path.with_name(path.name.replace(images, labels))
        if images in path.name and beside.is_file():
            return beside
    return None
