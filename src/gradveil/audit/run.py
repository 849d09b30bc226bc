"""Run a plan: cell by cell, in worker processes, resumable at any moment.

A cell is the unit of work and of resumption: its result is a pure function of its settings, the data, the weights, the code and the execution mode, so a run that
was killed and started again ends with the same bytes. Workers use one thread each; two threads per worker on two cores would be slower, and the thread count is
part of what decides the bits.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil.attacks import Desk, Ensemble, Referee, informed_twins, launch, line_up, resolve
from gradveil.audit.cells import CELL_FORMAT, Cell
from gradveil.audit.checks import Evidence, run_checks
from gradveil.audit.describe import code_version, describe_run
from gradveil.audit.judge import Scored, best_by_truth, null_rows, per_recipe, score, select
from gradveil.audit.plan import Plan
from gradveil.audit.store import Store
from gradveil.audit.subjects import Subject, build_subject, load_cell_data
from gradveil.data import Dataset
from gradveil.defenses import build_defense, parts_of, spell_defense
from gradveil.errors import UsageError
from gradveil.federation.client import run_client
from gradveil.metrics import wilson
from gradveil.randomness import Seed
from gradveil.records import Reconstruction
from gradveil.wire import encode_dense, tensor_bytes

__all__ = ["AuditResult", "CellResult", "Progress", "run_audit", "run_cell", "run_cells"]

STEP_LIMIT = 1_000_000


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    done_cells: int
    cells: int
    done_steps: int
    steps: int
    label: str


@dataclass(frozen=True)
class AuditResult:
    """What a run produced."""

    out: Path
    cells: list[dict[str, Any]]
    missing: list[str]


@dataclass(frozen=True)
class CellResult:
    """One cell: what is the same on every run, what is not, and the pictures."""

    record: dict[str, Any]
    timing: dict[str, Any]
    pictures: dict[str, Any]


def run_cell(cell: Cell, dataset: Dataset | None = None, *, key: str = "") -> CellResult:
    """Attack one cell with its ensemble and judge the result."""
    started = time.perf_counter()
    dataset = dataset or load_cell_data(cell)
    ensemble = resolve(cell.ensemble)
    subject = build_subject(cell, dataset, ensemble.rehearsals)
    counter = _Counter()
    desk = subject.desk(STEP_LIMIT, counter)
    targets, rehearsed = _attack(subject, ensemble, desk)
    referee = Referee.rehearsed(
        [r.observation for r in subject.rehearsals],
        [(r.trained_inputs, r.batch.targets.to(cell.device)) for r in subject.rehearsals],
        [r.batch.inputs.to(cell.device) for r in subject.rehearsals],
        rehearsed,
    )
    record, pictures = _judge(subject, ensemble, desk, targets, referee)
    seconds = time.perf_counter() - started
    timing = {
        "key": key,
        "seconds": round(seconds, 3),
        "attack_steps": counter.total,
        "steps_per_second": round(counter.total / max(seconds, 1e-9), 1),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        **_latency(subject),
    }
    return CellResult({"format": CELL_FORMAT, "key": key, **record}, timing, pictures)


class _Counter:
    """Counts candidate-steps."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, steps: int) -> None:
        self.total += steps


def _attack(subject: Subject, ensemble: Ensemble, desk: Desk) -> tuple[list[list[Reconstruction]], list[list[Reconstruction]]]:
    """Launch every attacker on targets and rehearsals together; return the candidates of each."""
    everyone = [t.observation for t in (*subject.targets, *subject.rehearsals)]
    found: list[list[Reconstruction]] = [[] for _ in everyone]
    attacks = line_up(ensemble, everyone[0], desk)
    if not attacks:
        raise UsageError(f"no attack of {ensemble.name!r} applies to this model and batch size; choose another ensemble")
    for attack in attacks:
        candidates = launch(attack, everyone, desk)
        for candidate in (*candidates, *informed_twins(candidates, everyone)):
            found[candidate.target].append(candidate)
    count = len(subject.targets)
    return found[:count], found[count:]


