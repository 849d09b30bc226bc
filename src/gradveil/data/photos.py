"""Built-in data `photos`: natural 32×32 colour patches, cut from photographs that ship inside scikit-image and scikit-learn.

Nothing is downloaded, and neither package is imported: the picture files are read where they lie. Large photographs are first
reduced by averaging, so that a patch shows structure and not one leaf; patches lie on a grid without overlap; nearly flat
ones are dropped, because nobody could tell two pieces of sky apart and "identified" would mean nothing. The label is the
photograph.

One photograph is held back as public data (`gradveil.data.public`) and never part of this set. Credits and licences:
docs/data.md.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gradveil.data.base import DATASETS, DataCard, Dataset
from gradveil.errors import UsageError

__all__ = ["PHOTOGRAPHS", "PUBLIC_PHOTOGRAPH", "Photograph", "load_photos", "shipped_file"]

SIDE = 32
FLAT = 0.05
"""Patches whose standard deviation (mean over the colours) is below this are dropped. No patch of a JPEG lies within 0.0002 of
it, so decoders that differ in the last bit agree on which patches there are."""


@dataclass(frozen=True)
class Photograph:
    """A colour photograph inside an installed package.

    Attributes:
        name: Name of the class.
        package: Import name of the package it ships in.
        path: Where it lies inside that package.
        reduction: Whole factor by which it is reduced before patches are cut.
        credit: Who made it.
        licence: Under which terms.
    """

    name: str
    package: str
    path: str
    reduction: int
    credit: str
    licence: str

    def read(self, reduction: int = 1) -> NDArray[np.uint8]:
        """Return the pixels (H, W, 3), each the average of ``reduction`` × ``reduction`` original ones."""
        # Imported here, as in every reader: data that needs no pictures loads without Pillow.
        from PIL import Image

        with Image.open(shipped_file(self.package, self.path)) as image:
            return np.asarray(image.convert("RGB").reduce(reduction))


PHOTOGRAPHS = (
    Photograph("astronaut", "skimage", "data/astronaut.png", 2, "NASA (portrait of Eileen Collins)", "public domain"),
    Photograph("cat", "skimage", "data/chelsea.png", 1, "Stéfan van der Walt (Chelsea)", "CC0"),
    Photograph("china", "sklearn", "datasets/images/china.jpg", 2, "danielbuechele, Flickr", "CC BY 2.0"),
    Photograph("coffee", "skimage", "data/coffee.png", 2, "Rachel Michetti, courtesy of Pikolo Espresso Bar", "CC0"),
    Photograph("flower", "sklearn", "datasets/images/flower.jpg", 2, "vultilion, Flickr", "CC BY 2.0"),
    Photograph("galaxies", "skimage", "data/hubble_deep_field.jpg", 3, "NASA (Hubble eXtreme Deep Field)", "public domain"),
    Photograph("retina", "skimage", "data/retina.jpg", 4, "Mikael Häggström, Wikimedia Commons", "CC0"),
    Photograph("rocket", "skimage", "data/rocket.jpg", 2, "SpaceX (launch of DSCOVR)", "public domain"),
    Photograph("tissue", "skimage", "data/ihc.png", 2, "Center for Microscopy and Molecular Imaging", "no known restrictions"),
)

# Its terms are not stated, so it is the one to be used for rehearsals only: no report ever shows it.
PUBLIC_PHOTOGRAPH = Photograph(
    "motorcycle", "skimage", "data/motorcycle_left.png", 1, "Middlebury stereo benchmark 2014 (Scharstein et al.)", "not stated"
)


def shipped_file(package: str, path: str) -> Path:
    """Return a data file inside an installed package without importing the package."""
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if found is None:
        wheel = {"skimage": "scikit-image", "sklearn": "scikit-learn"}.get(package, package)
        raise UsageError(
            f"built-in data needs {path!r} of the package {wheel}, which is not installed; run `pip install {wheel}`"
        )
    return found


@DATASETS.register(
    DataCard(
        name="photos",
        summary="501 natural 32×32 colour patches of nine photographs; the label is the photograph.",
        cost="read from installed packages in a fraction of a second; no download",
        weakness=(
            "Small, and patches of one photograph resemble each other: good for audits of untrained models, not for accuracy."
        ),
        shape=(3, SIDE, SIDE),
        classes=len(PHOTOGRAPHS),
        licence="per photograph: public domain, CC0, CC BY 2.0; see docs/data.md",
    )
)
def load_photos() -> Dataset:
    """Return the patches, ordered by photograph, then row, then column."""
    patches, targets, records = [], [], []
    for label, photograph in enumerate(PHOTOGRAPHS):
        for row, column, patch in _patches(photograph):
            patches.append(patch)
            targets.append(label)
            records.append(f"{photograph.name}-{row:02d}-{column:02d}")
    pixels = torch.from_numpy(np.stack(patches))  # (N, H, W, C)
    return Dataset(
        name="photos",
        inputs=(pixels.permute(0, 3, 1, 2).to(torch.float32) / 255).contiguous(),
        targets=torch.tensor(targets),
        classes=len(PHOTOGRAPHS),
        class_names=tuple(photograph.name for photograph in PHOTOGRAPHS),
        records=tuple(records),
        builtin=True,
    )


def _patches(photograph: Photograph) -> list[tuple[int, int, NDArray[np.uint8]]]:
    """Return (row, column, pixels) of the patches worth keeping, on a grid centred in the photograph."""
    pixels = photograph.read(photograph.reduction)
    rows, columns = pixels.shape[0] // SIDE, pixels.shape[1] // SIDE
    top, left = (pixels.shape[0] - rows * SIDE) // 2, (pixels.shape[1] - columns * SIDE) // 2
    kept = []
    for row in range(rows):
        for column in range(columns):
            y, x = top + row * SIDE, left + column * SIDE
            patch = pixels[y : y + SIDE, x : x + SIDE]
            if (patch / 255).std(axis=(0, 1)).mean() >= FLAT:
                kept.append((row, column, patch))
    return kept
