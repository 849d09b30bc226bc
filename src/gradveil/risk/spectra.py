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
from gradveil.risk.layered import layered_gram

__all__ = ["MODES", "Mode", "Spectrum", "choose_mode", "left_vectors", "spectrum"]

Mode = Literal["auto", "dense", "gram", "leading"]
MODES = ("auto", "dense", "gram", "leading")

LEADING = 64
"""Triplets sought by ``leading``."""
BLOCK = 16
ROUNDS = 40
"""Most blocks a Lanczos run may take; it then answers with the triplets that have converged."""
CONVERGED = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Largest residual ‖K v - σ² v‖ over σ₁² of a triplet that counts as found; the error of σ² is of the order of its square."""
PROBES = 8
NOTHING = 1e-12
DENSE_ENTRIES = 4_000_000
GRAM_INPUTS = 4096
CHECKS = 3
AGREES = {torch.float64: 1e-8, torch.float32: 1e-3}


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

    Small problems are decomposed directly; a plain gradient, or few outputs, allow K for inputs of a 32-pixel picture.
    """
    if jacobian.inputs * jacobian.outputs <= DENSE_ENTRIES:
        return "dense"
    few = jacobian.learner is not None or jacobian.outputs <= 4 * jacobian.inputs
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
    """Sum K over blocks of rows of J; rows that are zero, as those of pruned entries, are skipped."""
    gram = torch.zeros((jacobian.inputs,) * 2, dtype=jacobian.at.dtype, device=jacobian.at.device)
    if jacobian.outputs * jacobian.inputs * jacobian.at.element_size() <= jacobian.working_bytes:
        columns = jacobian.push(torch.eye(jacobian.inputs, dtype=jacobian.at.dtype, device=jacobian.at.device))
        return columns @ columns.T
    block = max(1, min(512, jacobian.working_bytes // (8 * (jacobian.inputs + jacobian.outputs) * jacobian.at.element_size())))
    directions = torch.randn((2, jacobian.inputs), generator=generator, dtype=torch.float64).to(jacobian.at)
    # A row that gives exactly zero along random directions is zero, but for a chance of measure zero.
    alive = (jacobian.push(directions) != 0).any(0).nonzero().flatten()
    for start in range(0, len(alive), block):
        rows = jacobian.rows(alive[start : start + block])
        gram.addmm_(rows.T, rows)
    return gram


def _disagreement(jacobian: Jacobian, gram: Tensor, generator: torch.Generator) -> float:
    """Return the largest relative difference of ‖J v‖² and vᵀ K v over a few random v."""
    directions = torch.randn((CHECKS, jacobian.inputs), generator=generator, dtype=torch.float64).to(jacobian.at)
    direct = jacobian.push(directions).double().square().sum(1)
    through = (directions @ gram).double().mul(directions.double()).sum(1)
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
    size, dtype = jacobian.inputs, jacobian.at.dtype
    wanted = min(wanted, size, jacobian.outputs)
    point = jacobian.at.reshape(-1)
    start = torch.randn((min(BLOCK, size), size), generator=generator, dtype=torch.float64).to(point)
    if float(point.norm()) > 0:
        start[0] = point  # the directions that matter for the record are reached first
    basis, images = point.new_zeros((0, size)), point.new_zeros((0, size))
    block = _orthonormal(start, basis)
    squares, inner, residuals = point.new_zeros(0), point.new_zeros((0, 0)), point.new_zeros(0)
    for _ in range(ROUNDS):
        if len(block) == 0:
            # Nothing new comes of what there is, as where values are repeated more often than the block is wide: start afresh.
            again = torch.randn((min(BLOCK, size), size), generator=generator, dtype=torch.float64).to(point)
            block = _orthonormal(again, basis)
            if len(block) == 0:
                break
        image = jacobian.pull(jacobian.push(block))
        if len(basis) and float(image.norm()) <= NOTHING * float(images.norm()):
            block = block[:0]
            break  # the whole range of K is spanned
        basis, images = torch.cat([basis, block]), torch.cat([images, image])
        block = _orthonormal(image, basis)
        if len(basis) < 2 * wanted and len(block):
            continue  # too early to look: about two directions are needed for each triplet
        projected = (basis @ images.T).double()
        squares, inner = torch.linalg.eigh((projected + projected.T) / 2)
        squares, inner = squares.flip(0).clamp(min=0), inner.flip(1)
        residuals = _residuals(basis, images, squares, inner)
        if _found(squares, residuals, dtype) >= wanted:
            break
    found = len(squares) if len(block) == 0 else _found(squares, residuals, dtype)
    count = max(1, min(wanted, found))
    right = (inner[:, :count].T.to(dtype) @ basis).double()
    rest = _frobenius_outside(jacobian, basis, generator)
    result = _finish(
        jacobian,
        squares[:count].sqrt().cpu(),
        (right @ point.double()).cpu(),
        "leading",
        float((basis * images).double().sum()) + rest,
    )
    tail = _tail(jacobian, squares, (inner.T.to(dtype) @ basis).double(), start.double(), count)
    notes = (f"only {count} of {wanted} leading singular values converged",) if found < wanted and len(block) else ()
    return replace(result, right=right.T.cpu(), tail_ranks=tail[0], tail_energy=tail[1], tail_values=tail[2], notes=notes)


def _tail(jacobian: Jacobian, squares: Tensor, ritz: Tensor, start: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate how many singular values, and how much of the record, lie beyond the triplets found.

    Ritz vectors that have not converged stand for the neighbourhood of their values: squared products with a random start vector
    estimate how many singular values lie there, those with the record how much of its energy (stochastic Lanczos quadrature).
    """
    point = jacobian.at.reshape(-1).double()
    drawn = start[1:] if len(start) > 1 else start
    counts = (ritz @ (drawn / drawn.norm(dim=1, keepdim=True)).T).square().mean(1)[count:]
    energy = (ritz @ point).square()[count:]
    left = jacobian.inputs - count
    if len(counts) == 0 or float(counts.sum()) <= 0:
        end = torch.tensor([float(jacobian.inputs)], dtype=torch.float64)
        return end, torch.zeros_like(end), torch.zeros_like(end)
    ranks = count + (counts / counts.sum()).cumsum(0) * left
    missing = (point.square().sum() - (ritz[:count] @ point).square().sum()).clamp(min=0)
    values = squares[count:].sqrt()
    # A node stands for values on both of its sides; at its last rank the value lies half way to the next node.
    values = (values + torch.cat([values[1:], values[-1:] * 0])) / 2
    return ranks.cpu(), (missing - energy.cumsum(0)).clamp(min=0).cpu(), values.cpu()


def _found(squares: Tensor, residuals: Tensor, dtype: torch.dtype) -> int:
    """Return how many leading triplets have converged without a gap."""
    late = (residuals > CONVERGED[dtype] * squares[0]).nonzero()
    return int(late[0]) if len(late) else len(squares)


def _residuals(basis: Tensor, images: Tensor, squares: Tensor, inner: Tensor) -> Tensor:
    turned = inner.T.to(basis.dtype)
    off: Tensor = turned @ images - squares.to(basis.dtype).unsqueeze(1) * (turned @ basis)
    return off.double().square().sum(1).sqrt()


def _orthonormal(block: Tensor, basis: Tensor) -> Tensor:
    """Return what is new in a block, orthonormal and orthogonal to the basis; twice, since once leaves rounding behind."""
    before = block.norm(dim=1).max()
    if float(before) == 0 or len(basis) >= block.shape[1]:
        return block[:0]
    for _ in range(2):
        block = block - (block @ basis.T) @ basis
        _, sizes, rows = torch.linalg.svd(block, full_matrices=False)
        block = rows[sizes > 1e-12 * before] if block.dtype == torch.float64 else rows[sizes > 1e-6 * before]
        before = torch.ones_like(before)
    return block[: basis.shape[1] - len(basis)]


def _frobenius_outside(jacobian: Jacobian, basis: Tensor, generator: torch.Generator) -> float:
    """Estimate the squared sum of J outside the basis by random probes; without bias, and 0 where nothing is outside."""
    free = jacobian.inputs - len(basis)
    if free <= 0:
        return 0.0
    probes = torch.randn((PROBES, jacobian.inputs), generator=generator, dtype=torch.float64).to(basis)
    probes = probes - (probes @ basis.T) @ basis
    return float(jacobian.push(probes).double().square().sum() / PROBES)