def _judge(
    subject: Subject, ensemble: Ensemble, desk: Desk, candidates: Sequence[Sequence[Reconstruction]], referee: Referee
) -> tuple[dict[str, Any], dict[str, Any]]:
    seed = Seed(subject.cell.seed).child("summary")
    chosen = select(subject, candidates, referee)
    assert chosen is not None  # every target has candidates
    kept, verdicts = chosen
    rows: dict[str, Scored | None] = {
        "selected": score(subject, kept),
        "best_by_truth": score(subject, best_by_truth(subject, candidates)),
    }
    for name, stances in (("plain", ("plain",)), ("informed", ("informed", "straight_through", "averaged", "zero_mask"))):
        restricted = select(subject, candidates, referee, stances)
        rows[name] = score(subject, restricted[0]) if restricted else None
    selected, best = rows["selected"], rows["best_by_truth"]
    assert selected is not None and best is not None
    nulls = null_rows(subject, ensemble, desk, len(candidates[0]), selected)
    evidence = Evidence(subject, candidates, kept, verdicts, referee, selected, best, nulls)
    record = {
        "cell": {**subject.cell.as_dict(), "ensemble": ensemble.name, "threads": torch.get_num_threads()},
        "defense": _describe_defense(subject),
        "threat": subject.cell.threat().as_dict(),
        "n": len(subject.positions),
        "candidates": len(subject.candidates),
        "chance": 1 / len(subject.candidates),
        **{name: row.summary(seed.child(name)) if row else None for name, row in rows.items()},
        "regret_db": _regret(selected, best),
        "attackers": per_recipe(subject, candidates, referee, kept, seed),
        "nulls": {name: null.summary(seed.child("null", name)) for name, null in nulls.items()},
        "bar": _bar(nulls, seed),
        "records": _records(subject, selected, best, kept),
        "checks": [check.as_dict() for check in run_checks(evidence)],
        "bytes": _bytes(subject),
        "risk": None,
    }
    pictures = {name: row.images.numpy().astype(np.float32) for name, row in rows.items() if row is not None}
    pictures["original"] = torch.cat([t.batch.inputs for t in subject.targets]).numpy().astype(np.float32)
    pictures |= {f"null_{name}": nulls[name].images.numpy().astype(np.float32) for name in ("grey", "data_mean", "prior_only")}
    return record, pictures


def _regret(selected: Scored, best: Scored) -> dict[str, Any]:
    chosen, limit = selected.values["psnr"], best.values["psnr"]
    assert isinstance(chosen, torch.Tensor) and isinstance(limit, torch.Tensor)
    regret = (limit - chosen).clamp_min(0)
    median = float(regret.median())
    return {"median": median, "worst": float(regret.max()), "flagged": median > 3.0}


def _bar(nulls: dict[str, Scored], seed: Seed) -> dict[str, Any]:
    shares = {name: int((null.rank == 1).sum()) for name, null in nulls.items()}
    n = len(next(iter(nulls.values())).rank)
    top = max(shares, key=lambda name: shares[name])
    psnrs = {name: float(v.median()) for name, null in nulls.items() if isinstance(v := null.values["psnr"], torch.Tensor)}
    best = max(psnrs, key=lambda name: psnrs[name])
    return {
        "identified": {"null": top, "value": shares[top] / n, "high": wilson(shares[top], n)[1]},
        "psnr": {"null": best, "value": psnrs[best]},
    }


def _describe_defense(subject: Subject) -> dict[str, Any]:
    parts = parts_of(subject.defense)
    ladder = [spell_defense(build_defense_from(parts[0], rung)) for rung in parts[0].card.ladder] if len(parts) == 1 else []
    spelling = spell_defense(subject.defense)
    return {
        "spelling": spelling,
        "parts": [part.card.name for part in parts],
        "rung": ladder.index(spelling) + 1 if spelling in ladder else None,
        "rungs": len(ladder),
        "random": any(part.card.random for part in parts),
        "acts_on": sorted({station for part in parts for station in part.card.acts_on}),
        "secure_aggregation": all(part.card.secure_aggregation for part in parts),
    }


def build_defense_from(part: Any, settings: Any) -> Any:
    """Return the same defense at another rung of its ladder."""
    return type(part)(**settings)


