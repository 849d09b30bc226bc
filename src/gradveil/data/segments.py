"""Built-in data `segments`: grey 32×32 patches of two pictures with a mask of what they show.

The pictures ship inside scikit-image: Greek coins from Pompeii on a dark ground, and stained tissue under a microscope. The mask
is made once per picture, by Otsu's threshold on values that part figure from ground: brightness for the coins, darkness for the
tissue, where stained nuclei are dark. Patches lie on a grid without overlap; those without both figure and ground are dropped,
because a constant mask teaches nothing. Credits: docs/data.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gradveil.data.base import DATASETS, DataCard, Dataset
from gradveil.data.masks import otsu_threshold
from gradveil.data.photos import shipped_file

__all__ = ["SOURCES", "load_segments"]

SIDE = 32
LEAST = 0.05
"""Least share of figure, and of ground, in a patch that is kept."""


@dataclass(frozen=True)
class Source:
    """A picture inside scikit-image, and whether its figures are darker than the ground."""

    name: str
    path: str
    dark: bool

    def read(self) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the grey picture (H, W) in [0, 1] and the mask of its figures."""
        # Imported here, as in every reader: data that needs no pictures loads without Pillow.
        from PIL import Image

        with Image.open(shipped_file("skimage", self.path)) as image:
            grey = np.asarray(image.convert("L"), dtype=np.float32) / np.float32(255)
        threshold = otsu_threshold(grey)
        return grey, grey <= threshold if self.dark else grey > threshold


SOURCES = (Source("coins", "data/coins.png", dark=False), Source("tissue", "data/ihc.png", dark=True))


@DATASETS.register(
    DataCard(
        name="segments",
        summary="244 grey 32×32 patches of coins and of stained tissue, each with a mask of what is figure.",
        cost="read from installed packages in a fraction of a second; no download",
        weakness="Masks come from a threshold, not from people, so the task is easy; patches of one picture resemble each other.",
        shape=(1, SIDE, SIDE),
        classes=1,
        licence="coins: Brooklyn Museum Collection, no known copyright restrictions; tissue: as in `photos`; see docs/data.md",
    )
)
def load_segments() -> Dataset:
    """Return patches and masks, ordered by picture, then row, then column."""
    patches, masks, records = [], [], []
    for source in SOURCES:
        grey, mask = source.read()
        for row in range(grey.shape[0] // SIDE):
            for column in range(grey.shape[1] // SIDE):
                place = (slice(row * SIDE, (row + 1) * SIDE), slice(column * SIDE, (column + 1) * SIDE))
                if LEAST <= mask[place].mean() <= 1 - LEAST:
                    patches.append(grey[place])
                    masks.append(mask[place].astype(np.float32))
                    records.append(f"{source.name}-{row:02d}-{column:02d}")
    return Dataset(
        name="segments",
        inputs=torch.from_numpy(np.stack(patches))[:, None].contiguous(),
        targets=torch.from_numpy(np.stack(masks))[:, None].contiguous(),
        classes=1,
        class_names=("figure",),
        records=tuple(records),
        builtin=True,
    )
