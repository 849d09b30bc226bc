"""The largest singular triplets of a Jacobian by block Lanczos on K = JᵀJ, from products alone, and an estimate of the rest.

Reorthogonalisation is full: the basis is small, and products cost far more. What the run has not resolved is estimated from the
Ritz values that have not converged (stochastic Lanczos quadrature), the squared sum of J by random probes outside the basis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.risk.jacobians import Jacobian
from gradveil.risk.layered import layered_push

__all__ = ["Leading", "leading_triplets"]

BLOCK, NARROW = 16, 4
"""Directions per round. Narrow blocks converge in half as many products; wide ones make cheap products cheaper still."""
MOST = 640
"""Most directions a Lanczos run may take; it then answers with the triplets that have converged."""
CONVERGED = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Largest residual ‖K v - σ² v‖ over σ₁² of a triplet that counts as found; the error of σ² is of the order of its square."""
PROBES = 8
BY_LAYERS = 1_000_000
"""Shared values from which products are dear: forward ones go by layers, and blocks are narrow."""
SAME = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest relative difference of the two forward products; float32 loses digits differently in each."""
NOTHING = 1e-12


@dataclass(frozen=True, eq=False)
class Leading:
    """The leading triplets; names as in `gradveil.risk.spectra.Spectrum`."""

    values: Tensor
    projections: Tensor
    right: Tensor
    frobenius: float
    tail_ranks: Tensor
    tail_energy: Tensor
    tail_values: Tensor
    notes: tuple[str, ...]


def leading_triplets(jacobian: Jacobian, wanted: int, generator: torch.Generator) -> Leading:
    """Return the ``wanted`` largest singular values and right singular vectors, or as many as converge.

    Args:
        jacobian: The products.
        wanted: How many triplets.
        generator: For starts and probes.
    """
    size, dtype = jacobian.inputs, jacobian.at.dtype
    wanted = min(wanted, size, jacobian.outputs)
    point = jacobian.at.reshape(-1)
    width = min(BLOCK if jacobian.outputs < BY_LAYERS else NARROW, size)
    start = torch.randn((width, size), generator=generator, dtype=torch.float64).to(point)
    if float(point.norm()) > 0:
        start[0] = point  # the directions that matter for the record are reached first
    push = _fastest_push(jacobian, start[:1])
    basis, images = point.new_zeros((0, size)), point.new_zeros((0, size))
    block = _orthonormal(start, basis)
    squares, inner, residuals = point.new_zeros(0), point.new_zeros((0, 0)), point.new_zeros(0)
    for _ in range(-(-MOST // width)):
        if len(block) == 0:
            # Nothing new comes of what there is, as where values are repeated more often than the block is wide: start afresh.
            again = torch.randn((width, size), generator=generator, dtype=torch.float64).to(point)
            block = _orthonormal(again, basis)
            if len(block) == 0:
                break
        image = jacobian.pull(push(block))
        if len(basis) and float(image.norm()) <= NOTHING * float(images.norm()):
            block = block[:0]
            break  # the whole range of K is spanned
        basis, images = torch.cat([basis, block]), torch.cat([images, image])
        block = _orthonormal(image, basis)
        if len(basis) < 2 * wanted and len(block):
            continue  # too early to look: about two directions are needed for each triplet
        squares, inner, residuals = _ritz(basis, images)
        if _found(squares, residuals, dtype) >= wanted:
            break
    if len(squares) < len(basis):
        squares, inner, residuals = _ritz(basis, images)  # more was wanted than a run may take, so nobody has looked yet
    found = len(squares) if len(block) == 0 else _found(squares, residuals, dtype)
    count = max(1, min(wanted, found))
    right = (inner[:, :count].T.to(dtype) @ basis).double()
    rest = _frobenius_outside(push, basis, generator)
    tail = _tail(jacobian, squares, (inner.T.to(dtype) @ basis).double(), start.double(), count)
    notes = (f"only {count} of {wanted} leading singular values converged",) if found < wanted and len(block) else ()
    return Leading(
        values=squares[:count].sqrt().cpu(),
        projections=(right @ point.double()).cpu(),
        right=right.T.cpu(),
        frobenius=float((basis * images).double().sum()) + rest,
        tail_ranks=tail[0],
        tail_energy=tail[1],
        tail_values=tail[2],
        notes=notes,
    )


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


def _ritz(basis: Tensor, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Ritz values, largest first, their vectors in the basis, and their residuals."""
    projected = (basis @ images.T).double()
    squares, inner = torch.linalg.eigh((projected + projected.T) / 2)
    squares, inner = squares.flip(0).clamp(min=0), inner.flip(1)
    return squares, inner, _residuals(basis, images, squares, inner)


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
        # Long rows are shortened by QR first: an SVD of what is left costs nothing, on a CPU and on a GPU.
        frame, corner = torch.linalg.qr(block.T)
        turn, sizes, _ = torch.linalg.svd(corner, full_matrices=False)
        rows = (frame @ turn).T
        block = rows[sizes > 1e-12 * before] if block.dtype == torch.float64 else rows[sizes > 1e-6 * before]
        before = torch.ones_like(before)
    return block[: basis.shape[1] - len(basis)]


def _frobenius_outside(push: Callable[[Tensor], Tensor], basis: Tensor, generator: torch.Generator) -> float:
    """Estimate the squared sum of J outside the basis by random probes; without bias, and 0 where nothing is outside."""
    if basis.shape[1] <= len(basis):
        return 0.0
    probes = torch.randn((PROBES, basis.shape[1]), generator=generator, dtype=torch.float64).to(basis)
    probes = probes - (probes @ basis.T) @ basis
    return float(push(probes).double().square().sum() / PROBES)


def _fastest_push(jacobian: Jacobian, trial: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the product by layers where the model is large and that gives the same, else the ordinary one."""
    if jacobian.learner is None or jacobian.outputs < BY_LAYERS:
        return jacobian.push
    by_layers = layered_push(jacobian)
    plain, quick = jacobian.push(trial), by_layers(trial)
    agree = float((plain - quick).norm()) <= SAME[jacobian.at.dtype] * float(plain.norm())
    return by_layers if agree else jacobian.push
