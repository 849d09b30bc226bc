"""Pictures to train networks on: any number of sources, no labels needed, part of each kept back.

| source | read as |
|---|---|
| a built-in name: photos, digits | all records |
| file.npz | the training split, where there are splits |
| folder or .zip of pictures | all pictures, or those under ``train/`` where that is there |

What is kept back is decided by a hash of the record's name (of its patient or owner, where a table ``labels.csv`` names one),
never by a seed, so that a later measurement can ask `is_held_out` and aim only at pictures no network has seen.
"""

from __future__ import annotations

import csv
import hashlib
import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gradveil.data.base import DATASETS, check_values
from gradveil.data.image_folder import SUFFIXES
from gradveil.data.layout import to_inputs
from gradveil.data.npz import read_npz
from gradveil.errors import UsageError, suggest

__all__ = ["Pictures", "is_held_out", "read_pictures"]

HELD_OUT = 0.1
HELD_OUT_OF_SMALL = 0.5
SMALL = 1000
"""A source with fewer pictures than this is likely to be needed as targets too, so half of it is kept back."""

FEWEST = 8
OWNERS = ("owner", "patient", "patientid", "patient_id", "subject", "writer")
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Pictures:
    """Pictures of one size as bytes.

    Attributes:
        train: (N, C, side, side).
        held_out: The same for those kept back.
        chances: How often each training picture is drawn (N,), summing to one: sources weigh by the square root of their size, so
            that a small sharp one is not lost beside a large blurred one.
        sources: What was read, for the card: name, counts, SHA-256 of the training pixels.
    """

    train: Tensor
    held_out: Tensor
    chances: Tensor
    sources: tuple[dict[str, Any], ...]


def is_held_out(key: str, count: int) -> bool:
    """Tell whether the record (or owner) called ``key`` is kept back from a source of ``count`` pictures."""
    share = HELD_OUT if count >= SMALL else HELD_OUT_OF_SMALL
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") < share * 2**32


def read_pictures(sources: Sequence[str], *, side: int, channels: int) -> Pictures:
    """Read all sources at one size, grey or colour.

    Raises:
        UsageError: In one sentence that says what to change.
    """
    if not sources:
        raise UsageError("there is nothing to train on; name data with --data (photos needs no file)")
    train, held_out, told, weights = [], [], [], []
    for source in sources:
        pixels, keys = _read(source, side, channels)
        if len(pixels) < FEWEST:
            raise UsageError(f"{source!r} holds {len(pixels)} pictures; a network needs at least {FEWEST}")
        back = torch.tensor([is_held_out(key, len(pixels)) for key in keys])
        if bool(back.all()) or not bool(back.any()):  # one owner only: the last half
            back = torch.arange(len(pixels)) >= len(pixels) // 2
        kept = pixels[~back]
        train.append(kept)
        held_out.append(pixels[back])
        weights.append(torch.full((len(kept),), len(kept) ** -0.5))
        digest = hashlib.sha256(kept.numpy().tobytes()).hexdigest()
        told.append({"source": Path(source).name, "train": len(kept), "held_out": int(back.sum()), "sha256": digest})
    chances = torch.cat(weights)
    return Pictures(torch.cat(train), torch.cat(held_out), chances / chances.sum(), tuple(told))


def _read(source: str, side: int, channels: int) -> tuple[Tensor, list[str]]:
    if source in DATASETS.names():
        data = DATASETS.get(source)()
        return _fit(data.inputs, source, side, channels), list(data.records)
    path = Path(source).expanduser()
    if path.is_dir():
        files = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.is_file()}
        return _decode(source, list(files), lambda name: files[name].read_bytes(), side, channels)
    if path.suffix.lower() == ".zip" and path.is_file():
        return _read_zip(path, side, channels)
    if path.suffix.lower() == ".npz" and path.is_file():
        array = read_npz(path, None).inputs
        inputs = _fit(to_inputs(array, source), source, side, channels)
        return inputs, [f"{path.stem}-{index}" for index in range(len(inputs))]
    if path.exists():
        raise UsageError(f"cannot read pictures from {source!r}; give a folder or .zip of pictures, an .npz or a built-in name")
    raise UsageError(f"there is no data {source!r}{suggest(source, DATASETS.names())}")


def _read_zip(path: Path, side: int, channels: int) -> tuple[Tensor, list[str]]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            return _decode(str(path), names, archive.read, side, channels)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"cannot read {str(path)!r} as a zip archive ({error}); pack it again or give the folder") from error


def _decode(source: str, names: list[str], read: Callable[[str], bytes], side: int, channels: int) -> tuple[Tensor, list[str]]:
    owners = _owners(read("labels.csv")) if "labels.csv" in names else {}
    pictures = sorted(name for name in names if name.lower().endswith(SUFFIXES))
    training = [name for name in pictures if "train" in name.split("/")[:-1]]
    pictures = training or pictures
    if not pictures:
        raise UsageError(f"{source!r} holds no pictures; give a folder or .zip with {', '.join(SUFFIXES[:4])} files")
    pixels = np.stack([_picture(source, name, read(name), side, channels) for name in pictures])
    return torch.from_numpy(pixels), [owners.get(name) or name for name in pictures]


def _owners(table: bytes) -> dict[str, str]:
    """Return the owner of each file, where the table names owners."""
    rows = csv.DictReader(io.StringIO(table.decode("utf-8", errors="replace")))
    column = next((name for name in rows.fieldnames or () if name.lower() in OWNERS), None)
    return {row["file"]: row[column] for row in rows if row.get("file")} if column else {}


def _picture(source: str, name: str, content: bytes, side: int, channels: int) -> NDArray[np.uint8]:
    """Return one picture (C, side, side): the central square, resized with a Lanczos filter."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            plain = image.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"cannot read the picture {name!r} in {source!r}; it is damaged: replace or remove it") from error
    short = min(plain.size)
    left, top = (plain.width - short) // 2, (plain.height - short) // 2
    square = plain.crop((left, top, left + short, top + short))
    if short != side:
        square = square.resize((side, side), Image.Resampling.LANCZOS)
    pixels = np.asarray(square, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _fit(inputs: Tensor, source: str, side: int, channels: int) -> Tensor:
    """Bring float pictures (N, C, H, W) in [0, 1] to bytes of the size and colours wanted."""
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        raise UsageError(f"{source!r} holds no pictures: its records have shape {tuple(inputs.shape[1:])}")
    check_values(source, inputs)
    if channels == 1 and inputs.shape[1] == 3:
        inputs = (inputs * torch.tensor(LUMA)[:, None, None]).sum(1, keepdim=True)
    if inputs.shape[2:] != (side, side):
        inputs = F.interpolate(inputs, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
    return (inputs.clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, channels, -1, -1).contiguous()
