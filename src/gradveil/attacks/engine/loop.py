"""Batched optimisation: many targets × restarts in one program.

A `Problem` is the loss of *one* candidate; the loop maps it over all candidates with ``torch.func.vmap``, keeps the **best**
iterate of each (not the last), masks candidates that are done or not finite instead of dropping them (so results do not depend
on the company they were computed in), and counts its budget in evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.adversary import prefixed, with_prefix
from gradveil.attacks.engine.execution import Evaluate, Execution
from gradveil.attacks.engine.optimisers import Numbers, Optimiser
from gradveil.recording import Recorded
from gradveil.tensors import Named

__all__ = ["Outcome", "Problem", "Refresh", "Watch", "optimise"]

ASK_EVERY = 16
MEMORY, STATE, CONSTANT, NUMBER, SCHEDULE = "memory|", "state|", "constant|", "number|", "schedule|"
TRIAL, TRACKED, PLACE = f"{MEMORY}trial", "tracked", "place"

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
        schedules: Constants that are one number for all candidates, by step.
    """

    loss: Callable[[Named, Named], Tensor]
    leaves: Named
    constants: Named
    boxed: frozenset[str] = frozenset()
    refresh: Refresh | None = None
    tracks: Callable[[int], bool] | None = None
    schedules: Mapping[str, Callable[[int], float]] = field(default_factory=dict)

    def scheduled(self, step: int) -> Named:
        """Return the scheduled constants at one step."""
        value = next(iter(self.leaves.values()))
        return {name: value.new_full(value.shape[:1], of(step)) for name, of in self.schedules.items()}

    def is_tracked(self, step: int) -> bool:
        """Whether the iterate of a step may become the best one."""
        return self.tracks is None or self.tracks(step)


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
    """

    leaves: Named
    first_loss: Tensor
    best_loss: Tensor
    gradient_norm: Tensor
    status: list[str]
    steps: Tensor


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
            return, unless its step sizes depend on the budget. They may stand in memory that the next step overwrites.
    """
    flat, layout = _flatten(problem.leaves)
    loss: Callable[[Tensor, Named], Tensor] = lambda row, constants: problem.loss(_unflatten_row(row, layout), constants)  # noqa: E731
    search = _Search(optimiser, _box(problem, layout, flat), stop_below)
    if execution.mode == "captured":
        run: _Run = _Replayed(search, execution, loss, problem, steps, flat)
    else:
        run = _Called(search, execution.prepare(loss), problem, steps)
    state, constants = search.start(flat), dict(problem.constants)
    first_loss = gradient_norm = state["best_loss"]
    for step in range(steps):
        if problem.refresh is not None:
            constants = problem.refresh(step, _unflatten_rows(state[TRIAL], layout), constants)
        state, values, gradients = run(step, state, constants)
        if step == 0:
            first_loss, gradient_norm = values.clone(), gradients.norm(dim=1)
        if progress is not None:
            progress(len(flat))
        if watch is not None:
            watch(step + 1, _unflatten_rows(state["best"], layout))
        # Asking makes the CPU wait for a GPU, so there it is asked rarely; rows that are done stay as they are either way.
        if (step % ASK_EVERY == 0 or flat.device.type == "cpu") and not bool(state["active"].any()):
            break
    best_loss = state["best_loss"]
    broken = state["broken"] | torch.isinf(best_loss)
    ends = zip(state["active"].tolist(), broken.tolist(), strict=True)
    status = ["not finite" if bad else "finished" if on else "stopped early" for on, bad in ends]
    return Outcome(_unflatten_rows(state["best"], layout), first_loss, best_loss, gradient_norm, status, state["spent"])


