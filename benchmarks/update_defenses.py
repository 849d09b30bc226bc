"""The tables of the SVDefense paper, with an attacker who knows the defense: every defense on updates, plain against informed.

    python benchmarks/update_defenses.py run --data cifar10.npz --model lenet --records 128 --workers 8 --out DIR
    python benchmarks/update_defenses.py table --out DIR
    python benchmarks/update_defenses.py run --data cifar10.npz --records 32 --ensemble patient-1 --only 'CENSOR;sign' --out DIR

Cells already in the folder are not run again, so a lease that ends early is continued by the same command.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import special_ensembles  # noqa: F401 - makes its ensembles known
from defense_rows import ROWS, Row, rows

from gradveil.run.describe import describe_cells
from gradveil.run.pool import Progress, run_cells
from gradveil.study.cell import Cell


def run(options: argparse.Namespace) -> None:
    """Attack every row."""
    begun = time.perf_counter()
    common: dict[str, Any] = {
        "data": options.data,
        "labels": options.labels,
        "model": options.model,
        "records": options.records,
        "batch_size": options.batch,
        "ensemble": options.ensemble,
        "steps": options.steps,
        "device": options.device,
        "seed": options.seed,
        "risk": options.risk,
    }
    spellings = [options.defense] if options.defense else [row.spelling for row in rows(options.only)]
    cells = [Cell(**common, defense=spelling) for spelling in spellings]
    finished = 0

    def show(progress: Progress) -> None:
        nonlocal finished
        if progress.done_cells != finished:
            finished = progress.done_cells
            sys.stderr.write(f"{time.perf_counter() - begun:7.1f} s  {finished}/{progress.cells}  {progress.label}\n")
            sys.stderr.flush()

    command = "python benchmarks/update_defenses.py " + " ".join(sys.argv[1:])
    title = "every defense on updates, plain against informed"
    run_cells(
        cells, options.out, lambda keys: describe_cells(cells, keys, command, title), workers=options.workers, on_progress=show
    )


def table(options: argparse.Namespace) -> None:
    """Print the cells of a folder as a table in Markdown."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((options.out / "cells").glob("*.json"))]
    by_spelling = {cell["defense"]["spelling"]: cell for cell in found if "defense" in cell}
    # Where the weights of LPIPS were not at hand, it was taken afterwards, from pictures rounded to eight bits.
    afterwards = options.out / "lpips.json"
    lpips = json.loads(afterwards.read_text(encoding="utf-8")) if afterwards.is_file() else {}
    sys.stdout.write(
        "| defense | plain: identified | PSNR, dB | informed: identified | PSNR, dB | SSIM | LPIPS | null: identified | PSNR |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    for row in ROWS:
        cell = by_spelling.get(row.spelling)
        if cell is not None:
            sys.stdout.write(_line(row, cell, lpips.get(cell["key"], {})))


def _line(row: Row, cell: dict[str, Any], lpips: dict[str, float]) -> str:
    plain, informed = cell["plain"], cell["informed"] or cell["plain"]
    bar = cell["bar"]
    values = [
        row.title,
        _identified(plain, cell["n"]),
        _number(plain, "psnr"),
        _identified(informed, cell["n"]),
        _number(informed, "psnr"),
        _number(informed, "ssim", 3),
        _number(informed, "lpips", 3) if not lpips else f"{lpips.get('informed', lpips['plain']):.3f}".lstrip("0"),
        f"{bar['identified']['value'] * cell['n']:.0f} ({bar['identified']['null'].replace('_', ' ')})",
        f"{bar['psnr']['value']:.1f}",
    ]
    return "| " + " | ".join(values) + " |\n"


def _identified(summary: dict[str, Any] | None, n: int) -> str:
    if summary is None:
        return "–"
    share = summary["identified"]
    return f"{round(share['value'] * n)} of {n} ({100 * share['low']:.0f}–{100 * share['high']:.0f} %)"


def _number(summary: dict[str, Any] | None, name: str, digits: int = 1) -> str:
    value = (summary or {}).get(name)
    if not isinstance(value, dict) or "median" not in value:
        return "–"
    text = f"{value['median']:.{digits}f}"
    return text.lstrip("0") if digits == 3 else text


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--data", default="photos")
    parser.add_argument("--labels", default="")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--records", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ensemble", default="quick")
    parser.add_argument("--steps", type=int, default=0, help="cap on steps per recipe; 0 leaves the ensemble's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--risk", default="auto", help="'off' leaves out the scores without an attack; slow on large networks")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", default="", help="'main', or titles separated by semicolons")
    parser.add_argument("--defense", default="", help="a defense in other settings than those of the rows")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    (run if options.what == "run" else table)(options)


if __name__ == "__main__":
    main()
