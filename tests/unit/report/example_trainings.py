"""Makes trainings that look like real ones: those behind the utility of a results folder, and one of `gradveil train`."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.unit.report.example_results import Example


def training_key(example: Example, seed: int) -> str:
    """Return the key of a made-up training."""
    return hashlib.sha256(f"{example.spelling}|{seed}".encode()).hexdigest()[:16]


def guarantee(spelling: str, releases: int) -> dict[str, Any]:
    """Return a made-up guarantee: only clipping before noise has one."""
    if "clipping" not in spelling:
        return {"epsilon": None, "delta": None, "unit": "", "assumptions": [], "reason": "x", "sentence": "no guarantee: x"}
    return {
        **{"epsilon": 4.377 * releases, "delta": 1e-5, "unit": "client", "reason": ""},
        "assumptions": ["counts of examples are public", f"the client takes part in at most {releases} noisy releases"],
        "sentence": f"ε = {4.377 * releases:.3g} at δ = 1e-05 per client after {releases} releases (exact)",
    }


def certificate(spelling: str) -> dict[str, Any]:
    """Return a made-up certificate, for the same defenses as a guarantee."""
    if "clipping" not in spelling:
        return {"identified": None, "psnr": {}, "assumptions": [], "sentence": "no certificate: x", "matching": None}
    return {
        **{"identified": 0.274, "psnr": {"15": 0.512, "20": 0.274}, "unit": "client", "reason": ""},
        "assumptions": ["the record was drawn from 128 candidates"],
        "sentence": "at most 27 % of records can be identified by anyone among 128 candidates (noise per client)",
        "matching": {"value": 3 / 16, "low": 0.066, "high": 0.43, "count": 3, "n": 16},
        "mean_error": {"mse": 0.0021, "low": 0.0019, "high": 0.0023, "psnr": 27.2, "n": 32, "smoothing": 0.1, "reason": ""},
    }


def write_training(folder: Path, example: Example, seed: int, rounds: int = 20) -> dict[str, Any]:
    """Write one training as the results format has it, and return its record."""
    top = example.accuracy + 0.01 * math.sin(7 * seed)
    looks = [round(top - (top - 0.1) * math.exp(-i / 5) + 0.004 * math.sin(3 * i + seed), 4) for i in range(1, rounds + 1)]
    sent = 5 * example.bytes_up
    record = {
        "format": "gradveil-utility-1",
        "key": training_key(example, seed),
        "training": {"data": "/home/ada/ward-7/scans.npz", "defense": example.spelling, "seed": seed, "rounds": rounds},
        "chance": 0.12,
        "final_accuracy": looks[-1],
        "best_accuracy": max(looks),
        "bytes": {"up": sent * rounds, "down": 5 * 63304 * rounds},
        "rounds": [
            {
                "round": i + 1,
                "accuracy": look,
                "loss": 1.0,
                "bytes_up": sent,
                "bytes_down": 5 * 63304,
                "refused": 0,
                "counters": {},
            }
            for i, look in enumerate(looks)
        ],
    }
    room = folder / "utility"
    room.mkdir(exist_ok=True)
    (room / f"{record['key']}.json").write_text(json.dumps(record))
    latency = {"defended_ms": 10 * example.time, "undefended_ms": 10.0, "ratio": example.time}
    timing = {"key": record["key"], "seconds": 9.0, "client_seconds": [0.4] * rounds, "latency": latency}
    (room / f"{record['key']}.timing.json").write_text(json.dumps(timing))
    return record


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """Return a mean over seeds with its t interval for three of them."""
    mean = statistics.fmean(values)
    half = 4.303 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return {"value": mean, "low": low, "high": high, "n": len(values), "per_seed": list(values)}


def utility(folder: Path, example: Example, undefended: Example, seeds: int) -> dict[str, Any]:
    """Write the trainings of a defense and those they are paired with, and return the cell's utility."""
    bare = [write_training(folder, undefended, seed) for seed in range(seeds)]
    own = [write_training(folder, example, seed) for seed in range(seeds)]
    pairs = [(a["final_accuracy"], b["final_accuracy"]) for a, b in zip(own, bare, strict=True)]
    return {
        "settings": {"rounds": 20, "clients": 10, "clients_per_round": 5, "partition": "iid", "local_epochs": 1, "seeds": seeds}
        | {"minibatch": 16, "learning_rate": 0.1, "aggregation": "fedavg", "test_share": 0.2, "evaluate_every": 1},
        "seeds": list(range(seeds)),
        "trainings": [each["key"] for each in own],
        "baseline": [each["key"] for each in bare],
        "accuracy": estimate([a for a, _ in pairs]),
        "undefended": estimate([b for _, b in pairs]),
        "difference": estimate([a - b for a, b in pairs]),
        "pmm": estimate([a / b for a, b in pairs]),
        "chance": 0.12,
        "guarantee": guarantee(example.spelling, 2),
        "bytes": {**own[0]["bytes"], "undefended_up": bare[0]["bytes"]["up"], "undefended_down": bare[0]["bytes"]["down"]},
    }


ROUND: dict[str, Any] = {
    "bytes_up": 7600,
    "bytes_down": 9000,
    "client_seconds": 2.9,
    "seconds": 3.1,
    "clients": [0, 1],
    "refused": 0,
    "reasons": {},
    "counters": {"fallback_rate": 0.25},
    "note": "",
}


def make_training(folder: Path, **changes: Any) -> Path:
    """Write training.json as docs/results-format.md has it."""
    looks = [0.31, None, 0.52, 0.61]
    training: dict[str, Any] = {
        "format": "gradveil-training-1",
        "version": "0.1.0",
        "command": "gradveil train --data /home/ada/ward-7/scans.npz --out trained",
        "settings": {
            **{"data": "/home/ada/ward-7/scans.npz", "model": "convnet", "defense": "pruning(rate=0.9)", "seed": 3, "rounds": 4},
            **{"clients": 10, "clients_per_round": 2, "partition": "iid", "local_epochs": 1, "minibatch": 32},
            **{"learning_rate": 0.1, "aggregation": "fedavg"},
        },
        "data": {"name": "scans", "builtin": False, "classes": 9, "train": 401, "test": 100, "test_from": "held out"},
        "parameters": 1900,
        "rounds": [{**ROUND, "round": i + 1, "accuracy": look, "loss": 1.5} for i, look in enumerate(looks)],
        "finished": True,
        "final_accuracy": 0.61,
        "best_accuracy": 0.61,
        "bytes": {"up": 30400, "down": 36000, "up_per_round": 7600.0, "down_per_round": 9000.0, "dense_per_round": 9500.0},
        "latency": {"defended_ms": 31.0, "undefended_ms": 29.5, "ratio": 1.0508},
        "guarantee": guarantee("pruning(rate=0.9)", 4),
        "refused": 0,
        "seconds": 61.2,
        "provenance": {"python": "3.11.7", "threads": 1},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training.json").write_text(json.dumps({**training, **changes}))
    return folder
