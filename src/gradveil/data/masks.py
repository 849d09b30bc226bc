"""Masks: what of a picture is foreground, as arrays of people store it and as a threshold finds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.errors import UsageError

__all__ = ["foreground", "otsu_threshold", "to_masks"]

BINS = 256


def to_masks(array: NDArray[Any], name: str) -> Tensor:
    """Return float32 masks (N, 1, H, W) of 0 and 1.

    Args:
        array: (N, H, W), (N, 1, H, W) or (N, H, W, 1); truth values, 0 and 1, or 0 and 255.
        name: Of the source, for sentences.
    """
    if array.ndim == 4 and 1 in (array.shape[1], array.shape[3]):
        array = array[:, 0] if array.shape[1] == 1 else array[..., 0]
    if array.ndim != 3:
        raise UsageError(
            f"{name!r}: masks have shape {array.shape}; give one foreground mask (height, width) per picture, without colours"
        )
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{name!r}: masks are {array.dtype}; give 0 for background and 1 for foreground")
    values = np.unique(array)
    top = 255 if array.dtype.kind in "iu" and 255 in values else 1
    if not set(values.tolist()) <= {0, top}:
        shown = ", ".join(str(value) for value in values[:4])
        raise UsageError(f"{name!r}: masks hold the values {shown}, …; give 0 for background and 1 (or 255) for foreground")
    return torch.from_numpy(np.array(array == top, dtype=np.float32))[:, None]


def otsu_threshold(values: NDArray[Any]) -> float:
    """Return the threshold that parts the values into two classes with the largest variance between them (Otsu 1979).

    Values above it are foreground. The centre of one of 256 equal bins, as scikit-image has it; of constant values, the value.
    """
    flat = np.asarray(values, dtype=np.float64).ravel()
    low, high = float(flat.min()), float(flat.max())
    if low == high:
        return low
    counts, edges = np.histogram(flat, bins=BINS, range=(low, high))
    centres = (edges[:-1] + edges[1:]) / 2
    below, above = np.cumsum(counts), np.cumsum(counts[::-1])[::-1]
    mean_below = np.cumsum(counts * centres) / np.maximum(below, 1)
    mean_above = (np.cumsum((counts * centres)[::-1]) / np.maximum(above[::-1], 1))[::-1]
    between = below[:-1] * above[1:] * (mean_below[:-1] - mean_above[1:]) ** 2
    return float(centres[int(np.argmax(between))])


def foreground(images: Tensor) -> Tensor:
    """Return masks (N, 1, H, W) of pictures (N, C, H, W): brighter than Otsu's threshold of their own mean over the channels.

    What an attacker uses who rehearses on public pictures and has no masks of them.
    """
    grey = images.detach().double().mean(1, keepdim=True).cpu().numpy()
    masks = np.stack([picture > otsu_threshold(picture) for picture in grey])
    return torch.from_numpy(masks.astype(np.float32)).to(images.device)
