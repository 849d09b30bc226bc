"""Makes results folders that look like real ones: several defenses, ladder rungs, failing checks, hostile strings.

Run it to look at a report: ``python -m tests.unit.report.example_results /tmp/example``.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.unit.report.example_risks import exposure, risk
from tests.unit.report.example_trainings import certificate, guarantee, utility

Pictures = npt.NDArray[np.float32]

HOSTILE = "<script>alert('x')</script><img src=https://evil.example/x.png onerror=alert(1)>"
N = 16


@dataclass(frozen=True)
class Example:
    """One defense of the made-up run: how many of 16 records plain and informed attackers identify, and what it costs."""

    spelling: str
    plain: int
    informed: int | None
    psnr: float
    rung: int = 1
    rungs: int = 1
    bytes_up: int = 63304
    defense_ms: float = 2.9
    checks: list[dict[str, str]] = field(default_factory=list)
    accuracy: float = 0.84
    time: float = 1.0


DEFENSES = (
    Example("none", 15, None, 31.0),
    Example("gaussian_noise(std=0.001)", 13, 15, 27.4, 1, 3, defense_ms=3.0, accuracy=0.838, time=1.04),
    Example("gaussian_noise(std=0.01)", 5, 9, 18.2, 2, 3, defense_ms=3.1, accuracy=0.81, time=1.05),
    Example("gaussian_noise(std=0.1)", 1, 1, 10.9, 3, 3, defense_ms=3.1, accuracy=0.31, time=1.05),
    Example("top_k(keep=0.3)", 12, 15, 26.0, 1, 3, 37900, 3.6, accuracy=0.836, time=1.2),
    Example("top_k(keep=0.1)", 6, 13, 22.5, 2, 3, 12700, 3.5, accuracy=0.829, time=1.19),
    Example("top_k(keep=0.01)", 2, 4, 13.4, 3, 3, 1290, 3.4, accuracy=0.74, time=1.17),
    Example("clipping(bound=1.0) + gaussian_noise(std=0.05)", 1, 2, 11.6, defense_ms=3.4, accuracy=0.69, time=1.3),
)
FAIL = {
    "name": "matching_loss_fell",
    "level": "fail",
    "sentence": "The matching loss never fell for 14 of 16 records",
    "remedy": "Raise the step budget, or choose an ensemble with a recipe for this model.",
}
WARN = {
    "name": "enough_records",
    "level": "warn",
    "sentence": "16 records are few: an interval this wide cannot show less than 19 % leakage.",
    "remedy": "Audit at least 72 records to claim less than 5 %.",
}
OK = {"name": "truth_is_a_minimum", "level": "ok", "sentence": "The truth is a minimum of every objective.", "remedy": ""}


def wilson(count: int, n: int) -> dict[str, float]:
    """Return a share with its 95 % Wilson interval."""
    z, p = 1.96, count / n
    middle, half = (p + z * z / (2 * n)), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return {
        "value": p,
        "low": max(0.0, (middle - half) / scale),
        "high": min(1.0, (middle + half) / scale),
        "count": count,
        "n": n,
    }


def summary(identified: int, psnr: float, n: int = N) -> dict[str, Any]:
    """Return a SUMMARY as the results format has it."""
    mse = 10 ** (-psnr / 10)
    return {
        "n": n,
        "identified": wilson(identified, n),
        "psnr": {"median": psnr, "low": psnr - 1.7, "high": psnr + 1.2, "worst": psnr + 6, "n": n},
        "ssim": {"median": 0.5, "low": 0.42, "high": 0.61, "worst": 0.9, "n": n},
        "mse": {"median": mse, "low": mse * 0.8, "high": mse * 1.3, "worst": mse / 4, "n": n},
        "lpips": {"unavailable": "the lpips weights are not installed"},
        "label_accuracy": wilson(n, n),
        "iip_3": wilson(min(n, identified + 1), n),
        "iip_5": wilson(min(n, identified + 2), n),
        "noise_fraction": {"median": 0.31, "low": 0.2, "high": 0.4, "worst": 0.2, "n": n},
        "rdlv_nvflare": {"median": 0.12, "low": -0.1, "high": 0.3, "worst": 0.5, "n": n},
    }


def pictures(n: int = N, channels: int = 3, side: int = 32) -> Pictures:
    """Return smooth colourful pictures."""
    rng = np.random.default_rng(7)
    y, x = np.mgrid[0:side, 0:side] / side
    out = np.zeros((n, channels, side, side))
    for i, c in itertools.product(range(n), range(channels)):
        a, b, p, q = rng.uniform(1, 7, 2).tolist() + rng.uniform(0, 6, 2).tolist()
        out[i, c] = 0.5 + 0.3 * np.sin(a * x + p) * np.cos(b * y + q) + 0.2 * ((x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.02 * a)
    return np.clip(out, 0, 1).astype(np.float32)


def _noisy(clean: Pictures, psnr: float, seed: int) -> Pictures:
    rng = np.random.default_rng(seed)
    noise = 10 ** (-psnr / 20) * rng.standard_normal(clean.shape)
    return np.clip(clean + noise, 0, 1).astype(np.float32)


def _records(example: Example, owners: bool) -> list[dict[str, Any]]:
    identified = max(example.plain, example.informed or 0)
    rows = []
    for i in range(N):
        hit, psnr = i < identified, example.psnr + 6 * math.sin(i)
        rows.append(
            {
                "pseudonym": f"r-{hashlib.sha256(str(i).encode()).hexdigest()[:4]}",
                "owner": f"o-{i // 4:04x}" if owners else None,
                "label": i % 10,
                "label_correct": True,
                "identified": hit,
                "rank": 1 if hit else 2 + 7 * i,
                "psnr": psnr,
                "ssim": 0.5,
                "mse": 10 ** (-psnr / 10),
                "lpips": None,
                "recipe": "inverting_gradients",
                "stance": "plain",
                "regret_db": 0.2,
            }
        )
    return rows


def _attackers(example: Example) -> list[dict[str, Any]]:
    rows = []
    for recipe, stance, chosen in [
        ("inverting_gradients", "plain", 7),
        ("dlg", "plain", 2),
        ("inverting_gradients", "own", 5),
        ("dlg", "straight_through", 2),
    ]:
        count = example.plain if stance == "plain" else example.informed
        if count is not None:
            score = summary(max(0, count - 1), example.psnr - 1)
            rows.append(
                {"recipe": recipe, "stance": stance, "tries": 2, "chosen": chosen, "rehearsal_psnr": 17.1, "summary": score}
            )
    return rows


def cell(example: Example, key: str, settings: dict[str, Any], owners: bool = False) -> dict[str, Any]:
    """Return a cell as the results format has it."""
    informed = None if example.informed is None else summary(example.informed, example.psnr)
    selected = max(example.plain, example.informed or 0)
    return {
        "format": "gradveil-cell-1",
        "key": key,
        "cell": {**settings, "defense": example.spelling},
        "defense": {
            "spelling": example.spelling,
            "parts": [part.split("(")[0].strip() for part in example.spelling.split(" + ")],
            "rung": example.rung,
            "rungs": example.rungs,
            "random": "noise" in example.spelling,
            "acts_on": ["update"],
            "secure_aggregation": "top_k" not in example.spelling,
            "guarantee": guarantee(example.spelling, 1),
        },
        "threat": {
            "clients": 1,
            "rounds": 1,
            "knows": ["architecture", "weights", "defense", "labels"],
            "active": False,
            "sentences": [
                "An honest-but-curious server sees one client's update of one round, on its own.",
                "It knows the architecture, the weights, the learning rate, the labels and which defense runs.",
                "It changes nothing and keeps to the protocol.",
            ],
        },
        "n": N,
        "candidates": 128,
        "chance": 1 / 128,
        "selected": summary(selected, example.psnr),
        "plain": summary(example.plain, example.psnr - 1),
        "informed": informed,
        "best_by_truth": summary(min(N, selected + 1), example.psnr + 0.4),
        "regret_db": {"median": 0.4, "worst": 2.1, "flagged": False},
        "attackers": _attackers(example),
        "nulls": {
            "grey": summary(0, 11.0),
            "data_mean": summary(1, 12.3),
            "prior_only": summary(0, 9.1),
            "derangement": summary(1, 8.0),
        },
        "bar": {
            # The largest of four draws, and what all four together leave possible.
            "identified": {"null": "derangement", "value": 1 / N, "high": wilson(2, 4 * N)["high"], "draws": 4},
            "psnr": {"null": "data_mean", "value": 12.3},
        },
        "records": _records(example, owners),
        "checks": [OK, *example.checks],
        "bytes": {"up": example.bytes_up, "dense": 63304},
        "certificate": certificate(example.spelling),
        "risk": risk(example.spelling, _records(example, owners)),
        "exposure": exposure(example.spelling, _records(example, owners)),
    }


def evidence(example: Example, owners: bool = False) -> dict[str, Any]:
    """Return what stands beside the pictures: a list points out everybody under sparse updates, and nobody under much noise."""
    seen = max(example.plain, example.informed or 0)
    pointed = N if "top_k" in example.spelling else min(N, seen + 1)
    null = {"null": "derangement", "value": 1 / N, "high": 0.1, "draws": 4}
    people = {"owners": wilson(min(4, seen), 4), "owners_null": {"null": "derangement", "value": 0.25}} if owners else {}
    reach = [{"attacker": "likelihood", "share": wilson(pointed, N), "informed": True}]
    random = {"share": wilson(pointed, N), "attacker": "likelihood", "null": null, "reached": reach, "size": 128, **people}
    label = {"share": wilson(min(N, seen + 3), N), "attacker": "rows", "null": {**null, "value": 0.25, "high": 0.3}}
    level = {"label": label, "list": {"lists": {"random": random}, "draws": 4}}
    if owners:
        level |= {
            "owners": {
                "share": wilson(min(4, seen), 4),
                "attacker": "dlg (plain)",
                "null": {"null": "derangement", "value": 0.25},
            }
        }
    found: dict[str, Any] = {"levels": level}
    if "none" not in example.spelling:
        failed = (N - seen) // 2
        gone = N - seen - failed
        found |= {"gap": {"search_failed": wilson(failed, N), "information_gone": wilson(gone, N), "found": wilson(seen, N)}}
        ladder = [{"spelling": "gaussian_noise(std=0.001)", "identified": wilson(15, N)}]
        planted = [{"leak": 0.01, "identified": wilson(2, N)}, {"leak": 0.1, "identified": wilson(14, N)}]
        found |= {"power": {"ensemble": "quick-1", "ladder": ladder, "planted": planted, "a50": 0.047, "shown": True}}
    return found


SETTINGS: dict[str, Any] = {
    "data": "photos",
    "model": "lenet",
    "state": "untrained",
    "batch_size": 1,
    "local_steps": 1,
    "clients": 1,
    "rounds": 1,
    "ensemble": "quick-1",
    "records": N,
    "seed": 0,
    "batch_norm": "eval",
    "loss": "cross_entropy",
    "shares": "gradient",
    "execution": "batched",
    "threads": 2,
    "device": "cpu",
}


@functools.cache
def _npz(psnr: float, informed: bool, side: int) -> bytes:
    clean = pictures(side=side)
    arrays = {
        "original": clean,
        "selected": _noisy(clean, psnr, 1),
        "plain": _noisy(clean, psnr - 2, 2),
        "best_by_truth": _noisy(clean, psnr + 1, 3),
        "null_grey": np.full_like(clean, 0.5),
        "null_data_mean": np.broadcast_to(clean.mean(0), clean.shape).copy(),
        "null_prior_only": _noisy(np.full_like(clean, 0.5), 14, 4),
    }
    if informed:
        arrays["informed"] = _noisy(clean, psnr, 5)
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def _cards(defenses: Sequence[Example], hostile: bool) -> dict[str, Any]:
    names = {part.split("(")[0].strip() for example in defenses for part in example.spelling.split(" + ")}
    papers = {"paper": "Zhu et al., Deep Leakage from Gradients, 2019", "url": "https://arxiv.org/abs/1906.08935"}
    weakness = HOSTILE if hostile else "Costs accuracy before it stops an informed attacker."
    return {
        "defenses": {
            name: {
                "name": name,
                "summary": f"What {name} does, in one sentence.",
                "paper": "",
                "url": "",
                "cost": "little",
                "weakness": weakness,
            }
            for name in sorted(names)
        },
        "attacks": {"dlg": {"name": "dlg", "summary": "Matches the gradient by L-BFGS.", **papers}},
        "metrics": {
            "psnr": {"name": "psnr", "summary": "Peak signal-to-noise ratio; higher is closer to the original.", "paper": ""}
        },
    }


def make_results(
    folder: Path,
    *,
    defenses: Sequence[Example] = DEFENSES,
    builtin: bool = True,
    hostile: bool = False,
    owners: bool = False,
    grid: Sequence[dict[str, Any]] = ({},),
    missing: int = 0,
    without_pictures: Sequence[int] = (),
    side: int = 32,
    seeds: int = 0,
    levels: bool = False,
) -> Path:
    """Write a results folder and return it.

    Args:
        folder: Where to write; made if missing.
        defenses: The defenses of the run.
        builtin: Whether the data is built in.
        hostile: Whether names and titles try to break out of the page.
        owners: Whether records have owners.
        grid: Settings that differ from the defaults, one entry per setting; batch size weakens the leak.
        missing: How many cells at the end of the plan are not done.
        without_pictures: Positions of cells whose npz is missing.
        side: Height and width of the pictures.
        seeds: Trainings per defense behind its utility; 0 measures none.
        levels: Whether labels, lists, owners, gaps and power were measured.
    """
    cells = folder / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    base = dict(SETTINGS, data=HOSTILE if hostile else ("photos" if builtin else "/home/ada/ward-7/scans.npz"))
    plan = [({**base, **changes}, example) for changes in grid for example in defenses]
    keys = [hashlib.sha256(f"{i}".encode()).hexdigest()[:16] for i in range(len(plan))]
    for i, (key, (settings, example)) in enumerate(zip(keys, plan, strict=True)):
        if i >= len(plan) - missing:
            break
        made = cell(_weaken(example, settings), key, settings, owners)
        made |= {"utility": utility(folder, example, DEFENSES[0], seeds)} if seeds else {}
        made |= evidence(example, owners) if levels else {}
        (cells / f"{key}.json").write_text(json.dumps(made))
        timing = {"key": key, "seconds": 21.4, "attack_steps": 16000, "steps_per_second": 900.0, "peak_memory_mb": 900}
        timing |= {"risk_seconds": 20.1}
        timing |= {"defense_ms": example.defense_ms, "undefended_ms": 2.9}
        (cells / f"{key}.timing.json").write_text(json.dumps(timing))
        if i not in without_pictures:
            (cells / f"{key}.npz").write_bytes(_npz(example.psnr, example.informed is not None, side))
    run = {
        "format": "gradveil-run-1",
        "version": "0.1.0",
        "title": HOSTILE if hostile else "Photos on an untrained LeNet",
        "command": f"gradveil audit {'' if builtin else '--data ' + base['data']} --out results/example --seed 0",
        "plan": {"data": base["data"], "model": "lenet", "defenses": [example.spelling for example in defenses], "lr": math.inf},
        "cells": keys,
        "builtin_data": builtin,
        "not_tested": ["membership inference", "what the final model remembers", "active servers", "several rounds together"],
        "provenance": {
            "gradveil": "0.1.0",
            "python": "3.11.7",
            "torch": "2.13.0",
            "numpy": "2.4.6",
            "platform": "Linux-6.1-x86_64",
            "device": "cpu",
            "threads": 2,
            "commit": "abc1234",
            "seed": 0,
            "started": "2026-11-15T08:00:00+00:00",
        },
        "cards": _cards(defenses, hostile),
    }
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def _weaken(example: Example, settings: dict[str, Any]) -> Example:
    lost = int(math.log2(settings["batch_size"])) * 3 + (settings["local_steps"] > 1) + 2 * (settings["state"] == "trained")
    informed = None if example.informed is None else max(0, example.informed - lost)
    plain = max(0, example.plain - lost)
    return replace(example, plain=plain, informed=informed)


if __name__ == "__main__":
    make_results(Path(sys.argv[1]), seeds=3, levels=True, owners=True)
