"""Seconds per reconstructed record at equal quality: the same recipe on one record after the other and on many at once.

    python benchmarks/seconds_per_record.py --data cifar10.npz --device cuda --targets 256 --loop-targets 2 --out FILE

Steps per second say little if a faster program finds worse pictures. Here both ways run the same recipe to its end on
undefended updates of a sigmoid LeNet, and PSNR is printed beside the seconds: of all records of a row, and of those that every
row has, since single records differ by ten decibels and more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradveil.attacks import launch
from gradveil.attacks.ensembles import STANDARD
from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.metrics import median
from gradveil.metrics.psnr import peak_signal_to_noise
from gradveil.provenance import provenance
from gradveil.study.cell import Cell


def measure(subject: Subject, execution: str, count: int, common: int) -> dict[str, Any]:
    """Run the first recipe of ``standard`` with one restart on ``count`` targets; return seconds per record and the quality."""
    attack = replace(STANDARD.members[0].attack, restarts=1)
    context = replace(subject.context(attack.steps), execution=execution)
    chosen = subject.targets[:count]
    begun = time.perf_counter()
    found = launch(attack, [target.observation for target in chosen], context)
    if subject.cell.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    ordered = sorted(found, key=lambda one: one.target)
    values = torch.cat([peak_signal_to_noise(one.inputs.cpu(), chosen[one.target].batch.inputs) for one in ordered])
    return {
        "execution": execution,
        "targets": count,
        "steps": attack.steps,
        "seconds": round(seconds, 2),
        "seconds_per_record": round(seconds / count, 4),
        "median_psnr": round(median(values), 2),
        "worst_psnr": round(float(values.min()), 2),
        "median_psnr_of_common_records": round(median(values[:common]), 2),
    }


def main() -> None:
    """Measure every way and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--targets", type=int, default=256)
    parser.add_argument("--loop-targets", type=int, default=2)
    parser.add_argument("--modes", default="batched,compiled")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cell = Cell(data=options.data, device=options.device, records=options.targets)
    subject = build_subject(cell, load_cell_data(cell), rehearsals=0)
    few = options.loop_targets
    rows = [measure(subject, "looped", few, few)]
    rows += [measure(subject, mode, options.targets, few) for mode in options.modes.split(",")]
    for row in rows:
        row["ratio_to_loop"] = round(rows[0]["seconds_per_record"] / row["seconds_per_record"], 1)
    text = json.dumps({"model": "lenet", "rows": rows, "provenance": provenance(cell.seed, options.device)}, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
