"""Singular values and vectors of d(shared)/d(input) of one record or of several together, in three modes.

* ``dense`` forms the Jacobian J (p × m) and takes its SVD in float64: the reference, for small models.
* ``gram`` takes the eigenvalues of K = JᵀJ (m × m). Of a plain gradient K is summed layer by layer (`layered`); of
  anything else by blocks of rows of J. Exact up to rounding: squaring costs half the digits, so singular values below about
  1e-7 of the largest are lost, far below the tolerance of any score. Checked on every run against ‖J v‖² = vᵀ K v.
* ``leading`` finds the largest k by block Lanczos on K with full reorthogonalisation, from products with J and Jᵀ alone, and
  estimates the squared sum of the rest (Hutch++). For inputs so large that K cannot be held.

On a GPU several records of one client go through one program (`joint`), as many as memory allows. Their spectra are
those of one record at a time, to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradveil.errors import GradveilError, Unreliable, UsageError, suggest
from gradveil.randomness import Seed
from gradveil.spectra.gram import COLUMN_BYTES, disagreement, eigen, grams_by_rows
from gradveil.spectra.jacobians import Jacobian
from gradveil.spectra.joint import JointJacobian, kin, memory
from gradveil.spectra.lanczos import MOST, SAME, block_width, leading_triplets
from gradveil.spectra.layered import STORE_BYTES, layered_bytes, layered_grams
from gradveil.tensors import matrix_products

__all__ = ["MODES", "Mode", "Spectrum", "choose_mode", "left_vectors", "records_at_once", "spectra_of", "spectrum"]

Mode = Literal["auto", "dense", "gram", "leading"]
MODES = ("auto", "dense", "gram", "leading")

LEADING = 64
"""Triplets sought by ``leading``."""
DENSE_ENTRIES = 4_000_000
GRAM_INPUTS = 4096
GRAM_OUTPUTS = 4_000_000
"""Shared values up to which ``auto`` forms K on a CPU."""
ONE_BY_ONE = ("cpu",)
"""Devices on which records go one by one unless asked: a record's own directions keep them busy."""
RECORDS = 32
"""Most records in one program."""
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
        seconds: Time it took; of records that went together, an equal part of the time of all.
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
        jacobian: From `gradveil.spectra.jacobians`.
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
    return spectra_of([jacobian], mode=mode, leading=leading, right=right, left=left, seeds=[seed or Seed(0)])[0]


def spectra_of(
    jacobians: Sequence[Jacobian],
    *,
    mode: str = "auto",
    leading: int = LEADING,
    right: bool = False,
    left: bool = False,
    seeds: Sequence[Seed] | None = None,
    together: bool | None = None,
    most_bytes: int = 0,
) -> list[Spectrum]:
    """Return the spectra of several records, in their order; each is that of `spectrum`, to rounding.

    Records go together where one function shares them (`gradient_jacobians`), as many as memory allows. What cannot be mapped
    over records goes one by one.

    Args:
        jacobians: From `gradveil.spectra.jacobians`.
        mode: As in `spectrum`.
        leading: As in `spectrum`.
        right: As in `spectrum`.
        left: As in `spectrum`.
        seeds: One per record; the same for all by default.
        together: Whether records go together; by default on a GPU only, since on a CPU it is no faster.
        most_bytes: What the records of one program may take; 0 takes half of a GPU's free memory, or 2 GiB on a CPU.

    Raises:
        UsageError: Unknown mode.
        UnsupportedModel: What is shared cannot be differentiated.
        Unreliable: The Gram matrix contradicts the products it was checked with.
    """
    if mode not in MODES:
        raise UsageError(f"there is no mode {mode!r}{suggest(mode, MODES)}")
    if leading < 1:
        raise UsageError(f"leading is {leading}; ask for at least 1 triplet")
    seeds = [Seed(0)] * len(jacobians) if seeds is None else seeds
    groups: dict[Hashable, list[int]] = {}
    for index, jacobian in enumerate(jacobians):
        groups.setdefault(kin(jacobian), []).append(index)
    found: dict[int, Spectrum] = {}
    for indices in groups.values():
        first = jacobians[indices[0]]
        chosen = choose_mode(first) if mode == "auto" else mode
        count = records_at_once(first, chosen, together=together, most_bytes=most_bytes) if len(indices) > 1 else 1
        for start in range(0, len(indices), count):
            part = indices[start : start + count]
            asked = _Asked(chosen, leading, right, left)
            measured = _measure([jacobians[each] for each in part], [seeds[each] for each in part], asked)
            found |= dict(zip(part, measured, strict=True))
    return [found[index] for index in range(len(jacobians))]