@dataclass(frozen=True)
class _Search:
    """One step of a search as a function of tensors alone: what it knows goes in, and what it knows then comes out."""

    optimiser: Optimiser
    bounds: tuple[Tensor, Tensor] | None
    stop_below: float

    def start(self, flat: Tensor) -> Named:
        """Return the state before the first step."""
        n, device = flat.shape[0], flat.device
        return {
            **with_prefix(self.optimiser.start(flat), MEMORY),
            "best": flat.clone(),
            "best_loss": torch.full((n,), float("inf"), dtype=flat.dtype, device=device),
            "active": torch.ones(n, dtype=torch.bool, device=device),
            "broken": torch.zeros(n, dtype=torch.bool, device=device),
            "compared": torch.zeros(n, dtype=torch.bool, device=device),
            "spent": torch.zeros(n, dtype=torch.int64, device=device),
            "failures": torch.zeros(n, dtype=torch.int64, device=device),
        }

    def step(self, state: Named, values: Tensor, gradients: Tensor, numbers: Numbers, tracked: bool | Tensor) -> Named:
        """Return the state after an evaluation at the trial points."""
        trial, active, compared = state[TRIAL], state["active"], state["compared"]
        finite = torch.isfinite(values) & torch.isfinite(gradients).all(1)
        usable = active & finite
        better = usable & (~compared | ((values < state["best_loss"]) & tracked))
        best_loss = torch.where(better, values, state["best_loss"])
        compared = compared | (usable & tracked)
        failures = torch.where(finite, 0, state["failures"] + 1)
        lost = active & (failures > self.optimiser.patience)
        on = active & ~lost & ~(compared & (best_loss < self.stop_below))
        known, slopes = torch.where(finite, values, float("inf")), torch.where(finite[:, None], gradients, 0)
        memory = self.optimiser.advance(prefixed(state, MEMORY), known, slopes, on, numbers)
        if self.bounds is not None:
            memory = {**memory, "trial": torch.clamp(memory["trial"], *self.bounds)}
        return {
            **with_prefix(memory, MEMORY),
            "best": torch.where(better[:, None], trial, state["best"]),
            "best_loss": best_loss,
            "active": on,
            "broken": state["broken"] | lost,
            "compared": compared,
            "spent": state["spent"] + active,
            "failures": failures,
        }


_Run = Callable[[int, Named, Named], tuple[Named, Tensor, Tensor]]
"""``(step, state, constants) -> (state, values, gradients)``."""


@dataclass(frozen=True)
class _Called:
    """Steps as Python takes them."""

    search: _Search
    evaluate: Evaluate
    problem: Problem
    steps: int

    def __call__(self, step: int, state: Named, constants: Named) -> tuple[Named, Tensor, Tensor]:
        gradients, values = self.evaluate(state[TRIAL], {**constants, **self.problem.scheduled(step)})
        numbers = self.search.optimiser.numbers(step, self.steps)
        return self.search.step(state, values, gradients, numbers, self.problem.is_tracked(step)), values, gradients


class _Replayed:
    """The same from one recording of a whole step.

    A step of a small network is over long before Python has launched it. What differs from step to step without anybody
    looking, as learning rates do, stands in tables of which the recording reads a row further each time.
    """

    def __init__(
        self,
        search: _Search,
        execution: Execution,
        loss: Callable[[Tensor, Named], Tensor],
        problem: Problem,
        steps: int,
        flat: Tensor,
    ) -> None:
        self._search, self._count = search, len(flat)
        self._evaluate = execution.together(loss)
        rows = [search.optimiser.numbers(step, steps) for step in range(steps)]
        columns = {NUMBER + name: [row[name] for row in rows] for name in rows[0]}
        columns |= {SCHEDULE + name: [of(step) for step in range(steps)] for name, of in problem.schedules.items()}
        self._tables = {name: torch.tensor(column, dtype=torch.float64).to(flat) for name, column in columns.items()}
        tracked = [problem.is_tracked(step) for step in range(steps)]
        self._tables[TRACKED] = torch.tensor(tracked, device=flat.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=flat.device)
        kept = {STATE + name for name in search.start(flat)} | {PLACE}
        self._recorded = Recorded(self._step, keeps=kept)

    def __call__(self, step: int, state: Named, constants: Named) -> tuple[Named, Tensor, Tensor]:
        given = with_prefix(state, STATE) | with_prefix(constants, CONSTANT) | {PLACE: self._place}
        while True:
            try:
                found = self._recorded(given)
                break
            except torch.OutOfMemoryError:
                if not self._evaluate.halve(self._count):
                    raise
            # Outside the handler: until it ends, the exception keeps everything alive that filled the memory.
            self._recorded.forget()
            torch.cuda.empty_cache()
        self._place = found[PLACE]
        return prefixed(found, STATE), found["values"], found["gradients"]

    def _step(self, given: Named) -> Named:
        now = {name: table.index_select(0, given[PLACE]).reshape(()) for name, table in self._tables.items()}
        state = prefixed(given, STATE)
        scheduled = {name: value.expand(self._count) for name, value in prefixed(now, SCHEDULE).items()}
        gradients, values = self._evaluate(state[TRIAL], {**prefixed(given, CONSTANT), **scheduled})
        after = self._search.step(state, values, gradients, prefixed(now, NUMBER), now[TRACKED])
        return {**with_prefix(after, STATE), PLACE: given[PLACE] + 1, "values": values, "gradients": gradients}


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
