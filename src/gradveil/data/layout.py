"""From arrays as people store them to the one form every station reads: inputs (N, C, ...) in [0, 1], whole-number targets (N,).

A layout is recognised only where no second reading is possible; otherwise the sentence says which ``layout=`` to choose. A
guess that is wrong half of the time would make every reconstruction, and every number, meaningless.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.errors import UsageError, suggest
from gradveil.study.reading import LAYOUTS

__all__ = ["SCALES", "to_inputs", "to_targets"]

"""n records, h height, w width, c channels, t time, f features."""

SCALES = ("auto", "minmax", "none")
"""auto: bytes are divided by 255, other numbers must lie in [0, 1]. minmax: stretched to [0, 1]. none: taken as they are."""

MOST_SIGNAL_CHANNELS = 16
MOST_PICTURE_CHANNELS = 4


def to_inputs(array: NDArray[Any], name: str, *, layout: str = "auto", scale: str = "auto") -> Tensor:
    """Return float32 inputs (N, C, ...).

    Args:
        array: As stored, in any layout of `LAYOUTS`.
        name: Of the source, for sentences.
        layout: One of `LAYOUTS`; ``auto`` recognises it.
        scale: One of `SCALES`. ``minmax`` uses one range for all channels of a picture, and one per channel of a signal or
            feature, whose channels have different units.
    """
    if scale not in SCALES:
        raise UsageError(f"there is no scale {scale!r}{suggest(scale, SCALES)}")
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{name!r}: inputs are {array.dtype}, not numbers; give uint8 or float arrays")
    if array.size == 0:
        raise UsageError(f"{name!r} is empty: inputs have shape {array.shape}; give at least one record")
    channels_first = _channels_first(array, name, layout)
    if scale == "minmax":
        return torch.from_numpy(_stretch(channels_first))
    # Copied in one step: file arrays may be read-only, big-endian or strided, none of which torch takes.
    inputs = torch.from_numpy(np.array(channels_first, dtype=np.float32, order="C"))
    if scale == "none" or array.dtype.kind in "bf":
        return inputs
    if array.dtype != np.uint8:
        low, high = array.min(), array.max()
        raise UsageError(
            f"{name!r}: inputs are {array.dtype} from {low} to {high}, so their range is unclear; save them as uint8, or as "
            "float in [0, 1], or use scale='minmax'"
        )
    return inputs / 255


def _stretch(array: NDArray[Any]) -> NDArray[np.float32]:
    """Map to [0, 1]: one range over a picture's channels (N, C, H, W), one per channel of (N, C, T) and (N, F)."""
    if array.ndim == 4:
        axes: tuple[int, ...] = (0, 1, 2, 3)
    else:
        axes = (0, 2) if array.ndim == 3 else (0,)
    wide = array.astype(np.float64)
    low, high = wide.min(axis=axes, keepdims=True), wide.max(axis=axes, keepdims=True)
    # NaN and infinity pass through without a warning: validation names the record.
    with np.errstate(invalid="ignore"):
        span = np.where(high > low, high - low, 1.0)
        return np.asarray(np.clip((wide - low) / span, 0, 1), dtype=np.float32)


def _channels_first(array: NDArray[Any], name: str, layout: str) -> NDArray[Any]:
    """Return a view in channels-first order, with a channel axis added to grey pictures."""
    if layout not in LAYOUTS:
        raise UsageError(f"there is no layout {layout!r}{suggest(layout, LAYOUTS)}")
    if layout == "auto":
        layout = _recognise(array, name)
    if array.ndim != len(layout):
        raise UsageError(f"{name!r}: layout {layout!r} needs {len(layout)} axes, but inputs have shape {array.shape}")
    if layout == "nhwc":
        return array.transpose(0, 3, 1, 2)
    return array[:, None] if layout == "nhw" else array


def _recognise(array: NDArray[Any], name: str) -> str:
    if array.ndim == 2:
        return "nf"
    if array.ndim == 3:
        return _recognise_three(array, name)
    if array.ndim == 4:
        return _recognise_four(array, name)
    raise UsageError(
        f"{name!r}: inputs have shape {array.shape}; give pictures (records, height, width[, channels]), "
        "signals (records, channels, time) or features (records, features)"
    )


def _recognise_three(array: NDArray[Any], name: str) -> str:
    _, first, second = array.shape
    if first == second or (array.dtype == np.uint8 and min(first, second) > MOST_PICTURE_CHANNELS):
        return "nhw"
    if array.dtype.kind == "f" and first <= MOST_SIGNAL_CHANNELS and second >= 4 * first:
        return "nct"
    raise UsageError(
        f"{name!r}: inputs of shape {array.shape} may be grey pictures or signals; say layout='nhw' (records, height, width) or "
        "layout='nct' (records, channels, time)"
    )


def _recognise_four(array: NDArray[Any], name: str) -> str:
    last, first = array.shape[3] in (1, 3), array.shape[1] in (1, 3)
    if last != first:
        return "nhwc" if last else "nchw"
    if 4 in (array.shape[1], array.shape[3]) and not last:
        raise UsageError(
            f"{name!r}: pictures of shape {array.shape} seem to have an alpha channel; keep only red, green and blue"
        )
    why = "both the second and the last axis could be" if last else "neither the second nor the last axis looks like"
    raise UsageError(
        f"{name!r}: inputs have shape {array.shape}, and {why} channels; say layout='nhwc' (channels last) or "
        "layout='nchw' (channels first)"
    )


def to_targets(labels: NDArray[Any], name: str) -> tuple[Tensor, tuple[str, ...] | None]:
    """Return int64 targets (N,), and the class names where labels were words.

    Words are numbered in alphabetical order. Numbers are class numbers and stay as they are. A column (N, 1) is taken as (N,).
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise UsageError(
            f"{name!r}: labels have shape {labels.shape}; give one class number per record (of one-hot rows: "
            "labels.argmax(axis=1))"
        )
    if labels.dtype.kind in "US":
        words = np.char.decode(labels) if labels.dtype.kind == "S" else labels
        if not all(_is_whole(word) for word in words):
            names, numbers = np.unique(words, return_inverse=True)
            return torch.from_numpy(numbers.astype(np.int64)), tuple(str(word) for word in names)
        labels = words.astype(np.int64)
    if labels.dtype.kind not in "biuf":
        raise UsageError(f"{name!r}: labels are {labels.dtype}; give whole numbers or words")
    whole = np.isfinite(labels) & (np.floor(labels) == labels) if labels.dtype.kind == "f" else np.ones(labels.shape, bool)
    if not whole.all():
        row = int(np.flatnonzero(~whole)[0])
        raise UsageError(f"{name!r}: label {labels[row]} of record {row} is not a whole number; number the classes 0, 1, 2, …")
    return torch.from_numpy(labels.astype(np.int64)), None


def _is_whole(word: str) -> bool:
    # Bounded, so that a long id does not overflow 64 bits; it becomes a word, and validation counts the classes.
    text = word.strip()
    return len(text) <= 15 and text.lstrip("+-").isdecimal()