def _records(subject: Subject, selected: Scored, best: Scored, kept: Sequence[Reconstruction]) -> list[dict[str, Any]]:
    size = len(subject.targets[0].batch)
    columns = {name: selected.column(name) for name in ("psnr", "ssim", "mse", "lpips")}
    limit = best.column("psnr")
    labels = torch.cat([t.batch.targets for t in subject.targets]).tolist()
    rows = []
    for i, index in enumerate(subject.indices):
        found, top = columns["psnr"][i], limit[i]
        owners = subject.dataset.owners
        rows.append(
            {
                "pseudonym": _pseudonym("r", subject.dataset.records[index], subject),
                "owner": _pseudonym("o", owners[index], subject) if owners else None,
                "label": labels[i],
                "label_correct": bool(selected.labels[i] > 0.5) if selected.labels is not None else None,
                "identified": bool(selected.rank[i] == 1),
                "rank": int(selected.rank[i]),
                **{name: column[i] for name, column in columns.items()},
                "recipe": kept[i // size].recipe,
                "stance": kept[i // size].stance,
                "regret_db": max(0.0, (top or 0.0) - (found or 0.0)),
            }
        )
    return rows


def _pseudonym(kind: str, identity: str, subject: Subject) -> str:
    """Return a name that is stable within this data set and seed but does not reveal the id without the data."""
    salt = f"{subject.dataset.digest()}|{subject.cell.seed}|{kind}|{identity}"
    return f"{kind}-{hashlib.sha256(salt.encode()).hexdigest()[:6]}"


def _bytes(subject: Subject) -> dict[str, int]:
    observation = subject.targets[0].observation
    dense = tensor_bytes(encode_dense(observation.updates[0]))
    return {"up": tensor_bytes(observation.payloads[0]), "dense": dense}


def _latency(subject: Subject) -> dict[str, float]:
    """Time one client's update with and without the defense; best of three, interleaved."""
    batch = subject.targets[0].batch
    size = subject.cell.batch_size
    small = type(batch)(batch.inputs[:size].to(subject.cell.device), batch.targets[:size].to(subject.cell.device))
    plain = build_defense("none")
    times: dict[str, list[float]] = {"defense_ms": [], "undefended_ms": []}
    for _ in range(4):
        for name, defense in (("defense_ms", subject.defense), ("undefended_ms", plain)):
            begun = time.perf_counter()
            run_client(subject.learner, small, defense, Seed(0))
            times[name].append(1000 * (time.perf_counter() - begun))
    return {name: round(min(values[1:]), 3) for name, values in times.items()}


def _worker_start() -> None:
    torch.set_num_threads(1)


def _work(cell: Cell, key: str, out: str) -> str:
    store = Store(Path(out))
    result = run_cell(cell, key=key)
    store.write_cell(key, result.record, result.timing, result.pictures)
    return key


def cell_key(cell: Cell, digests: dict[tuple[str, str, str], str]) -> str:
    """Return the key of a cell's result; loads the data once per source to know its content."""
    source = (cell.data, cell.labels, cell.scale)
    if source not in digests:
        digests[source] = load_cell_data(cell).digest()
    weights = hashlib.sha256(Path(cell.weights).read_bytes()).hexdigest() if cell.weights else ""
    return cell.key(data=digests[source], weights=weights, code=code_version(), threads=1)


def run_audit(
    plan: Plan,
    out: Path,
    *,
    command: str = "",
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> AuditResult:
    """Run every cell of a plan that is not already in ``out``, and return all of them."""
    return run_cells(plan.cells(), out, lambda keys: describe_run(plan, keys, command), workers=workers, on_progress=on_progress)


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    describe: Callable[[list[str]], dict[str, Any]],
    *,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> AuditResult:
    """Run the cells whose results are not already in ``out``.

    Args:
        cells: What to run.
        out: Results folder.
        describe: Makes run.json from the cells' keys.
        workers: Processes; by default one per core on a CPU and one on a GPU.
        on_progress: Told after every cell, and every second while processes work.
    """
    store = Store(out)
    digests: dict[tuple[str, str, str], str] = {}
    keys = [cell_key(cell, digests) for cell in cells]
    store.write_run(describe(keys))
    todo = [(cell, key) for cell, key in zip(cells, keys, strict=True) if store.read_cell(key) is None]
    report = on_progress or (lambda progress: None)
    done = len(cells) - len(todo)
    report(Progress(done, len(cells), 0, 0, "starting"))
    on_gpu = any(cell.device != "cpu" for cell in cells)
    count = min(len(todo), workers or (1 if on_gpu else os.cpu_count() or 1))
    if count <= 1:
        before = torch.get_num_threads()
        _worker_start()
        for cell, key in todo:
            _work(cell, key, str(out))
            done += 1
            report(Progress(done, len(cells), 0, 0, cell.defense))
        torch.set_num_threads(before)
    else:
        _in_processes(todo, out, count, done, len(cells), report)
    found = {key: store.read_cell(key) for key in keys}
    return AuditResult(out, [c for c in found.values() if c is not None], [key for key, c in found.items() if c is None])


def _in_processes(
    todo: list[tuple[Cell, str]], out: Path, count: int, done: int, total: int, report: Callable[[Progress], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=_worker_start) as pool:
        pending: dict[Future[str], Cell] = {pool.submit(_work, cell, key, str(out)): cell for cell, key in todo}
        try:
            while pending:
                finished, _ = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in finished:
                    cell = pending.pop(future)
                    future.result()
                    done += 1
                    report(Progress(done, total, 0, 0, cell.defense))
                if not finished:
                    report(Progress(done, total, 0, 0, "working"))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
