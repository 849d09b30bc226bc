"""Metrics inside a target region: the part of a picture that the task, and the patient, care about.

The shadow paper scores the bounding box of the most salient 30 % of each picture under Grad-CAM++. Where the saliency comes from
is not decided here: it is an argument. The released code multiplies by the complement of that region and lets the masked pixels
count as exact, which is another number (docs/metrics.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gradveil.errors import UsageError
from gradveil.metrics.base import METRICS, Unavailable, measure

__all__ = ["REGION", "SHARE", "bounding_boxes", "measure_region", "salient"]

SHARE = 0.3
"""Share of the pixels that are called salient, as in the shadow paper."""

REGION = "region_"
"""Put before the name of a metric for its value inside the region."""


def salient(saliency: Tensor, share: float = SHARE) -> Tensor:
    """Return the mask (N, H, W) of the most salient pixels of each picture.

    The threshold is the ⌈share · H · W⌉-th largest value, and pixels that tie with it belong to the region; except that pixels of
    the lowest value are never salient beside higher ones, or a map with few pixels above zero would mark everything. A constant
    map, which singles nothing out, makes the whole picture the region.

    Args:
        saliency: (N, H, W), any scale.
        share: Between 0 and 1.
    """
    if saliency.ndim != 3 or saliency.numel() == 0:
        raise UsageError(f"saliency has shape {tuple(saliency.shape)}; give one map (H, W) for each of N pictures")
    if not 0 < share <= 1:
        raise UsageError(f"the salient share is {share}; give a share above 0 and at most 1")
    if not bool(torch.isfinite(saliency).all()):
        raise UsageError("the saliency has entries that are not finite")
    flat = saliency.double().flatten(1)
    # Rounded first: 0.3 · 100 is 30.000000000000004 in binary, and must not become 31 pixels.
    count = max(1, math.ceil(round(share * flat.shape[1], 9)))
    threshold = flat.topk(count, dim=1).values[:, -1:]
    lowest = flat.amin(dim=1, keepdim=True)
    above = (flat > lowest) | (flat.amax(dim=1, keepdim=True) == lowest)
    return ((flat >= threshold) & above).reshape(saliency.shape)


def bounding_boxes(saliency: Tensor, share: float = SHARE) -> Tensor:
    """Return (N, 4) top, left, bottom and right (past the end) of the smallest box around each picture's salient pixels."""
    mask = salient(saliency, share)
    rows, columns = mask.any(2), mask.any(1)  # (N, H), (N, W)

    def ends(hit: Tensor) -> tuple[Tensor, Tensor]:
        length = hit.shape[1]
        first = hit.to(torch.int64).argmax(1)
        return first, length - hit.flip(1).to(torch.int64).argmax(1)

    (top, bottom), (left, right) = ends(rows), ends(columns)
    return torch.stack([top, left, bottom, right], dim=1)


def measure_region(
    reconstructed: Tensor,
    original: Tensor,
    boxes: Tensor,
    names: Iterable[str] | None = None,
    context: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor | Unavailable]:
    """Return the metrics of each picture cut to its own box, under ``region_`` + name.

    Both pictures are cut, and the prior too where a metric needs one, so nothing outside the box counts, and nothing inside is
    diluted by it. A metric that cannot be had for one of the boxes (LPIPS below 32 pixels) is unavailable for all: leaving
    records out would compare different records.

    Args:
        reconstructed: (N, C, H, W) in [0, 1], in the order of the originals.
        original: Same shape.
        boxes: (N, 4) from `bounding_boxes`.
        names: Registered names; all of them by default.
        context: As for `measure`; images (C, H, W).
    """
    if reconstructed.ndim != 4 or reconstructed.shape != original.shape or tuple(boxes.shape) != (len(original), 4):
        raise UsageError(
            f"regions are cut from pictures (N, C, H, W) by boxes (N, 4), not {tuple(reconstructed.shape)}, "
            f"{tuple(original.shape)} and {tuple(boxes.shape)}"
        )
    chosen = list(METRICS.names() if names is None else names)
    parts = [_cut(row, reconstructed, original, box, chosen, context or {}) for row, box in enumerate(boxes.tolist())]
    found: dict[str, Tensor | Unavailable] = {}
    for name in chosen:
        values = [part[name] for part in parts]
        lost = [value for value in values if isinstance(value, Unavailable)]
        known = [value for value in values if not isinstance(value, Unavailable)]
        found[REGION + name] = Unavailable(f"{len(lost)} of {len(values)} regions: {lost[0]}") if lost else torch.cat(known)
    return found


def _cut(
    row: int, reconstructed: Tensor, original: Tensor, box: list[int], names: list[str], context: Mapping[str, Tensor]
) -> dict[str, Tensor | Unavailable]:
    top, left, bottom, right = box
    height, width = original.shape[2:]
    if not (0 <= top < bottom <= height and 0 <= left < right <= width):
        raise UsageError(f"box {box} of picture {row} does not lie inside {height} x {width} pixels")
    inside = {name: image[:, top:bottom, left:right] for name, image in context.items()}
    found, truth = (each[row : row + 1, :, top:bottom, left:right] for each in (reconstructed, original))
    return measure(found, truth, names, inside)
