"""Run a study: the cells of all its grids in one work folder, resumable, then one file with everything that came out.

    found = run_study(Study.from_toml(Path("studies/NAME.toml")), work=Path("out/NAME"), out=Path("results/NAME.json.xz"))

The work folder is an ordinary run folder; the same call goes on with it where it was stopped. The file names data and weights by
their own names alone, so that nobody's folders are published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gradveil.audit.materials import Materials
from gradveil.data import DATASETS
from gradveil.errors import UsageError
from gradveil.run.describe import describe_cells
from gradveil.run.grid import cells_of, check_inputs
from gradveil.run.jobs import Progress, training_key
from gradveil.run.ladders import expand_defense
from gradveil.run.pool import run_cells
from gradveil.run.trainings import all_trainings
from gradveil.storage.study_file import pack_folder, rounded, write_study
from gradveil.study.cell import Cell
from gradveil.study.plan import Plan
from gradveil.study.published import Study
from gradveil.study.run_result import Run

__all__ = ["cells_of_study", "moved_files", "place_files", "run_study"]


def cells_of_study(study: Study) -> list[Cell]:
    """Return the cells of all grids, each once."""
    return list(dict.fromkeys(cell for plan in study.plans for cell in cells_of(plan)))


def place_files(study: Study, *, data: Sequence[Path] = (), weights: Sequence[Path] = (), device: str | None = None) -> Study:
    """Return the study with files where they are on this machine.

    Args:
        study: Names data and weights by their files.
        data: Files to take instead of those of the same name; where the study names one file only, of any name.
        weights: The same for weights.
        device: Where to compute, if not where the plan says.
    """
    sources = {each for plan in study.plans for each in plan.data if each not in DATASETS.names()}
    nets = {each for plan in study.plans for each in plan.weights if each}
    moved = {**moved_files(sources, data, "data"), **moved_files(nets, weights, "weights")}

    def place(plan: Plan) -> Plan:
        changes: dict[str, Any] = {name: [moved.get(each, each) for each in getattr(plan, name)] for name in ("data", "weights")}
        return plan.replace(**changes, device=device or plan.device)

    return Study(name=study.name, layout=study.layout, plan=place(study.plan), plans=tuple(place(plan) for plan in study.plans))


def run_study(
    study: Study,
    *,
    work: Path,
    out: Path,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Run what is not yet in the work folder, pack all of the study into one file, and return its path.

    Args:
        study: What to measure and how it is shown.
        work: Run folder; the same one goes on with a run that was stopped.
        out: The file of results.
        workers: Processes; by default one per core on a CPU and one on a GPU.
        on_progress: Told after every cell, and every second while processes work.
    """
    materials = Materials()
    cells = list(dict.fromkeys(cell for plan in study.plans for cell in check_inputs(plan, materials)))
    utility = study.plan.utility

    def describe(keys: Sequence[str]) -> Run:
        grids = tuple(plan.as_dict() for plan in study.plans) if len(study.plans) > 1 else ()
        command = f"gradveil study run studies/{study.name}.toml"
        told = describe_cells(cells, keys, command, study.layout.title or study.name, materials)
        return dataclasses.replace(told, plan=study.plan.as_dict(), plans=grids)

    power = any(plan.power for plan in study.plans)
    asked: dict[str, Any] = {"utility": utility, "power": power, "attack": study.attacks}
    run_cells(cells, work, describe, materials=materials, workers=workers, on_progress=on_progress, **asked)
    trainings = [training_key(each, materials) for each in all_trainings(cells, utility)] if utility is not None else []
    content = pack_folder(work, study.name, study.layout.as_dict(), trainings=trainings)
    content["spellings"] = _spellings(study)
    return write_study(out, rounded(_by_name(content, _paths(cells))))


def _spellings(study: Study) -> dict[str, str]:
    """Return, for every defense as cells spell it, how the study does: rows of its table are found by that."""
    found: dict[str, str] = {}
    for text in dict.fromkeys(text for plan in study.plans for text in plan.defense):
        expanded = expand_defense(text)
        if len(expanded) == 1:
            found.setdefault(expanded[0], text)
    return found


def moved_files(named: Iterable[str], given: Sequence[Path], kind: str) -> dict[str, str]:
    """Return which path takes the place of which, by name of the file."""
    wanted = sorted(named)
    moves: dict[str, str] = {}
    for path in given:
        fitting = [each for each in wanted if Path(each).name == path.name] or (wanted if len(wanted) == 1 else [])
        if not fitting:
            files = ", ".join(Path(each).name for each in wanted) or "none"
            raise UsageError(f"--{kind} {path.name}: the study names the {kind} files {files}; give one of these names")
        moves |= dict.fromkeys(fitting, str(path))
    return moves


def _paths(cells: Iterable[Cell]) -> list[str]:
    """Return every path that the cells name, the longest first: one may be the beginning of another."""
    named = {text for cell in cells for text in (cell.data, cell.labels, cell.weights) if text not in DATASETS.names()}
    named |= {cell.model.partition(":")[0] for cell in cells if ".py:" in cell.model}
    return sorted((each for each in named if each and Path(each).name != each), key=len, reverse=True)


def _by_name(value: Any, paths: Sequence[str]) -> Any:
    """Return plain values with every path cut to the name of its file."""
    if isinstance(value, dict):
        return {name: _by_name(each, paths) for name, each in value.items()}
    if isinstance(value, list):
        return [_by_name(each, paths) for each in value]
    if isinstance(value, str):
        for path in paths:
            value = value.replace(path, Path(path).name)
    return value
