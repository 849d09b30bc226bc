"""Built-in data `digits`: 1,797 handwritten digits, 8×8 grey, that ship inside scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from gradveil.data.base import DATASETS, DataCard, Dataset
from gradveil.data.photos import shipped_file

__all__ = ["load_digits"]

SIDE = 8
LEVELS = 16


@DATASETS.register(
    DataCard(
        name="digits",
        summary="1,797 handwritten digits, 8×8 grey.",
        paper="Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998",
        url="https://doi.org/10.24432/C50P49",
        cost="read from the installed scikit-learn in a fraction of a second; no download",
        weakness="64 pixels: far easier to reconstruct than real pictures.",
        shape=(1, SIDE, SIDE),
        classes=10,
        licence="CC BY 4.0",
    )
)
def load_digits() -> Dataset:
    """Return the digits in scikit-learn's order; ink is 1, paper is 0."""
    # The file is read as it lies: importing scikit-learn takes longer than everything else here.
    table = np.loadtxt(shipped_file("sklearn", "datasets/data/digits.csv.gz"), delimiter=",", dtype=np.int64)
    pixels = torch.from_numpy(table[:, :-1]).to(torch.float32) / LEVELS
    return Dataset(
        name="digits",
        inputs=pixels.reshape(-1, 1, SIDE, SIDE),
        targets=torch.from_numpy(table[:, -1].copy()),
        classes=10,
        class_names=tuple(str(digit) for digit in range(10)),
        records=tuple(f"digit-{index:04d}" for index in range(len(table))),
        builtin=True,
    )
