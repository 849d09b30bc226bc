"""Singular values and vectors of d(shared)/d(input) of one record, in three modes.

* ``dense`` forms the Jacobian J (p × m) and takes its SVD in float64: the reference, for small models.
* ``gram`` takes the eigenvalues of K = JᵀJ (m × m). Of a plain gradient K is summed layer by layer (`gradveil.risk.layered`); of
  anything else by blocks of rows of J. Exact up to rounding: squaring costs half the digits, so singular values below about
  1e-7 of the largest are lost, far below the tolerance of any score. Checked on every run against ‖J v‖² = vᵀ K v.
* ``leading`` finds the largest k by block Lanczos on K with full reorthogonalisation, from products with J and Jᵀ alone, and
  estimates the squared sum of the rest (Hutch++). For inputs so large that K cannot be held.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy.linalg
import torch
from scipy.linalg import lapack
from torch import Tensor

from gradveil.errors import Unreliable, UsageError, suggest
from gradveil.randomness import Seed
from gradveil.risk.jacobians import Jacobian
from gradveil.risk.lanczos import leading_triplets
from gradveil.risk.layered import layered_gram

__all__ = ["MODES", "Mode", "Spectrum", "choose_mode", "left_vectors", "spectrum"]

Mode = Literal["auto", "dense", "gram", "leading"]
MODES = ("auto", "dense", "gram", "leading")

LEADING = 64
"""Triplets sought by ``leading``."""
DENSE_ENTRIES = 4_000_000
GRAM_INPUTS = 4096
GRAM_OUTPUTS = 4_000_000
"""Shared values up to which ``auto`` forms K on a CPU."""
COLUMN_BYTES = 2 * 2**30
"""Largest J that is kept by columns."""
COLUMNS = 512
CHECKS = 3
AGREES = {torch.float64: 1e-8, torch.float32: 1e-4}


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The spectrum of one record's Jacobian, and how the record lies in it.

    Attributes:
        values: σ_1 ≥ σ_2 ≥ …, float64 on the CPU: all min(p, m) of them, or the leading ones.
        projections: v_iᵀ x of the record itself, in the same order.
        inputs: m, the number of input values.
        outputs: p, the number of shared values.
        energy: ‖x‖².
        frobenius: Σ σ_i² over all, exact or estimated.
        mode: ``dense``, ``gram`` or ``leading``.
        right: (m, len(values)) right singular vectors, where asked for.
        left: (p, len(values)) left singular vectors, where asked for; zero where σ is zero.
        seconds: Time it took.
        disagreement: Largest relative difference of ‖J v‖² and vᵀ K v over random v; 0 where nothing was squared.
        tail_ranks: In mode ``leading``, ranks beyond the last value at which the record's energy is estimated, ascending.
        tail_energy: Σ (v_iᵀ x)² from there on, estimated; the Lanczos run is a Gauss quadrature for it.
        tail_values: The singular values at those ranks, estimated.
        notes: What a reader should know, in sentences.
    """

    values: Tensor
    projections: Tensor
    inputs: int
    outputs: int
    energy: float
    frobenius: float
    mode: str
    right: Tensor | None = None
    left: Tensor | None = None
    seconds: float = 0.0
    disagreement: float = 0.0
    tail_ranks: Tensor | None = None
    tail_energy: Tensor | None = None
    tail_values: Tensor | None = None
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all singular values are here."""
        return len(self.values) == min(self.inputs, self.outputs)

    @property
    def dead(self) -> bool:
        """Whether nothing shared depends on the input."""
        return len(self.values) == 0 or float(self.values[0]) <= 0


def choose_mode(jacobian: Jacobian) -> str:
    """Return the cheapest mode that is exact, or ``leading`` where m × m numbers are too many.

    Small problems are decomposed directly; a plain gradient, or few outputs, allow K for inputs of a 32-pixel picture. On a
    CPU, models of millions of weights take ``leading``: it needs some hundred products, where K needs one per input value.
    """
    if jacobian.inputs * jacobian.outputs <= DENSE_ENTRIES:
        return "dense"
    few = jacobian.learner is not None or jacobian.outputs <= 4 * jacobian.inputs
    few = few and (jacobian.at.device.type != "cpu" or jacobian.outputs <= GRAM_OUTPUTS)
    return "gram" if few and jacobian.inputs <= GRAM_INPUTS else "leading"


def spectrum(
    jacobian: Jacobian,
    *,
    mode: str = "auto",
    leading: int = LEADING,
    right: bool = False,
    left: bool = False,
    seed: Seed | None = None,
) -> Spectrum:
    """Return the singular values of a Jacobian and the record's projections on its right singular vectors.

    Args:
        jacobian: From `gradveil.risk.jacobians`.
        mode: ``dense``, ``gram``, ``leading`` or ``auto``.
        leading: Triplets sought in mode ``leading``.
        right: Keep the right singular vectors.
        left: Keep the left singular vectors too, at one forward product each.
        seed: For the random directions of checks, starts and estimates.

    Raises:
        UsageError: Unknown mode.
        UnsupportedModel: What is shared cannot be differentiated.
        Unreliable: The Gram matrix contradicts the products it was checked with.
    """
    if mode not in MODES:
        raise UsageError(f"there is no mode {mode!r}{suggest(mode, MODES)}")
    if leading < 1:
        raise UsageError(f"leading is {leading}; ask for at least 1 triplet")
    chosen = choose_mode(jacobian) if mode == "auto" else mode
    generator = (seed or Seed(0)).child("spectrum").generator("directions")
    begun = time.perf_counter()
    with _full_precision(jacobian.at.device):
        if chosen == "dense":
            found = _dense(jacobian, right or left)
        elif chosen == "gram":
            found = _gram(jacobian, right or left, generator)
        else:
            found = _leading(jacobian, leading, generator)
        if left:
            found = replace(found, left=left_vectors(jacobian, found))
    if not right:
        found = replace(found, right=None)
    notes = (*found.notes, *(["nothing that is shared depends on the input: the Jacobian is zero"] if found.dead else []))
    return replace(found, seconds=time.perf_counter() - begun, notes=notes)


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Forbid the ten-bit products (TF32) that a GPU otherwise puts in place of single precision in convolutions."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def left_vectors(jacobian: Jacobian, found: Spectrum) -> Tensor:
    """Return u_i = J v_i / σ_i as columns; zero where σ_i is zero, since there any vector would do."""
    if found.right is None:
        raise UsageError("left singular vectors are made from right ones; ask for right=True")
    pushed = jacobian.push(found.right.T.to(jacobian.at)).double().cpu()
    floor = float(found.values[0]) * 1e-12 if len(found.values) else 0.0
    scale = torch.where(found.values > floor, found.values, torch.inf)
    return (pushed / scale.unsqueeze(1)).T


def _finish(jacobian: Jacobian, values: Tensor, projections: Tensor, mode: str, frobenius: float | None = None) -> Spectrum:
    point = jacobian.at.double()
    return Spectrum(
        values=values,
        projections=projections,
        inputs=jacobian.inputs,
        outputs=jacobian.outputs,
        energy=float(point.square().sum()),
        frobenius=float(values.square().sum()) if frobenius is None else frobenius,
        mode=mode,
    )


def _dense(jacobian: Jacobian, vectors: bool) -> Spectrum:
    if jacobian.outputs < jacobian.inputs:
        matrix = jacobian.pull(torch.eye(jacobian.outputs, dtype=jacobian.at.dtype, device=jacobian.at.device))
    else:
        matrix = jacobian.push(torch.eye(jacobian.inputs, dtype=jacobian.at.dtype, device=jacobian.at.device)).T
    _, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    projections = right @ jacobian.at.reshape(-1).double()
    found = _finish(jacobian, values.cpu(), projections.cpu(), "dense")
    return replace(found, right=right.T.cpu()) if vectors else found


def _gram(jacobian: Jacobian, vectors: bool, generator: torch.Generator) -> Spectrum:
    notes: tuple[str, ...] = ()
    gram = layered_gram(jacobian) if jacobian.learner is not None else _gram_by_rows(jacobian, generator)
    disagreement = _disagreement(jacobian, gram, generator)
    if disagreement > AGREES[jacobian.at.dtype] and jacobian.learner is not None:
        # The model uses weights outside its layers, so that summing over layers misses a part; rows of J miss nothing.
        notes = ("the model uses weights outside its layers, so its Jacobian was taken by rows, which is slower",)
        gram = _gram_by_rows(jacobian, generator)
        disagreement = _disagreement(jacobian, gram, generator)
    if disagreement > AGREES[jacobian.at.dtype]:
        raise Unreliable(
            f"the Gram matrix contradicts direct products by {disagreement:.1e}: the model does not compute the same twice"
        )
    point = jacobian.at.reshape(-1).double()
    squares, projections, right = _eigen(gram.double(), point, vectors)
    kept = min(jacobian.inputs, jacobian.outputs)
    values = squares.clamp(min=0).sqrt()[:kept]
    found = _finish(jacobian, values, projections[:kept], "gram", float(gram.diagonal().double().sum()))
    return replace(found, right=None if right is None else right[:, :kept], disagreement=disagreement, notes=notes)


def _gram_by_rows(jacobian: Jacobian, generator: torch.Generator) -> Tensor:
    """Sum K over blocks of rows of J; rows that are zero, as those of pruned entries, are skipped.

    Where the columns of J fit into memory and are fewer than its rows, as for an early embedding, they are taken instead.
    """
    size, like = jacobian.inputs, jacobian.at
    whole = jacobian.outputs * size * like.element_size()
    if whole <= jacobian.room or (size < jacobian.outputs and whole <= COLUMN_BYTES):
        return _gram_by_columns(jacobian)
    gram = torch.zeros((size, size), dtype=torch.float64, device=like.device)
    block = max(1, min(512, jacobian.room // (8 * (size + jacobian.outputs) * like.element_size())))
    directions = torch.randn((2, jacobian.inputs), generator=generator, dtype=torch.float64).to(jacobian.at)
    # A row that gives exactly zero along random directions is zero, but for a chance of measure zero.
    alive = (jacobian.push(directions) != 0).any(0).nonzero().flatten()
    for start in range(0, len(alive), block):
        rows = jacobian.rows(alive[start : start + block]).double()
        gram.addmm_(rows.T, rows)
    return gram


def _gram_by_columns(jacobian: Jacobian) -> Tensor:
    size, like = jacobian.inputs, jacobian.at
    columns = like.new_empty((size, jacobian.outputs))
    for start in range(0, size, COLUMNS):
        stop = min(size, start + COLUMNS)
        directions = torch.zeros((stop - start, size), dtype=like.dtype, device=like.device)
        directions[:, start:stop].fill_diagonal_(1)
        columns[start:stop] = jacobian.push(directions)
    gram = torch.zeros((size, size), dtype=torch.float64, device=like.device)
    for start in range(0, size, COLUMNS):
        stop = min(size, start + COLUMNS)
        rows = columns[start:stop].double()
        for first in range(0, stop, COLUMNS):
            last = min(stop, first + COLUMNS)
            gram[start:stop, first:last] = rows @ columns[first:last].double().T
    return gram.tril() + gram.tril(-1).T


def _disagreement(jacobian: Jacobian, gram: Tensor, generator: torch.Generator) -> float:
    """Return the largest relative difference of ‖J v‖² and vᵀ K v over a few random v."""
    directions = torch.randn((CHECKS, jacobian.inputs), generator=generator, dtype=torch.float64).to(jacobian.at)
    direct = jacobian.push(directions).double().square().sum(1)
    through = (directions.double() @ gram).mul(directions.double()).sum(1)
    scale = torch.maximum(direct, through).max()
    return 0.0 if float(scale) <= 0 else float((direct - through).abs().max() / scale)


def _eigen(gram: Tensor, point: Tensor, vectors: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return eigenvalues, largest first, the point's projections on the eigenvectors, and these where asked for."""
    if not vectors and gram.device.type == "cpu" and len(gram) > 2:
        try:
            return (*_projections_only(gram.numpy(), point.numpy()), None)
        except np.linalg.LinAlgError:
            pass  # the fast routine gives up on rare matrices; the other one does not
    squares, right = torch.linalg.eigh(gram)
    squares, right = squares.flip(0), right.flip(1)
    return squares.cpu(), (right.T @ point).cpu(), right.cpu() if vectors else None


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
    squares, inner = scipy.linalg.eigh_tridiagonal(diagonal, beside, lapack_driver="stemr")
    return torch.from_numpy(squares[::-1].copy()), torch.from_numpy((inner.T @ turned)[::-1].copy())


def _leading(jacobian: Jacobian, wanted: int, generator: torch.Generator) -> Spectrum:
    led = leading_triplets(jacobian, wanted, generator)
    found = _finish(jacobian, led.values, led.projections, "leading", led.frobenius)
    return replace(
        found,
        right=led.right,
        tail_ranks=led.tail_ranks,
        tail_energy=led.tail_energy,
        tail_values=led.tail_values,
        notes=led.notes,
    )
