"""The Gram matrix K = JᵀJ of any Jacobian by rows or columns of J, its self-check, and its eigenvalues.

That of a plain gradient is summed layer by layer instead, in `gradveil.spectra.layered`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.linalg
import torch
from scipy.linalg import lapack
from torch import Tensor

from gradveil.spectra.jacobians import Jacobian
from gradveil.spectra.joint import JointJacobian

__all__ = ["COLUMN_BYTES", "disagreement", "eigen", "grams_by_rows"]

COLUMN_BYTES = 2 * 2**30
"""Largest J that is kept by columns."""
COLUMNS = 512
CHECKS = 3
STACKED = 512
"""Largest K of which a GPU decomposes several at a time; it is busy with a larger one alone."""


def grams_by_rows(joint: JointJacobian, generators: Sequence[torch.Generator]) -> Tensor:
    """Sum K over blocks of rows of J, (R, m, m); rows that are zero, as those of pruned entries, are skipped.

    Where the columns of J fit into memory and are fewer than its rows, as for an early embedding, they are taken instead.
    """
    size, outputs, like = joint.inputs, joint.outputs, joint.at
    each = outputs * size * like.element_size()
    if len(joint) * each <= joint.room or (size < outputs and each <= COLUMN_BYTES):
        return _grams_by_columns(joint)
    grams = torch.zeros((len(joint), size, size), dtype=torch.float64, device=like.device)
    block = max(1, min(512, joint.room // (8 * len(joint) * (size + outputs) * like.element_size())))
    drawn = [torch.randn((2, size), generator=each, dtype=torch.float64) for each in generators]
    # A row that gives exactly zero along random directions is zero, but for a chance of measure zero.
    moved = joint.push(torch.stack(drawn).to(like)) != 0
    alive = [each.any(0).nonzero().flatten() for each in moved]
    for start in range(0, max(len(each) for each in alive), block):
        chosen = [each[start : start + block] for each in alive]
        wanted = like.new_zeros((len(joint), max(len(each) for each in chosen), outputs))
        for own, indices in zip(wanted, chosen, strict=True):  # a record with fewer rows left gets rows of zeros
            own[torch.arange(len(indices), device=like.device), indices] = 1
        rows = joint.pull(wanted).double()
        grams.baddbmm_(rows.mT, rows)
    return grams


def _grams_by_columns(joint: JointJacobian) -> Tensor:
    size, like = joint.inputs, joint.at
    columns = like.new_empty((len(joint), size, joint.outputs))
    for start in range(0, size, COLUMNS):
        stop = min(size, start + COLUMNS)
        directions = torch.zeros((stop - start, size), dtype=like.dtype, device=like.device)
        directions[:, start:stop].fill_diagonal_(1)
        columns[:, start:stop] = joint.push(directions.expand(len(joint), -1, -1))
    grams = torch.zeros((len(joint), size, size), dtype=torch.float64, device=like.device)
    for start in range(0, size, COLUMNS):
        stop = min(size, start + COLUMNS)
        rows = columns[:, start:stop].double()
        for first in range(0, stop, COLUMNS):
            last = min(stop, first + COLUMNS)
            grams[:, start:stop, first:last] = rows @ columns[:, first:last].double().mT
    return grams.tril_().add_(grams.tril(-1).mT)


def disagreement(jacobian: Jacobian, gram: Tensor, generator: torch.Generator) -> float:
    """Return the largest relative difference of ‖J v‖² and vᵀ K v over a few random v.

    J v is that of the record alone, also where K was made together with those of others.
    """
    directions = torch.randn((CHECKS, jacobian.inputs), generator=generator, dtype=torch.float64).to(jacobian.at)
    direct = jacobian.push(directions).double().square().sum(1)
    through = (directions.double() @ gram).mul(directions.double()).sum(1)
    scale = torch.maximum(direct, through).max()
    return 0.0 if float(scale) <= 0 else float((direct - through).abs().max() / scale)


def eigen(grams: Tensor, points: Tensor, vectors: bool) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Return eigenvalues of each K, largest first, its point's projections on the eigenvectors, and these where asked for."""
    size = grams.shape[1]
    if not vectors and grams.device.type == "cpu" and size > 2:
        return [(*_projections_only(gram.numpy(), point.numpy()), None) for gram, point in zip(grams, points, strict=True)]
    found = []
    for start in range(0, len(grams), len(grams) if size <= STACKED else 1):
        part = slice(start, start + (len(grams) if size <= STACKED else 1))
        squares, right = torch.linalg.eigh(grams[part])
        squares, right = squares.flip(1), right.flip(2)
        along = (right.mT @ points[part].unsqueeze(2)).squeeze(2)
        found += [(squares[at].cpu(), along[at].cpu(), right[at].cpu() if vectors else None) for at in range(len(squares))]
    return found


def _projections_only(gram: np.ndarray, point: np.ndarray) -> tuple[Tensor, Tensor]:
    """Eigenvalues and projections without forming eigenvectors of K, which would cost more than all the rest.

    K = Q T Qᵀ with T tridiagonal; T = Z Λ Zᵀ costs O(m²); and Vᵀ x = Zᵀ (Qᵀ x) needs Q applied to one vector only.
    """
    size = len(gram)
    room = int(lapack.dsytrd_lwork(size, lower=1)[0])
    # K is symmetric, so its transpose is the column-major array LAPACK wants, without a copy.
    reflectors, diagonal, beside, scales, failed = lapack.dsytrd(gram.T, lower=1, lwork=room, overwrite_a=1)
    if failed:
        raise np.linalg.LinAlgError(f"dsytrd answered {failed}")
    turned = point.copy()
    # H_1 … H_{m-1} act from row 1 on; the transposed product is H_{m-1} … H_1, so H_1 comes first.
    for index in range(size - 1):
        reflector = reflectors[index + 1 :, index].copy()
        reflector[0] = 1.0
        turned[index + 1 :] -= scales[index] * (reflector @ turned[index + 1 :]) * reflector
    try:
        squares, inner = scipy.linalg.eigh_tridiagonal(diagonal, beside, lapack_driver="stemr")
    except np.linalg.LinAlgError:  # the fast routine gives up on rare matrices; the other one does not
        squares, inner = scipy.linalg.eigh_tridiagonal(diagonal, beside, lapack_driver="stev")
    return torch.from_numpy(squares[::-1].copy()), torch.from_numpy((inner.T @ turned)[::-1].copy())
