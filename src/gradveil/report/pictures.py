"""Pictures from a cell's npz as PNG data URIs: what the attacker got, beside the original and the best null."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from gradveil.study.results import CellResult, Record

__all__ = [
    "Gallery",
    "Panel",
    "Picture",
    "best_null",
    "data_uri",
    "galleries",
    "pick_records",
    "psnr",
    "read_ids",
    "read_pictures",
    "showcase",
]

Array = npt.NDArray[np.float32]
LONGEST_SIDE = 160
CAP_DB = 60.0


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture, ready for the page; without ``uri``, ``alt`` says why there is none."""

    uri: str
    alt: str
    psnr: float | None = None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One record under one defense: original, undefended, plain, informed, null."""

    why: str
    record: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """All shown records under one defense, or the sentence that says why there are none."""

    cell: CellResult
    panels: tuple[Panel, ...] = ()
    problem: str = ""


def _stored(cell: CellResult) -> dict[str, npt.NDArray[Any]]:
    if cell.pictures is None:
        return {}
    try:
        # Opened here, because numpy leaves a damaged file open.
        with cell.pictures.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: np.asarray(stored[name]) for name in stored.files}
    except (OSError, ValueError, KeyError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error):
        return {}


def read_pictures(cell: CellResult) -> dict[str, Array]:
    """Return the arrays of a cell, each (n, C, H, W); empty if the file is missing, damaged or holds no pictures."""
    n = len(cell.records)
    fit = {name: a for name, a in _stored(cell).items() if a.ndim == 4 and len(a) == n and a.size and a.dtype.kind in "fiub"}
    return {name: array.astype(np.float32) for name, array in fit.items()}


def read_ids(cell: CellResult) -> list[str]:
    """Return the record ids stored beside the pictures, in the order of ``cell.records``; empty if there are none."""
    ids = _stored(cell).get("ids", np.asarray([]))
    return [str(each) for each in ids.tolist()] if ids.ndim == 1 and len(ids) == len(cell.records) else []


def data_uri(picture: Array) -> str:
    """Return one picture (C, H, W) in [0, 1] as a PNG data URI; more than three channels are averaged to grey."""
    shown = np.clip(np.nan_to_num(picture), 0, 1)
    if shown.shape[0] != 3:
        shown = shown.mean(0, keepdims=True)
    pixels = np.round(shown * 255).astype(np.uint8).transpose(1, 2, 0)  # (C, H, W) -> (H, W, C)
    image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def psnr(original: Array, other: Array) -> float | None:
    """Return the PSNR of one picture against its original, capped at 60 dB."""
    if original.shape != other.shape:
        return None
    mse = float(np.mean((original.astype(np.float64) - other) ** 2))
    if not math.isfinite(mse):
        return None
    return CAP_DB if mse <= 10 ** (-CAP_DB / 10) else -10 * math.log10(mse)


def best_null(cell: CellResult, arrays: Mapping[str, Array]) -> str:
    """Return the name of the best null that has a picture (derangement has none)."""
    shown = [name.removeprefix("null_") for name in arrays if name.startswith("null_")]
    if cell.bar.psnr is not None and cell.bar.psnr.null in shown:
        return cell.bar.psnr.null

    def height(name: str) -> float:
        null = cell.nulls.get(name)
        return null.psnr.median if null is not None and null.psnr is not None else -math.inf

    return max(shown, key=height, default="")


def pick_records(cell: CellResult) -> list[tuple[str, int]]:
    """Choose what to show: the record of median PSNR, the worst one, and one fixed by its pseudonym alone.

    The fixed record does not depend on any result, so it is the same under every defense and cannot be picked to please.
    """
    if not cell.records:
        return []

    def height(index: int) -> float:
        value = cell.records[index].psnr
        return -math.inf if value is None else value

    def lot(index: int) -> str:
        return hashlib.sha256(f"gradveil {cell.records[index].pseudonym}".encode()).hexdigest()

    order = sorted(range(len(cell.records)), key=height)
    return [
        ("median record", order[(len(order) - 1) // 2]),
        ("most exposed record", order[-1]),
        ("fixed random record", min(order, key=lot)),
    ]


def galleries(cells: Sequence[CellResult], undefended: CellResult | None) -> list[Gallery]:
    """Return the pictures of every cell of one setting."""
    bare = read_pictures(undefended) if undefended is not None else {}
    rows = {record.pseudonym: i for i, record in enumerate(undefended.records)} if undefended is not None else {}
    return [_gallery(cell, bare, rows) for cell in cells]


def _gallery(cell: CellResult, bare: Mapping[str, Array], rows: Mapping[str, int]) -> Gallery:
    arrays = read_pictures(cell)
    if "original" not in arrays:
        return Gallery(cell=cell, problem=f"No pictures: cells/{cell.key}.npz is missing or cannot be read.")
    panels = []
    for why, index in pick_records(cell):
        record = cell.records[index]
        original = arrays["original"][index]
        null = best_null(cell, arrays)
        found: list[tuple[str, Array | None]] = [
            ("Original", original),
            ("Undefended reconstruction", _at(bare.get("selected"), rows.get(record.pseudonym))),
            ("Plain reconstruction", _at(arrays.get("plain"), index)),
            ("Informed reconstruction", _at(arrays.get("informed"), index)),
            (f"Best null ({null.replace('_', ' ')})", _at(arrays.get(f"null_{null}"), index)),
        ]
        panels.append(
            Panel(why=why, record=record.pseudonym, pictures=tuple(_picture(name, record, original, a) for name, a in found))
        )
    return Gallery(cell=cell, panels=tuple(panels))


def _at(array: Array | None, index: int | None) -> Array | None:
    return None if array is None or index is None else array[index]


def _picture(name: str, record: Record, original: Array, array: Array | None) -> Picture:
    if array is None:
        return Picture(uri="", alt="none ran")
    height = None if array is original else psnr(original, array)
    quality = "" if height is None else f", {height:.1f} dB"
    return Picture(uri=data_uri(array), alt=f"{name}, record {record.pseudonym}{quality}", psnr=height)


def showcase(undefended: CellResult | None, best: CellResult | None) -> dict[str, list[tuple[str, Picture]]]:
    """Return the first screen's pictures of the undefended median record: two per card."""
    arrays = read_pictures(undefended) if undefended is not None else {}
    if undefended is None or "original" not in arrays or "selected" not in arrays:
        return {"undefended": [], "best": []}
    index = pick_records(undefended)[0][1]
    record, original = undefended.records[index], arrays["original"][index]
    rows = {each.pseudonym: i for i, each in enumerate(best.records)} if best is not None else {}
    defended = _at(read_pictures(best).get("selected"), rows.get(record.pseudonym)) if best is not None else None
    null = _at(arrays.get(f"null_{best_null(undefended, arrays)}"), index)

    def shown(*named: tuple[str, Array | None]) -> list[tuple[str, Picture]]:
        return [(name, _picture(name, record, original, array)) for name, array in named if array is not None]

    return {
        "undefended": shown(("original", original), ("rebuilt", arrays["selected"][index])),
        "best": shown(("rebuilt", defended), ("best null", null)) if defended is not None else [],
    }
