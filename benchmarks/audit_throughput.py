"""How much of the engine's speed an audit gets: candidate-steps of its searches over the time they take, beside the engine alone.

Every row is one cell, run as an audit runs it, in one process. The clock of its searches starts with the first of them, before
anything is recorded, and stops with the last step of the last. Beside it stands the engine's own rate (`attack_throughput`) at as
many candidates as the cell's largest program holds, and the whole cell by attack and by phase.

    python -m benchmarks.audit_throughput --device cuda --rounds 3
    python -m benchmarks.audit_throughput --device cuda --cells lenet:32 --defenses 'gaussian_noise(std=0.01)' --ensemble standard
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from benchmarks.attack_throughput import measure
from benchmarks.harness import arguments, finish, read
from gradveil.attacks import Attack, AttackContext, launch, resolve
from gradveil.audit import cell as audited
from gradveil.audit.cell import run_cell
from gradveil.audit.judge import Referees
from gradveil.records import Observation, Reconstruction
from gradveil.study.cell import Cell

PHASES = {
    "build_subject": "clients send",
    "line_up": "planning",
    "planned_steps": "planning",
    "attack_all": "attacks",
    "risk_of_cell": "risk",
    "select": "referee",
    "select_plain": "referee",
    "per_recipe": "referee",
    "null_rows": "nulls",
    "derangements": "nulls",
    "owners_level": "owners",
    "certify": "certificate",
    "explain": "gap",
    "region_of_cell": "region",
    "label_level": "labels",
    "list_level": "lists",
    "run_checks": "checks",
    "_latency": "client's time",
}
"""Functions that one audited cell calls, by what they are part of."""


class _Enough(Exception):
    """The searches are over, and nobody asked for more."""


@dataclass
class Stopwatch:
    """Where the time of one cell went.

    Attributes:
        device: A GPU is waited for before the clock is read.
        phases: Seconds of each phase.
        attacks: Name, seconds and candidate-steps of each attack.
        steps: Candidate-steps of all searches.
        most: Candidates of the largest program.
        first: When the first search began.
        last: When the last step of the last search was over.
    """

    device: torch.device
    phases: dict[str, float] = field(default_factory=dict)
    attacks: list[tuple[str, float, int]] = field(default_factory=list)
    steps: int = 0
    most: int = 0
    first: float | None = None
    last: float = 0.0

    def now(self) -> float:
        """Read the clock once all work is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            begun = self.now()
            try:
                return function(*given, **named)
            finally:
                self.phases[phase] = self.phases.get(phase, 0.0) + self.now() - begun

        return run

    def launch(self, attack: Attack, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Launch an attack and count what it does."""
        begun, before = self.now(), self.steps
        spoken = 0.0

        def progress(candidates: int) -> None:
            nonlocal spoken
            spoken = time.perf_counter()
            self.steps += candidates
            self.most = max(self.most, candidates)
            if context.progress is not None:
                context.progress(candidates)

        found = launch(attack, observations, dataclasses.replace(context, progress=progress))
        ended = self.now()
        if self.steps > before:
            self.first = begun if self.first is None else self.first
            self.last = spoken
        name = str(getattr(attack, "title", "") or attack.card.name)
        self.attacks.append((f"{name} {attack.stance}", ended - begun, self.steps - before))
        return found

    @contextlib.contextmanager
    def watching(self, searches_only: bool = False) -> Iterator[None]:
        """Time everything that a cell run inside calls; where only searches are asked for, leave once they are over."""

        def leave(*_: Any) -> None:
            raise _Enough

        with contextlib.ExitStack() as stack:
            for name, phase in PHASES.items():
                stack.enter_context(mock.patch.object(audited, name, self.timed(phase, getattr(audited, name))))
            rehearsed = leave if searches_only else self.timed("referee", Referees.rehearsed)
            stack.enter_context(mock.patch.object(Referees, "rehearsed", rehearsed))
            stack.enter_context(mock.patch.object(audited, "launch", self.launch))
            yield


def run(cell: Cell, rounds: int, *, searches_only: bool = False) -> dict[str, Any]:
    """Audit one cell, or only run its searches, measure the engine alone at its size, and return both."""
    device = torch.device(cell.device)
    watch = Stopwatch(device)
    begun = watch.now()
    with watch.watching(searches_only), contextlib.suppress(_Enough):
        run_cell(cell)
    whole = watch.now() - begun
    searched = watch.last - (watch.first or 0.0)
    mode = "captured" if device.type == "cuda" else "batched"
    alone = measure(cell.model, watch.most, device, [mode], rounds, 1)["steps_per_second"][mode]
    rate = watch.steps / searched
    return {
        "model": cell.model,
        "records": cell.records,
        "defense": cell.defense,
        "ensemble": resolve(cell.ensemble).name,
        "candidates": watch.most,
        "candidate_steps": watch.steps,
        "search_seconds": round(searched, 2),
        "steps_per_second": round(rate),
        "engine_steps_per_second": alone,
        "share_of_engine": round(rate / alone, 3),
        "whole_seconds": round(whole, 1),
        "phases": {name: round(seconds, 2) for name, seconds in watch.phases.items()},
        "attacks": [{"attack": name, "seconds": round(seconds, 2), "steps": steps} for name, seconds, steps in watch.attacks],
    }


def _told(row: dict[str, Any]) -> str:
    lines = [
        f"{row['model']} {row['records']} {row['defense']} {row['ensemble']}: {row['candidate_steps']} steps in "
        f"{row['search_seconds']} s, {row['steps_per_second']}/s; engine at {row['candidates']}: "
        f"{row['engine_steps_per_second']}/s; share {row['share_of_engine']}; whole cell {row['whole_seconds']} s",
        "  " + ", ".join(f"{name} {seconds} s" for name, seconds in row["phases"].items()),
        *(f"  {each['attack']:44s} {each['seconds']:8.2f} s {each['steps']:9d}" for each in row["attacks"]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Audit all cells, print each as it is done, and write JSON where asked."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--cells", default="lenet:64,resnet18:16", help="models and records")
    parser.add_argument("--defenses", default="none;gaussian_noise(std=0.01);pruning(rate=0.9);svdefense", help="parted by ;")
    parser.add_argument("--ensemble", default="quick")
    parser.add_argument("--data", default="photos")
    parser.add_argument("--searches-only", action="store_true", help="judge nothing")
    options = read(parser)
    rows = []
    for model, records in (each.rsplit(":", 1) for each in options.cells.split(",")):
        for defense in options.defenses.split(";"):
            settings = {"data": options.data, "ensemble": options.ensemble, "device": options.device}
            cell = Cell(model=model, records=int(records), defense=defense, **settings)
            rows.append(run(cell, options.rounds, searches_only=options.searches_only))
            sys.stderr.write(_told(rows[-1]))
            sys.stderr.flush()
    finish("audit_throughput", {"cells": rows}, options)


if __name__ == "__main__":
    main()
