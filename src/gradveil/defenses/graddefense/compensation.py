"""Taking known noise off an average of updates, by what random matrix theory says about the spectrum of pure noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradveil.tensors import Named, flatten, unflatten

__all__ = ["denoise_matrix", "denoise_update", "noise_edges"]


def noise_edges(std: float, rows: int, columns: int) -> tuple[float, float]:
    """Return the Marchenko-Pastur edges: between them lie the eigenvalues of MᵀM / rows of a large matrix M of pure noise."""
    ratio = math.sqrt(columns / rows)
    return std**2 * (1 - ratio) ** 2, std**2 * (1 + ratio) ** 2


def denoise_matrix(matrix: Tensor, std: float) -> Tensor:
    """Project a tall matrix onto the right singular directions whose eigenvalues pure noise cannot explain."""
    rows, columns = matrix.shape
    low, high = noise_edges(std, rows, columns)
    values, directions = torch.linalg.eigh(matrix.T @ matrix / rows)
    kept: Tensor = directions[:, (values <= low) | (values >= high)]
    return matrix @ kept @ kept.T


def denoise_update(update: Named, std: float, aspect: float) -> Named:
    """Denoise all tensors together, as one matrix with ``aspect`` times as many rows as columns.

    The entries stand in a row that is broken into lines. What does not fill the last line is left as it is.
    """
    vector = flatten(update)
    columns = max(1, math.isqrt(int(vector.numel() / aspect)))
    rows = vector.numel() // columns
    if std == 0 or rows <= columns:
        return update
    wide = torch.float32 if vector.device.type == "mps" else torch.float64
    matrix = vector[: rows * columns].reshape(rows, columns).to(wide)
    cleaned = denoise_matrix(matrix, std).reshape(-1).to(vector.dtype)
    return unflatten(torch.cat([cleaned, vector[rows * columns :]]), update)
