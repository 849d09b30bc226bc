"""The whole curve of the hardened SVDefense's knob: what is identified, and what it costs in accuracy.

Every setting of the knob is attacked with a named ensemble on the sigmoid LeNet, one example per update, and judged beside
the best null; ``none`` and plain SVDefense stand at its weak end. Accuracy comes from federated training with paired seeds:
runs that differ only in the defense share partition, client sampling, batches and first weights.

    python benchmarks/svdefense_hardening.py --device cuda --ensemble standard --records 64 --out results/svdefense_hardening
    python benchmarks/svdefense_hardening.py --records 8 --knob 0.5 --steps 20 --rounds 2 --seeds 1 --out DIR
    python benchmarks/svdefense_hardening.py --ensemble informed-1 --seed 4 --seen 4 --knob 2 --alone --seeds 0 --out DIR
    python benchmarks/svdefense_hardening.py --ensemble patient-1 --seed 4 --records 16 --knob 2 --alone --seeds 0 --out DIR

Cells are written one by one, and those already in the folder are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import special_ensembles  # noqa: F401 - makes its ensembles known
import torch

from gradveil import __version__
from gradveil.audit.cell import run_cell
from gradveil.federation.engine import train
from gradveil.study.cell import Cell
from gradveil.study.codec import encode
from gradveil.study.federation import FederationSettings

KNOB = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
WEAK = ("none", "svdefense")


def hardened(least_error: float) -> str:
    """Return the spelling of one setting of the knob."""
    return f"svdefense(hardened=True, least_error={least_error:g})"


def kept(folder: Path, name: str, settings: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what is in the folder for these settings, or measure it and put it there."""
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    path = folder / f"{name}-{key}.json"
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    started = time.perf_counter()
    row = {"settings": settings, **measure(), "seconds": round(time.perf_counter() - started, 1)}
    path.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return row


def attacked(cell: Cell) -> dict[str, Any]:
    """Attack one setting and return the rows that matter."""
    record = encode(run_cell(cell).result)
    rows = {}
    for name in ("selected", "plain", "informed", "best_by_truth"):
        row = record[name]
        rows[name] = {"identified": row["identified"], "psnr": row["psnr"]["median"]} if row else None
    doubts = [check["name"] for check in record["checks"] if check["level"] != "ok"]
    attackers = [
        {"recipe": row["recipe"], "stance": row["stance"], "identified": row["summary"]["identified"]["value"]}
        for row in record["attackers"]
    ]
    return {**rows, "bar": record["bar"], "attackers": attackers, "checks": doubts, "bytes": record["bytes"]}


def trained(settings: FederationSettings) -> dict[str, Any]:
    """Train once and return the accuracy after the last round."""
    last = train(settings).rounds[-1]
    return {"accuracy": last.accuracy, "loss": last.loss, "bytes_up": last.bytes_up, "bytes_down": last.bytes_down}


def paired(own: list[float], reference: list[float]) -> dict[str, Any]:
    """Return the mean difference over seeds with twice its standard error."""
    gaps = [a - b for a, b in zip(own, reference, strict=True)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)) if len(gaps) > 1 else float("nan")
    return {"difference": mean, "two_standard_errors": 2 * spread / math.sqrt(len(gaps)) if len(gaps) > 1 else None}


def main() -> int:
    """Measure the curve, print it, and write curve.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--knob", type=float, nargs="*", default=list(KNOB))
    parser.add_argument("--records", type=int, default=32)
    parser.add_argument("--ensemble", default="quick")
    parser.add_argument("--steps", type=int, default=0, help="cap on the steps of every attack; 0 leaves the ensemble's own")
    parser.add_argument("--attack-data", default="photos")
    parser.add_argument("--seen", type=int, default=1, help="rounds the attacker sees on the same records, with fresh tilts")
    parser.add_argument("--seed", type=int, default=0, help="of the attack: which records, which first weights")
    parser.add_argument("--alone", action="store_true", help="the knob alone, without the rows at its weak end")
    parser.add_argument("--train-data", default="digits")
    parser.add_argument("--train-model", default="mlp(hidden=64)")
    parser.add_argument("--partition", default="dirichlet(alpha=0.5)")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--clients-per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--minibatch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, default=3, help="0 leaves the accuracy out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    rows: list[dict[str, Any]] = []
    accuracies: dict[str, list[float]] = {}
    for spelling in (*(() if options.alone else WEAK), *(hardened(value) for value in options.knob)):
        cell = Cell(
            data=options.attack_data,
            defense=spelling,
            ensemble=options.ensemble,
            records=options.records,
            steps=options.steps,
            device=options.device,
            rounds=options.seen,
            seed=options.seed,
            risk="off",  # nothing of it is kept here
        )
        attack = kept(options.out, "attack", cell.as_dict(), lambda cell=cell: attacked(cell))  # type: ignore[misc]
        accuracies[spelling] = []
        for seed in range(options.seeds):
            run = FederationSettings(
                data=options.train_data,
                model=options.train_model,
                defense=spelling,
                clients=options.clients,
                clients_per_round=options.clients_per_round,
                rounds=options.rounds,
                partition=options.partition,
                minibatch=options.minibatch,
                learning_rate=options.learning_rate,
                evaluate_every=options.rounds,
                seed=seed,
                device=options.device,
            )
            training = kept(options.out, "training", run.as_dict(), lambda run=run: trained(run))  # type: ignore[misc]
            accuracies[spelling].append(float(training["accuracy"]))
        own, plain = accuracies[spelling], accuracies.get("svdefense", [])
        row = {
            "defense": spelling,
            **{name: attack[name] for name in ("selected", "plain", "informed", "bar")},
            "accuracies": own,
            "against_svdefense": paired(own, plain) if own and plain else None,
        }
        rows.append(row)
        _show(row)
    figures = {
        "command": " ".join(sys.argv),
        "version": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "rows": rows,
    }
    (options.out / "curve.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def _show(row: dict[str, Any]) -> None:
    shares = [f"{name} {row[name]['identified']['value']:6.1%}" for name in ("selected", "plain", "informed") if row[name]]
    accuracy = f"   accuracy {sum(row['accuracies']) / len(row['accuracies']):.4f}" if row["accuracies"] else ""
    print(f"{row['defense']:48} {'  '.join(shares)}  null {row['bar']['identified']['value']:6.1%}{accuracy}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
