"""Seconds per reconstructed record at equal quality: the same recipe on one record after the other and on many at once.

    python -m benchmarks.seconds_per_record --data cifar10.npz --device cuda --targets 256 --loop-targets 2 --out FILE

Steps per second say little if a faster program finds worse pictures. Here both ways run the same recipe to its end on
undefended updates of a sigmoid LeNet, and PSNR is printed beside the seconds: of all records of a row, and of those that every
row has, since single records differ by ten decibels and more.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Timer, arguments, finish, read
from gradveil.attacks import launch
from gradveil.attacks.ensembles import STANDARD
from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.metrics import median
from gradveil.metrics.psnr import peak_signal_to_noise
from gradveil.records import Reconstruction
from gradveil.study.cell import Cell


def measure(subject: Subject, execution: str, count: int, common: int) -> dict[str, Any]:
    """Run the first recipe of ``standard`` with one restart on ``count`` targets; return seconds per record and the quality."""
    attack = replace(STANDARD.members[0].attack, restarts=1)
    context = replace(subject.context(attack.steps), execution=execution)
    chosen = subject.targets[:count]
    found: list[Reconstruction] = []
    seconds = Timer(subject.cell.device)(
        execution, lambda: found.extend(launch(attack, [t.observation for t in chosen], context))
    )
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
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--targets", type=int, default=256)
    parser.add_argument("--loop-targets", type=int, default=2)
    parser.add_argument("--modes", default="batched,compiled")
    options = read(parser)
    cell = Cell(data=options.data, device=options.device, records=options.targets)
    subject = build_subject(cell, load_cell_data(cell), rehearsals=0)
    few = options.loop_targets
    rows = [measure(subject, "looped", few, few)]
    rows += [measure(subject, mode, options.targets, few) for mode in options.modes.split(",")]
    for row in rows:
        row["ratio_to_loop"] = round(rows[0]["seconds_per_record"] / row["seconds_per_record"], 1)
    finish("seconds_per_record", {"model": "lenet", "data": Path(options.data).name, "rows": rows}, options)


if __name__ == "__main__":
    main()
