"""Batched optimisation: many targets × restarts in one program.

A `Problem` is the loss of *one* candidate; the loop maps it over all candidates with ``torch.func.vmap``, keeps the **best**
iterate of each (not the last), masks candidates that are done or not finite instead of dropping them (so results do not depend
on the company they were computed in), and counts its budget in evaluations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.attacks.engine.execution import Execution
from gradveil.attacks.engine.optimisers import Optimiser
from gradveil.tensors import Named

__all__ = ["Outcome", "Problem", "Refresh", "Watch", "optimise"]

ASK_EVERY = 16

Refresh = Callable[[int, Named, Named], Named]
"""``(step, leaves, constants) -> constants``: renew what a recipe changes while it runs."""
Watch = Callable[[int, Named], None]
"""``(steps, leaves)``: look on while an attack runs."""


@dataclass(frozen=True)
class Problem:
    """One optimisation over N candidates.

    Attributes:
        loss: ``(leaves, constants) -> scalar`` for one candidate; safe under vmap.
        leaves: What is optimised, each (N, ...).
        constants: What differs between candidates but is not optimised, each (N, ...).
        boxed: Leaves kept inside [0, 1].
        refresh: Renews constants before a step, or None.
        tracks: Steps at which an iterate may become the best one; None for all. Where constants change from step to step,
            losses of different steps are not comparable, and only steps with comparable ones may be tracked; until then the
            latest is kept.
    """

    loss: Callable[[Named, Named], Tensor]
    leaves: Named
    constants: Named
    boxed: frozenset[str] = frozenset()
    refresh: Refresh | None = None
    tracks: Callable[[int], bool] | None = None


@dataclass(frozen=True)
class Outcome:
    """What the optimisation found: per candidate, the best iterate and how it came about.

    Attributes:
        leaves: The best iterates, each (N, ...).
        first_loss: Loss at the start.
        best_loss: Loss at the best iterate; infinite where none was finite.
        gradient_norm: Norm of the gradient at the start.
        status: finished, stopped early, or not finite.
        steps: Evaluations each candidate used.
        trace: Mean loss every fifty steps.
    """

    leaves: Named
    first_loss: Tensor
    best_loss: Tensor
    gradient_norm: Tensor
    status: list[str]
    steps: Tensor
    trace: list[float] = field(default_factory=list)


def optimise(
    problem: Problem,
    optimiser: Optimiser,
    steps: int,
    execution: Execution,
    *,
    stop_below: float = float("-inf"),
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Minimise ``problem`` and return the best iterate of every candidate.

    Args:
        problem: Loss, leaves and constants.
        optimiser: Adam or L-BFGS.
        steps: Evaluations to spend per candidate.
        execution: How candidates are mapped: batched, looped or compiled, and in which chunks.
        stop_below: A candidate whose loss falls below this is done.
        progress: Called with the candidate-steps done.
        watch: Called after every evaluation with their number and the best iterates so far: what a run with that budget would
            return, unless its step sizes depend on the budget.
    """
    flat, layout = _flatten(problem.leaves)
    bounds = _box(problem, layout, flat)
    evaluate = execution.prepare(lambda row, constants: problem.loss(_unflatten_row(row, layout), constants))
    memory, constants = optimiser.start(flat), dict(problem.constants)
    n = flat.shape[0]
    best, best_loss = flat.clone(), torch.full((n,), float("inf"), dtype=flat.dtype, device=flat.device)
    active = torch.ones(n, dtype=torch.bool, device=flat.device)
    broken, compared = ~active, ~active
    spent, failures = torch.zeros(n, dtype=torch.int64, device=flat.device), torch.zeros(n, dtype=torch.int64, device=flat.device)
    first_loss = gradient_norm = best_loss
    trace: list[float] = []
    for step in range(steps):
        trial = memory["trial"]
        if problem.refresh is not None:
            constants = problem.refresh(step, _unflatten_rows(trial, layout), constants)
        gradients, values = evaluate(trial, constants)
        spent = spent + active
        finite = torch.isfinite(values) & torch.isfinite(gradients).all(1)
        if step == 0:
            first_loss, gradient_norm = values, gradients.norm(dim=1)
        tracked = problem.tracks is None or problem.tracks(step)
        usable = active & finite
        better = usable & (~compared | (values < best_loss)) if tracked else usable & ~compared
        best = torch.where(better[:, None], trial, best)
        best_loss = torch.where(better, values, best_loss)
        compared = compared | usable if tracked else compared
        if step % 50 == 0:
            trace.append(float(values[finite].mean()) if bool(finite.any()) else float("nan"))
        failures = torch.where(finite, 0, failures + 1)
        lost = active & (failures > optimiser.patience)
        broken, active = broken | lost, active & ~lost & ~(compared & (best_loss < stop_below))
        if progress is not None:
            progress(n)
        if watch is not None:
            watch(step + 1, _unflatten_rows(best, layout))
        # Asking makes the CPU wait for a GPU, so there it is asked rarely; rows that are done stay as they are either way.
        if (step % ASK_EVERY == 0 or flat.device.type == "cpu") and not bool(active.any()):
            break
        values, gradients = torch.where(finite, values, float("inf")), torch.where(finite[:, None], gradients, 0)
        memory = optimiser.advance(memory, values, gradients, active, step, steps)
        if bounds is not None:
            memory = {**memory, "trial": torch.clamp(memory["trial"], bounds[0], bounds[1])}
    broken = broken | torch.isinf(best_loss)
    ends = zip(active.tolist(), broken.tolist(), strict=True)
    status = ["not finite" if bad else "finished" if on else "stopped early" for on, bad in ends]
    return Outcome(_unflatten_rows(best, layout), first_loss, best_loss, gradient_norm, status, spent, trace)


Layout = list[tuple[str, torch.Size, slice]]


def _flatten(leaves: Named) -> tuple[Tensor, Layout]:
    layout: Layout = []
    start = 0
    for name, value in leaves.items():
        size = value[0].numel()
        layout.append((name, value.shape[1:], slice(start, start + size)))
        start += size
    return torch.cat([value.reshape(value.shape[0], -1) for value in leaves.values()], dim=1), layout


def _unflatten_row(row: Tensor, layout: Layout) -> Named:
    return {name: row[part].reshape(shape) for name, shape, part in layout}


def _unflatten_rows(rows: Tensor, layout: Layout) -> Named:
    return {name: rows[:, part].reshape(rows.shape[0], *shape) for name, shape, part in layout}


def _box(problem: Problem, layout: Layout, flat: Tensor) -> tuple[Tensor, Tensor] | None:
    if not problem.boxed:
        return None
    low, high = torch.full_like(flat[0], float("-inf")), torch.full_like(flat[0], float("inf"))
    for name, _, part in layout:
        if name in problem.boxed:
            low[part], high[part] = 0.0, 1.0
    return low, high
