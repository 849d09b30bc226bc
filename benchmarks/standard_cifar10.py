"""The published measurement of the foundation: ``standard`` on CIFAR-10, undefended, over models, batch sizes and local steps.

    python benchmarks/standard_cifar10.py --data cifar10.npz --resnet20 cifar10_resnet20.pt --device cuda --workers 8 --out DIR

Cells already in the folder are not run again, so a lease that ends early is continued by the same command.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from gradveil.run.describe import describe_cells
from gradveil.run.pool import Progress, run_cells
from gradveil.study.cell import Cell

BREATH = 10.0
"""Seconds between two lines of progress."""


def cells(data: str, resnet20: str, device: str) -> list[Cell]:
    """Return the cells in the order of importance."""
    common: dict[str, Any] = {"data": data, "ensemble": "standard", "device": device, "seed": 0}
    sigmoid, relu = "lenet", 'lenet(activation="relu")'
    trained: dict[str, Any] = {"model": 'resnet20(normalize="imagenet")', "weights": resnet20, "state": "given"}
    found = [
        Cell(**common, model="resnet18", records=24),
        *(Cell(**common, model=model, records=32) for model in (sigmoid, relu, "convnet")),
        Cell(**common, **trained, records=24),
    ]
    for network in (*({"model": model} for model in (sigmoid, relu, "convnet", "resnet18")), trained):
        found += [Cell(**common, **network, records=32, batch_size=size) for size in (4, 16)]
        found += [Cell(**common, **network, records=32, batch_size=4, local_steps=4)]
    return found


def main() -> None:
    """Run the cells and print progress."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--resnet20", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=0, help="cap on steps per recipe, for a trial")
    parser.add_argument("--ensemble", default="", help="another ensemble or a single attack")
    parser.add_argument("--records", type=int, default=0, help="fewer records than the cells have, for a CPU")
    parser.add_argument("--risk", default="auto", help="off spares the risk scores, a minute a record for convnet on a CPU")
    parser.add_argument("--only", default="", help="run only cells whose label, such as lenet b4 s1, contains this")
    parser.add_argument("--execution", default="auto", help="batched spares the compiler's minutes where a lease is short")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    begun = time.perf_counter()
    todo = cells(options.data, options.resnet20, options.device)
    todo = [cell for cell in todo if options.only in f"{cell.model} b{cell.batch_size} s{cell.local_steps}"]
    if options.ensemble:
        todo = [cell.replace(ensemble=options.ensemble) for cell in todo]
    if options.records:
        todo = [cell.replace(records=options.records) for cell in todo]
    todo = [cell.replace(execution=options.execution, risk=options.risk) for cell in todo]
    if options.steps:
        todo = [cell.replace(steps=options.steps) for cell in todo]

    told = 0.0

    def show(progress: Progress) -> None:
        nonlocal told
        now = time.perf_counter() - begun
        if now - told >= BREATH or progress.done_cells == progress.cells:
            told, share = now, progress.done_steps / max(progress.steps, 1)
            sys.stderr.write(f"{now:7.1f} s  {progress.done_cells}/{progress.cells} cells  {share:4.0%} of all steps\n")
            sys.stderr.flush()

    command = "python benchmarks/standard_cifar10.py"
    run_cells(
        todo,
        options.out,
        lambda keys: describe_cells(todo, keys, command, "standard on CIFAR-10"),
        workers=options.workers,
        on_progress=show,
    )


if __name__ == "__main__":
    main()