def records_at_once(jacobian: Jacobian, mode: str, *, together: bool | None = None, most_bytes: int = 0) -> int:
    """Return how many records like this one should go through one program in a mode; see `spectra_of`."""
    device, element = jacobian.at.device, jacobian.at.element_size()
    if not (device.type not in ONE_BY_ONE if together is None else together):
        return 1
    joint, size, outputs = JointJacobian((jacobian,)), jacobian.inputs, jacobian.outputs
    each = 8 * (size + outputs) * element * block_width(joint)
    if mode == "dense":
        each += 4 * size * outputs * 8
    elif mode == "leading":
        each += 5 * min(MOST, size) * size * element
    else:
        each += 3 * size * size * 8
        each += layered_bytes(joint) if jacobian.learner is not None else min(size * outputs * element, COLUMN_BYTES)
    jacobian.forget()
    return max(1, min(RECORDS, (most_bytes or memory(device)) // each))


@dataclass(frozen=True)
class _Asked:
    mode: str
    leading: int
    right: bool
    left: bool

    @property
    def vectors(self) -> bool:
        return self.right or self.left


def _measure(jacobians: Sequence[Jacobian], seeds: Sequence[Seed], asked: _Asked) -> list[Spectrum]:
    """Measure records in one program; in halves where they take too much memory, one by one where they cannot be mapped."""
    if len(jacobians) == 1:
        return _measured(jacobians, seeds, asked)
    try:
        return _measured(jacobians, seeds, asked)
    except torch.OutOfMemoryError:
        step = -(-len(jacobians) // 2)
    except GradveilError:
        step = 1  # whatever is wrong with one record is then said about that one
    parts = [slice(start, start + step) for start in range(0, len(jacobians), step)]
    return [each for part in parts for each in _measure(jacobians[part], seeds[part], asked)]


def _measured(jacobians: Sequence[Jacobian], seeds: Sequence[Seed], asked: _Asked) -> list[Spectrum]:
    begun = time.perf_counter()
    device = jacobians[0].at.device
    # One record keeps to fixed bounds; several are here because there is memory for them.
    several = device.type == "cuda" and len(jacobians) > 1 and not jacobians[0].working_bytes
    room = memory(device) // 4 if several else 0
    joint = JointJacobian(tuple(jacobians), room)
    generators = [seed.child("spectrum").generator("directions") for seed in seeds]
    modes: dict[str, Callable[[], list[Spectrum]]] = {
        "dense": lambda: _dense(joint, asked.vectors),
        "gram": lambda: _gram(joint, asked.vectors, generators),
        "leading": lambda: _leading(joint, asked.leading, generators),
    }
    with matrix_products(device, coarse=False):
        if len(joint) > 1 and asked.mode != "gram":  # which checks itself
            _check_mapping(joint, seeds)
        measured = modes[asked.mode]()
        if asked.left:
            measured = [replace(each, left=left_vectors(own, each)) for own, each in zip(jacobians, measured, strict=True)]
    dead = "nothing that is shared depends on the input: the Jacobian is zero"
    return [
        replace(
            each,
            right=each.right if asked.right else None,
            notes=(*each.notes, *([dead] if each.dead else [])),
            seconds=(time.perf_counter() - begun) / len(joint),
        )
        for each in measured
    ]


def _check_mapping(joint: JointJacobian, seeds: Sequence[Seed]) -> None:
    """Compare one product of each record among the others with that of the record alone.

    Raises:
        Unreliable: They differ, as where code branches on what it is given.
    """
    drawn = [torch.randn((1, joint.inputs), generator=seed.child("spectrum").generator("mapping")) for seed in seeds]
    directions = torch.stack(drawn).to(joint.at)
    for own, direction, among in zip(joint.members, directions, joint.push(directions), strict=True):
        alone = own.push(direction)
        own.forget()
        if float((alone - among).norm()) > SAME[joint.at.dtype] * float(alone.norm()):
            raise Unreliable("what is shared about a record depends on the records beside it")


def left_vectors(jacobian: Jacobian, found: Spectrum) -> Tensor:
    """Return u_i = J v_i / σ_i as columns; zero where σ_i is zero, since there any vector would do."""
    if found.right is None:
        raise UsageError("left singular vectors are made from right ones; ask for right=True")
    pushed = jacobian.push(found.right.T.to(jacobian.at)).double().cpu()
    floor = float(found.values[0]) * 1e-12 if len(found.values) else 0.0
    scale = torch.where(found.values > floor, found.values, torch.inf)
    return (pushed / scale.unsqueeze(1)).T


def _finish(
    joint: JointJacobian, jacobian: Jacobian, values: Tensor, projections: Tensor, mode: str, frobenius: float | None = None
) -> Spectrum:
    point = jacobian.at.double()
    return Spectrum(
        values=values,
        projections=projections,
        inputs=jacobian.inputs,
        outputs=joint.outputs,
        energy=float(point.square().sum()),
        frobenius=float(values.square().sum()) if frobenius is None else frobenius,
        mode=mode,
    )


def _dense(joint: JointJacobian, vectors: bool) -> list[Spectrum]:
    wide = joint.outputs < joint.inputs
    directions = torch.eye(min(joint.outputs, joint.inputs), dtype=joint.at.dtype, device=joint.at.device)
    directions = directions.expand(len(joint), -1, -1)
    matrices = joint.pull(directions) if wide else joint.push(directions).mT
    found = []
    for jacobian, matrix in zip(joint.members, matrices, strict=True):
        _, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        projections = right @ jacobian.at.reshape(-1).double()
        each = _finish(joint, jacobian, values.cpu(), projections.cpu(), "dense")
        found.append(replace(each, right=right.T.cpu()) if vectors else each)
    return found


def _gram(joint: JointJacobian, vectors: bool, generators: Sequence[torch.Generator]) -> list[Spectrum]:
    layered = joint.members[0].learner is not None
    store = max(STORE_BYTES, memory(joint.at.device)) if len(joint) > 1 else STORE_BYTES
    grams = layered_grams(joint, store_bytes=store) if layered else grams_by_rows(joint, generators)
    checks = []
    for own, gram, generator in zip(joint.members, grams, generators, strict=True):
        checks.append(_settle(own, gram, generator))
        if len(joint) > 1:
            own.forget()
    traces = grams.diagonal(dim1=1, dim2=2).sum(1).tolist()
    kept = min(joint.inputs, joint.outputs)
    found = []
    parts = zip(joint.members, eigen(grams, joint.at.double(), vectors), traces, checks, strict=True)
    for jacobian, (squares, projections, right), trace, (off, notes) in parts:
        each = _finish(joint, jacobian, squares.clamp(min=0).sqrt()[:kept], projections[:kept], "gram", trace)
        found.append(replace(each, right=None if right is None else right[:, :kept], disagreement=off, notes=notes))
    return found


def _settle(jacobian: Jacobian, gram: Tensor, generator: torch.Generator) -> tuple[float, tuple[str, ...]]:
    """Check a Gram matrix, and make it anew, in place, where the sum over layers missed something.

    Raises:
        Unreliable: It contradicts the products all the same.
    """
    notes: tuple[str, ...] = ()
    off = disagreement(jacobian, gram, generator)
    if off > AGREES[jacobian.at.dtype] and jacobian.learner is not None:
        # The model uses weights outside its layers, so that summing over layers misses a part; rows of J miss nothing.
        notes = ("the model uses weights outside its layers, so its Jacobian was taken by rows, which is slower",)
        gram.copy_(grams_by_rows(JointJacobian((jacobian,)), [generator])[0])
        off = disagreement(jacobian, gram, generator)
    if off > AGREES[jacobian.at.dtype]:
        raise Unreliable(f"the Gram matrix contradicts direct products by {off:.1e}: the model does not compute the same twice")
    return off, notes


def _leading(joint: JointJacobian, wanted: int, generators: Sequence[torch.Generator]) -> list[Spectrum]:
    triplets = leading_triplets(joint, wanted, generators)
    return [
        replace(
            _finish(joint, jacobian, led.values, led.projections, "leading", led.frobenius),
            right=led.right,
            tail_ranks=led.tail_ranks,
            tail_energy=led.tail_energy,
            tail_values=led.tail_values,
            notes=led.notes,
        )
        for jacobian, led in zip(joint.members, triplets, strict=True)
    ]
