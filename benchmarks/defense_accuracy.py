"""What defenses cost in accuracy, bytes and time: federated training with each, on paired seeds.

    python benchmarks/defense_accuracy.py run --data cifar10.npz --partition 'dirichlet(alpha=0.5)' --clients 100 --out DIR
    python benchmarks/defense_accuracy.py table --out DIR

Runs with the same seed share partition, client sampling, batches and first weights; differences to the undefended run are
therefore taken seed by seed. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from defense_rows import ROWS, rows

from gradveil import __version__
from gradveil.federation.engine import train
from gradveil.study.codec import encode
from gradveil.study.federation import FederationSettings

# Two-sided 95 % points of Student's t for 1 to 9 degrees of freedom.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
DENSE = "none"


def one(settings: FederationSettings, path: Path) -> str:
    """Train once and keep the figures."""
    torch.set_num_threads(1)
    result = train(settings, latency=True)
    record = {
        "format": "gradveil-accuracy-1",
        "version": __version__,
        "torch": torch.__version__,
        "settings": {**settings.as_dict(), "data": Path(settings.data).name},
        "final_accuracy": result.final_accuracy,
        "best_accuracy": result.best_accuracy,
        "accuracy": [[entry.round, entry.accuracy] for entry in result.rounds if entry.accuracy is not None],
        "bytes_up": result.bytes.up,
        "bytes_down": result.bytes.down,
        "refused": sum(entry.refused for entry in result.rounds),
        "latency": encode(result.latency),
        "seconds": result.seconds,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return f"{settings.defense} seed {settings.seed}: {result.final_accuracy:.3f}"


def run(options: argparse.Namespace) -> None:
    """Train with every defense on every seed, seed by seed."""
    options.out.mkdir(parents=True, exist_ok=True)
    base = FederationSettings(
        data=options.data,
        labels=options.labels,
        model=options.model,
        clients=options.clients,
        clients_per_round=options.per_round,
        rounds=options.rounds,
        partition=options.partition,
        minibatch=options.minibatch,
        learning_rate=options.learning_rate,
        evaluate_every=options.evaluate_every,
        device=options.device,
    )
    jobs = []
    for seed in range(options.seeds):
        asked = [(options.defense, options.defense)] if options.defense else [(r.title, r.spelling) for r in rows(options.only)]
        for title, spelling in asked:
            path = options.out / f"{_file_name(title)}-{seed}.json"
            if not path.exists():
                jobs.append((base.replace(defense=spelling, seed=seed), path))
    begun = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=options.workers, mp_context=context) as pool:
        waiting = {pool.submit(one, settings, path): settings for settings, path in jobs}
        for done in as_completed(waiting):
            error = done.exception()
            line = done.result() if error is None else f"{waiting[done].defense} seed {waiting[done].seed} FAILED: {error}"
            sys.stderr.write(f"{time.perf_counter() - begun:7.1f} s  {line}\n")
            sys.stderr.flush()


def _file_name(title: str) -> str:
    return "_".join(re.findall(r"[\w.-]+", title))


def table(options: argparse.Namespace) -> None:
    """Print the runs of a folder as a table in Markdown."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.out.glob("*.json"))]
    by_defense: dict[str, dict[int, dict[str, Any]]] = {}
    for record in found:
        by_defense.setdefault(record["settings"]["defense"], {})[record["settings"]["seed"]] = record
    undefended = by_defense[DENSE]
    sys.stdout.write(
        "| defense | accuracy, % | difference, points | PMM | bytes up | bytes both | client time |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for row in ROWS:
        if row.spelling in by_defense:
            sys.stdout.write(_line(row.title, by_defense[row.spelling], undefended))


def _line(title: str, own: dict[int, dict[str, Any]], undefended: dict[int, dict[str, Any]]) -> str:
    seeds = sorted(set(own) & set(undefended))
    accuracies = [100 * own[s]["final_accuracy"] for s in seeds]
    differences = [100 * (own[s]["final_accuracy"] - undefended[s]["final_accuracy"]) for s in seeds]
    ratio = statistics.mean(own[s]["final_accuracy"] / undefended[s]["final_accuracy"] for s in seeds)
    up = statistics.mean(own[s]["bytes_up"] / undefended[s]["bytes_up"] for s in seeds)
    both = statistics.mean(
        (own[s]["bytes_up"] + own[s]["bytes_down"]) / (undefended[s]["bytes_up"] + undefended[s]["bytes_down"]) for s in seeds
    )
    latencies = [own[s]["latency"]["ratio"] for s in seeds if own[s].get("latency")]
    time_ratio = f"{statistics.median(latencies):.2f}×" if latencies else "–"
    cells = [title, _mean(accuracies), _mean(differences, signed=True), f"{ratio:.3f}", f"{up:.2f}", f"{both:.2f}", time_ratio]
    return "| " + " | ".join(cells) + " |\n"


def _mean(values: list[float], signed: bool = False) -> str:
    mean = statistics.mean(values)
    sign = "+" if signed else ""
    if len(values) < 2:
        return f"{mean:{sign}.1f}"
    half = T95[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:{sign}.1f} ± {half:.1f}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--data", default="photos")
    parser.add_argument("--labels", default="")
    parser.add_argument("--model", default="convnet(width=8)")
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minibatch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", default="", help="'main', or titles separated by semicolons")
    parser.add_argument("--defense", default="", help="a defense in other settings than those of the rows; not in the table")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    (run if options.what == "run" else table)(options)


if __name__ == "__main__":
    main()
