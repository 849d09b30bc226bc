"""The largest singular triplets of Jacobians by block Lanczos on K = JᵀJ, from products alone, and an estimate of the rest.

Reorthogonalisation is full: the basis is small, and products cost far more. What the run has not resolved is estimated from the
Ritz values that have not converged (stochastic Lanczos quadrature), the squared sum of J by random probes outside the basis.

Several records run side by side, each with a basis of its own: (R, k, m), R records, k directions, m input values. What a record
has no direction for, since it is done or spanned less, are rows of zeros, so that no record sees that others are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.spectra.joint import JointJacobian
from gradveil.spectra.layered import joint_push

__all__ = ["Leading", "block_width", "leading_triplets"]

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
    """The leading triplets; names as in `gradveil.spectra.spectrum.Spectrum`."""

    values: Tensor
    projections: Tensor
    right: Tensor
    frobenius: float
    tail_ranks: Tensor
    tail_energy: Tensor
    tail_values: Tensor
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Ritz:
    """Ritz values of one record, largest first, their vectors in its basis as columns, and their residuals."""

    squares: Tensor
    inner: Tensor
    residuals: Tensor


def block_width(joint: JointJacobian) -> int:
    """Return how many directions of each record are taken per round."""
    return min(BLOCK if joint.outputs < BY_LAYERS else NARROW, joint.inputs)


def leading_triplets(joint: JointJacobian, wanted: int, generators: Sequence[torch.Generator]) -> list[Leading]:
    """Return the ``wanted`` largest singular values and right singular vectors of each record, or as many as converge.

    Args:
        joint: The products.
        wanted: How many triplets.
        generators: For starts and probes, one per record.
    """
    wanted = min(wanted, joint.inputs, joint.outputs)
    start = _draw(generators, block_width(joint), joint.at)
    lit = joint.at.norm(dim=1) > 0
    start[lit, 0] = joint.at[lit]  # the directions that matter for the record are reached first
    run = _Run(joint, wanted, generators, start)
    run.go()
    rest = _frobenius_outside(run.push, run.basis, run.taken, generators)
    return [_answer(run, at, rest[at]) for at in range(len(joint))]


class _Run:
    """Block Lanczos of several records, round by round.

    Attributes:
        basis: (R, k, m) orthonormal rows, and rows of zeros.
        images: (R, k, m), K times these.
        block: (R, w, m), what comes next.
        fresh: Rows of the block that are not zero, per record; they come first.
        taken: Rows of the basis that are not zero, per record.
        ritz: What each record looked like when last looked at.
    """

    def __init__(self, joint: JointJacobian, wanted: int, generators: Sequence[torch.Generator], start: Tensor) -> None:
        self.joint, self.wanted, self.generators, self.start = joint, wanted, generators, start
        self.push = _fastest_push(joint, start[:, :1])
        count, self.width, size = start.shape
        self.basis = self.images = start.new_zeros((count, 0, size))
        self.taken = [0] * count
        self.block, self.fresh = _orthonormal(start, self.basis, self.taken)
        self.ritz: list[_Ritz | None] = [None] * count
        self._valid = torch.zeros((count, 0), dtype=torch.bool, device=start.device)
        self._running = [True] * count
        self._tolerance = CONVERGED[start.dtype]

    def go(self) -> None:
        """Run until every record is done."""
        for _ in range(-(-MOST // self.width)):
            self._start_afresh()
            if not self._step():
                break
            # Before, it is too early to look: about two directions are needed for each triplet.
            due = [at for at, runs in enumerate(self._running) if runs and self._is_due(at)]
            for at, found in zip(due, self._look(due), strict=True):
                self._running[at] = found < self.wanted
        late = [at for at, ritz in enumerate(self.ritz) if ritz is None or len(ritz.squares) < self.taken[at]]
        self._look(late)  # more was wanted than a run may take, so nobody has looked yet

    def _is_due(self, at: int) -> bool:
        return self.taken[at] >= 2 * self.wanted or self.fresh[at] == 0

    def _start_afresh(self) -> None:
        """Draw new directions where nothing new comes of what there is, as of values repeated more often than a block is wide."""
        stuck = [at for at, runs in enumerate(self._running) if runs and self.fresh[at] == 0]
        if not stuck:
            return
        again = _draw([self.generators[at] for at in stuck], self.width, self.joint.at)
        rows, counts = _orthonormal(again, self.basis[stuck], [self.taken[at] for at in stuck])
        wide = max(self.block.shape[1], rows.shape[1])
        self.block = torch.nn.functional.pad(self.block, (0, 0, 0, wide - self.block.shape[1]))
        self.block[stuck, : rows.shape[1]] = rows
        for at, count in zip(stuck, counts, strict=True):
            self.fresh[at] = count
            self._running[at] = count > 0

    def _step(self) -> bool:
        """Take one block further; False where every record is done."""
        if not any(self._running):
            return False
        self._keep_running()
        image = self.joint.pull(self.push(self.block))
        small = image.flatten(1).norm(dim=1) <= NOTHING * self.images.flatten(1).norm(dim=1)
        for at, spanned in enumerate(small.tolist()):
            if self._running[at] and self.taken[at] and spanned:  # the whole range of K is
                self.fresh[at], self._running[at] = 0, False
        if not any(self._running):
            return False
        self._keep_running()
        image = image[:, : self.block.shape[1]]
        places = torch.arange(self.block.shape[1], device=image.device)
        added = [fresh if runs else 0 for fresh, runs in zip(self.fresh, self._running, strict=True)]
        valid = places < torch.tensor(added, device=image.device).unsqueeze(1)
        image = image * valid.unsqueeze(2)
        self.basis, self.images = torch.cat([self.basis, self.block], dim=1), torch.cat([self.images, image], dim=1)
        self._valid = torch.cat([self._valid, valid], dim=1)
        self.taken = [taken + more for taken, more in zip(self.taken, added, strict=True)]
        self.block, counts = _orthonormal(image, self.basis, self.taken)
        self.fresh = [new if runs else old for new, old, runs in zip(counts, self.fresh, self._running, strict=True)]
        return True

    def _keep_running(self) -> None:
        """Blank the blocks of records that are done, and cut what no record has rows for."""
        most = max(fresh for fresh, runs in zip(self.fresh, self._running, strict=True) if runs)
        runs = torch.tensor(self._running, device=self.block.device)
        self.block = self.block[:, :most] * runs[:, None, None]

    def _look(self, which: list[int]) -> list[int]:
        """Take the Ritz values of some records, and return how many leading triplets of each have converged without a gap."""
        if not which:
            return []
        everyone = len(which) == len(self.taken)
        basis, images, valid = (each if everyone else each[which] for each in (self.basis, self.images, self._valid))
        squares, inner, residuals = _ritz(basis, images, valid)
        for place, at in enumerate(which):
            kept = self.taken[at]
            self.ritz[at] = _Ritz(squares[place, :kept], inner[place, :, :kept], residuals[place, :kept])
        return _converged(squares, residuals, valid, self._tolerance)

    def found(self, at: int) -> int:
        """Return how many leading triplets of a record can be trusted: all, where its whole range is spanned."""
        ritz = self.ritz[at]
        assert ritz is not None
        if self.fresh[at] == 0:
            return len(ritz.squares)
        own = torch.ones((1, len(ritz.squares)), dtype=torch.bool, device=ritz.squares.device)
        return _converged(ritz.squares.unsqueeze(0), ritz.residuals.unsqueeze(0), own, self._tolerance)[0]


def _answer(run: _Run, at: int, rest: float) -> Leading:
    """Return what the run found about one record."""
    ritz, point, found = run.ritz[at], run.joint.at[at], run.found(at)
    assert ritz is not None
    basis, images = (each[at, : len(ritz.inner)] for each in (run.basis, run.images))
    count = max(1, min(run.wanted, found))
    vectors = (ritz.inner.T.to(basis.dtype) @ basis).double()
    tail = _tail(point, ritz.squares, vectors, run.start[at].double(), count)
    short = found < run.wanted and run.fresh[at] > 0
    return Leading(
        values=ritz.squares[:count].sqrt().cpu(),
        projections=(vectors[:count] @ point.double()).cpu(),
        right=vectors[:count].T.cpu(),
        frobenius=float((basis * images).double().sum()) + rest,
        tail_ranks=tail[0],
        tail_energy=tail[1],
        tail_values=tail[2],
        notes=(f"only {count} of {run.wanted} leading singular values converged",) if short else (),
    )


def _draw(generators: Sequence[torch.Generator], rows: int, like: Tensor) -> Tensor:
    """Return random directions (R, rows, m), those of each record from its own generator."""
    size = like.shape[1]
    return torch.stack([torch.randn((rows, size), generator=each, dtype=torch.float64) for each in generators]).to(like)


def _tail(at: Tensor, squares: Tensor, ritz: Tensor, start: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate how many singular values, and how much of the record, lie beyond the triplets found.

    Ritz vectors that have not converged stand for the neighbourhood of their values: squared products with a random start vector
    estimate how many singular values lie there, those with the record how much of its energy (stochastic Lanczos quadrature).
    """
    point = at.double()
    drawn = start[1:] if len(start) > 1 else start
    counts = (ritz @ (drawn / drawn.norm(dim=1, keepdim=True)).T).square().mean(1)[count:]
    energy = (ritz @ point).square()[count:]
    left = len(point) - count
    if len(counts) == 0 or float(counts.sum()) <= 0:
        end = torch.tensor([float(len(point))], dtype=torch.float64)
        return end, torch.zeros_like(end), torch.zeros_like(end)
    ranks = count + (counts / counts.sum()).cumsum(0) * left
    missing = (point.square().sum() - (ritz[:count] @ point).square().sum()).clamp(min=0)
    values = squares[count:].sqrt()
    # A node stands for values on both of its sides; at its last rank the value lies half way to the next node.
    values = (values + torch.cat([values[1:], values[-1:] * 0])) / 2
    return ranks.cpu(), (missing - energy.cumsum(0)).clamp(min=0).cpu(), values.cpu()


