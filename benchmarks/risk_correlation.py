"""Does InvRE, which runs no attack, tell what attacks get? Figures 3 and 5 to 8 of Xu et al. 2025, on CIFAR-10.

No study: attackers are mixed by how long they run, E[MSE] over iterations, and risks are taken per cut and strength; a plan
has one attacker per cell.

    python benchmarks/risk_correlation.py list
    python benchmarks/risk_correlation.py run --part fig3-lenet-dlg --data cifar10.npz --out DIR
    python benchmarks/risk_correlation.py all --group cpu --workers 16 --data cifar10.npz --out DIR
    python benchmarks/risk_correlation.py table --out DIR

Every part is one process on one core (``all`` starts them) and writes one JSON file; parts whose file is there are not run again.
Risks are exact (mode ``gram``). Attacks are ours, with labels given: ``dlg`` is L-BFGS on squared differences, ``ig`` is Adam on
cosines with total variation. E[MSE] = Σ P_t MSE_t over attackers of Iter_t iterations, P_t ∝ 1 / T_t, T_t = Iter_1 + … + Iter_t.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from risk_scenes import ITERATIONS, Place, attacked, defended, defended_embedding, nulls, risks
from risk_tables import NULLS, tables

from gradveil.defenses import DEFENSES
from gradveil.storage.files import write_whole

JOBS = ("risk", "attack", "defense", "embedding", "null")
RECORDS, FEW, DEFENDED = 128, 16, 8
DEFENSE_STEPS = 300
LADDERS = {
    "data_noise": ("std", (0.02, 0.05, 0.1, 0.2)),
    "gaussian_noise": ("std", (1e-5, 1e-4, 1e-3, 1e-2)),
    "pruning": ("rate", (0.5, 0.8, 0.95, 0.99)),
    "entry_dropout": ("rate", (0.5, 0.8, 0.95, 0.99)),
}
"""Strengths, weak to strong; other defenses use the ladders of their cards."""
GUIDED = ("invl_dnp", "invl_gnp")
"""Each of their records needs a decomposition of its own, so their parts are as small as those of embeddings."""
PAIRS = 4
"""Parts that the pictures under one strength of a dear defense are dealt to."""
EMBEDDING_LADDERS = {"noise": (0.05, 0.2, 0.7, 2.0), "pruning": (0.5, 0.8, 0.95, 0.99), "dropout": (0.5, 0.8, 0.95, 0.99)}


@dataclass(frozen=True)
class Part:
    """One process worth of work.

    Attributes:
        name: Also the name of its file.
        job: risk, attack, defense, embedding, or null: what needs no attack.
        subject: A scene, or a defense's spelling.
        attack: dlg or ig.
        rows: First and last (exclusive) picture.
        group: cpu, or cuda for those that take hours on a core.
        strength: Of an embedding's defense.
    """

    name: str
    job: str
    subject: str
    rows: tuple[int, int]
    group: str = "cpu"
    attack: str = ""
    strength: float = 0.0


def parts() -> list[Part]:
    """Return all parts, the longest first within a group."""
    return [Part(NULLS, "null", "", (0, RECORDS)), *_figure3(), *_figures5and6(), *_figures7and8()]


def _shards(name: str, count: int, total: int = RECORDS) -> list[tuple[str, tuple[int, int]]]:
    edges = [round(total * index / count) for index in range(count + 1)]
    if count == 1:
        return [(name, (0, total))]
    return [(f"{name}.{index}", (edges[index], edges[index + 1])) for index in range(count)]


def _figure3() -> list[Part]:
    found = []
    # Scene, group, shards of risk, DLG and IG: chosen so that no part takes more than some minutes.
    for scene, group, risk, dlg, ig in (
        ("lenet", "cpu", 8, 1, 2),
        ("lenet-trained", "cpu", 8, 1, 2),
        ("resnet20-cut1", "cpu", 16, 2, 4),
        ("resnet20-trained-cut1", "cpu", 16, 2, 4),
        ("resnet18-cut1", "cuda", 2, 1, 1),
    ):
        found += [Part(name, "risk", scene, rows, group) for name, rows in _shards(f"fig3-{scene}-risk", risk)]
        for attack, shards in (("dlg", dlg), ("ig", ig)):
            found += [
                Part(name, "attack", scene, rows, group, attack) for name, rows in _shards(f"fig3-{scene}-{attack}", shards)
            ]
    return found


def _figures5and6() -> list[Part]:
    found = []
    for scene, group, shards in (
        ("mlp", "cpu", 4),
        ("lenet", "cpu", 1),
        ("convnet", "cpu", 8),
        ("resnet20", "cpu", 8),
        *((f"resnet20-cut{i}", "cpu", 2) for i in (1, 2, 3)),
        *((f"resnet20-trained-cut{i}", "cpu", 2) for i in (1, 2, 3)),
        *((f"resnet18-cut{i}", "cuda", 1) for i in (1, 2, 3)),
    ):
        found += [Part(name, "risk", scene, rows, group) for name, rows in _shards(f"fig56-{scene}-risk", shards, FEW)]
        for attack in ITERATIONS:
            found += [
                Part(name, "attack", scene, rows, group, attack) for name, rows in _shards(f"fig56-{scene}-{attack}", shards, FEW)
            ]
    return found


def _figures7and8() -> list[Part]:
    found = [Part("fig7-none", "defense", "none", (0, DEFENDED))]
    for name in (*LADDERS, *(name for name in GUIDED if name in DEFENSES.names())):
        setting, strengths = LADDERS.get(name, ("", ()))
        rungs: list[Mapping[str, Any]] = [{setting: value} for value in strengths]
        rungs = rungs or list(DEFENSES.card(name).ladder)
        for index, rung in enumerate(rungs):
            told = ", ".join(f"{key}={value!r}" for key, value in rung.items())
            shards = _shards(f"fig7-{name}-{index}", PAIRS if name in GUIDED else 1, DEFENDED)
            found += [Part(stem, "defense", f"{name}({told})", rows) for stem, rows in shards]
    rungs8 = [("fig8-none", "noise", 0.0)]
    for kind, values in EMBEDDING_LADDERS.items():
        rungs8 += [(f"fig8-{kind}-{index}", kind, value) for index, value in enumerate(values)]
    for stem, kind, value in rungs8:
        found += [Part(name, "embedding", kind, rows, strength=value) for name, rows in _shards(stem, PAIRS, DEFENDED)]
    return found


def run(part: Part, place: Place, limit: int) -> None:
    """Run a part and write its file."""
    torch.set_num_threads(1)
    rows = list(range(part.rows[0], part.rows[1]))[: limit or None]
    wall, cpu = time.perf_counter(), time.process_time()
    if part.job == "risk":
        found: Any = risks(part.subject, place, rows)
    elif part.job == "attack":
        found = attacked(part.subject, part.attack, place, rows)
    elif part.job == "defense":
        found = defended(part.subject, place, rows, DEFENSE_STEPS)
    elif part.job == "null":
        found = nulls(place, rows)
    else:
        found = defended_embedding("resnet20-cut1", part.subject, part.strength, place, rows, DEFENSE_STEPS)
    told = {
        "part": part.name,
        "job": part.job,
        "subject": part.subject,
        "attack": part.attack,
        "strength": part.strength,
        "wall": round(time.perf_counter() - wall, 1),
        "cpu": round(time.process_time() - cpu, 1),
        "device": torch.cuda.get_device_name() if place.device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "data": place.data.name,
        "test_pictures": place.test_pictures,
        "found": found,
    }
    place.out.mkdir(parents=True, exist_ok=True)
    write_whole(place.out / f"{part.name}.json", (json.dumps(told, indent=1) + "\n").encode())
    print(f"{part.name}: {told['wall']} s, cpu {told['cpu']} s", flush=True)


def run_all(options: argparse.Namespace) -> None:
    """Run every part of a group that has no file yet, some at a time; what fails is named at the end."""
    waiting = [p for p in parts() if options.group in (p.group, "both") and p.name.startswith(options.only)]
    waiting = [p for p in waiting if options.job in ("", p.job)]
    waiting = [p for p in waiting if not (options.out / f"{p.name}.json").exists()]
    options.out.mkdir(parents=True, exist_ok=True)
    shared = ["--data", str(options.data), "--weights", options.weights, "--out", str(options.out), "--device", options.device]

    def start(part: Part) -> str:
        command = [sys.executable, __file__, "run", "--part", part.name, *shared, "--limit", str(options.limit)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        print(done.stdout.strip() or f"{part.name}: failed", flush=True)
        return "" if done.returncode == 0 else f"{part.name}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"

    with ThreadPoolExecutor(options.workers) as pool:
        failed = [line for line in pool.map(start, waiting) if line]
    print(f"{len(waiting) - len(failed)} of {len(waiting)} parts done")
    sys.exit("\n".join(failed) if failed else 0)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "run", "all", "table"))
    parser.add_argument("--part", default="", help="with run: names, separated by commas")
    parser.add_argument("--only", default="", help="with all: parts whose names begin so")
    parser.add_argument(
        "--group", choices=("cpu", "cuda", "both"), default="cpu", help="with all: parts for a core, or for a GPU"
    )
    parser.add_argument("--job", default="", choices=("", *JOBS), help="with all: these only")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("cifar10.npz"), help="npz with x_test, y_test (and x_train, y_train)")
    parser.add_argument("--weights", default="", help="state dict of a ResNet-20 trained on CIFAR-10")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=0, help="pictures per part, for a trial")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "list":
        print("\n".join(f"{part.group}  {part.name}  pictures {part.rows[0]} to {part.rows[1] - 1}" for part in parts()))
        return
    if options.out is None:
        parser.error("--out is missing")
    if options.what == "table":
        print(tables(options.out))
    elif options.what == "all":
        run_all(options)
    else:
        known = {part.name: part for part in parts()}
        names = [name.strip() for name in options.part.split(",")]
        for name in names:
            if name not in known:
                parser.error(f"there is no part {name!r}; see 'list'")
        place = Place(options.data, options.weights, options.out, torch.device(options.device))
        # Parts of one process share spectra: noise leaves a Jacobian as it is.
        for name in names:
            run(known[name], place, options.limit)


if __name__ == "__main__":
    main()