def _ritz(basis: Tensor, images: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Ritz values (R, k), largest first, their vectors in the basis (R, k, k), and their residuals; rows of zeros last."""
    projected = (basis @ images.mT).double()
    projected = (projected + projected.mT) / 2
    if not bool(valid.all()):
        # Rows of zeros would mix with true null directions; far below zero they stand apart, and last.
        scale = projected.abs().amax((1, 2))
        below = torch.where(valid, 0.0, -torch.where(scale > 0, scale, 1.0).unsqueeze(1))
        projected = projected + torch.diag_embed(below)
    squares, inner = torch.linalg.eigh(projected)
    squares, inner = squares.flip(1).clamp(min=0), inner.flip(2)
    turned = inner.mT.to(basis.dtype)
    off = turned @ images - squares.to(basis.dtype).unsqueeze(2) * (turned @ basis)
    return squares, inner, off.double().square().sum(2).sqrt()


def _converged(squares: Tensor, residuals: Tensor, valid: Tensor, tolerance: float) -> list[int]:
    """Return how many leading triplets of each record have converged without a gap; at most as many as it has rows."""
    places = torch.arange(squares.shape[1], device=squares.device)
    late = (residuals > tolerance * squares[:, :1]) | (places >= valid.sum(1, keepdim=True))
    late = torch.nn.functional.pad(late, (0, 1), value=True)
    counts: list[int] = late.to(torch.uint8).argmax(1).tolist()
    return counts


def _orthonormal(block: Tensor, basis: Tensor, taken: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return what is new in the blocks, orthonormal and orthogonal to the bases, and how many rows that is of each.

    Twice, since once leaves rounding behind. What is not new are rows of zeros at the end.
    """
    size = block.shape[2]
    least = block.norm(dim=2).amax(1, keepdim=True) * (1e-12 if block.dtype == torch.float64 else 1e-6)
    places = torch.arange(block.shape[1], device=block.device)
    free = torch.tensor([size - each for each in taken], device=block.device).unsqueeze(1)
    for _ in range(2):
        block = block - (block @ basis.mT) @ basis
        # Long rows are shortened by QR first: an SVD of what is left costs nothing, on a CPU and on a GPU.
        frame, corner = torch.linalg.qr(block.mT)
        turn, sizes, _ = torch.linalg.svd(corner, full_matrices=False)
        kept = (sizes > least) & (places < free)
        block = (frame @ turn).mT * kept.unsqueeze(2)
        # A row of length one that the second turn shortens to less than half was rounding; kept, it would spoil the basis.
        least = torch.full_like(least, 0.5)
    counts: list[int] = kept.sum(1).tolist()
    return block[:, : max(counts)], counts


def _frobenius_outside(
    push: Callable[[Tensor], Tensor], basis: Tensor, taken: Sequence[int], generators: Sequence[torch.Generator]
) -> list[float]:
    """Estimate the squared sum of each J outside its basis by random probes; without bias, and 0 where nothing is outside."""
    size = basis.shape[2]
    probes = basis.new_zeros((len(taken), PROBES, size))
    outside = [at for at, count in enumerate(taken) if count < size]
    if not outside:
        return [0.0] * len(taken)
    probes[outside] = _draw([generators[at] for at in outside], PROBES, basis[outside, 0])
    probes = probes - (probes @ basis.mT) @ basis
    found: list[float] = (push(probes).double().square().sum((1, 2)) / PROBES).tolist()
    return [found[at] if at in outside else 0.0 for at in range(len(taken))]


def _fastest_push(joint: JointJacobian, trial: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the product by layers where the model is large and that gives the same, else the ordinary one."""
    if joint.members[0].learner is None or joint.outputs < BY_LAYERS:
        return joint.push
    by_layers = joint_push(joint)
    plain, quick = joint.push(trial), by_layers(trial)
    off, scale = (each.flatten(1).norm(dim=1) for each in (plain - quick, plain))
    return by_layers if bool((off <= SAME[joint.at.dtype] * scale).all()) else joint.push
