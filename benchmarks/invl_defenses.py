"""Tables 2 to 4 of the InvRE paper in small: guided noise against plain noise, pruning and dropout, one row at a time.

No study: accuracy is that of a client whose data is one minibatch a round, or of parties that predict with a defense they did
not train with, and cost counts kept bases; a plan trains with the defense it attacks.

    python benchmarks/invl_defenses.py rows
    python benchmarks/invl_defenses.py run --part attack --row InvL-GNP --data cifar10.npz --records 64 --out DIR
    python benchmarks/invl_defenses.py run --part accuracy --row InvL-GNP --data cifar10.npz --rounds 600 --seed 0 --out DIR
    python benchmarks/invl_defenses.py run --part cost --row InvL-GNP --data cifar10.npz --out DIR
    python benchmarks/invl_defenses.py run --part attack --vertical --row InvL-ENP --model 'resnet18' --cut cut2 --out DIR
    python benchmarks/invl_defenses.py table --out DIR

Every row of every part writes one JSON and depends on no other, so rows run in parallel; a finished one is not repeated.
Settings are the paper's for CIFAR-10, whose δ is a variance. Attacks: plain and informed; the ensemble
quick-no-simulation-1 leaves out those that run a defense on every candidate. Accuracy and cost: see `invl_horizontal.py` and
`invl_vertical.py`. What a kept basis costs in protection: `invl_kept.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import invl_horizontal
import invl_vertical
import torch

from gradveil import __version__
from gradveil.run.describe import describe_cells
from gradveil.run.pool import run_cells
from gradveil.study.cell import Cell

FORMAT = "gradveil-invl-1"
PARTS = ("attack", "accuracy", "cost")
METRICS = ("mse", "psnr", "ssim")


@dataclass(frozen=True)
class Row:
    """One defense of a table.

    Attributes:
        title: As the paper calls it, or ours.
        spelling: As `gradveil.defenses.build_defense` reads it; ``{refresh}`` is filled in.
        published: MSE, PSNR, SSIM and accuracy in the paper's table, where it is there.
        trained: What is trained with where the spelling's own basis, anew for every record and round, is out of reach.
    """

    title: str
    spelling: str
    published: tuple[float, float, float, float] | None = None
    trained: str = ""


SHARED = "invl_dnp(delta=0.08, basis='class', refresh={refresh})"
HORIZONTAL = (
    Row("Clean", "none", (0.004, 24.85, 0.771, 0.725)),
    Row("Prune", "pruning(rate=0.995)", (0.024, 16.22, 0.410, 0.390)),
    Row("Dropout", "entry_dropout(rate=0.995)", (0.017, 18.04, 0.469, 0.331)),
    Row("DNP", "data_noise(std=0.26458)", (0.033, 15.19, 0.377, 0.634)),
    Row("InvL-DNP", "invl_dnp(delta=0.08)", (0.036, 14.63, 0.296, 0.642), SHARED),
    Row("InvL-DNP, class basis", SHARED),
    Row("GNP", "gaussian_noise(std=0.3873)", (0.062, 12.45, 0.098, 0.707)),
    Row("InvL-GNP", "invl_gnp(delta=0.25)", (0.065, 12.14, 0.084, 0.712), "invl_gnp(delta=0.25, refresh={refresh})"),
    Row("InvL-GNP, kept basis", "invl_gnp(delta=0.25, refresh={refresh})"),
    Row("InvL-GNP, public centres", "invl_gnp(delta=0.25, centres='public', refresh={refresh})"),
)
VERTICAL = (
    Row("Clean", "none", (0.006, 23.34, 0.830, 0.725)),
    Row("Prune", "embedding_pruning(rate=0.9)", (0.021, 17.76, 0.664, 0.518)),
    Row("Dropout", "embedding_dropout(rate=0.9)", (0.021, 17.38, 0.617, 0.305)),
    Row("DNP", "data_noise(std=0.23452)", (0.013, 18.91, 0.622, 0.577)),
    Row("InvL-DNP", "invl_dnp(delta=0.06)", (0.014, 18.61, 0.605, 0.583)),
    Row("ENP", "embedding_noise(delta=0.7)", (0.021, 17.16, 0.570, 0.650)),
    Row("InvL-ENP", "invl_enp(delta=1.0)", (0.023, 16.43, 0.502, 0.684)),
    Row(
        "InvL-ENP, public basis",
        "invl_enp(delta=1.0, basis='public')",
        None,
        "invl_enp(delta=1.0, basis='public', refresh={refresh})",
    ),
)


def run(options: argparse.Namespace) -> None:
    """Run the chosen parts of the chosen rows; what is there is not run again."""
    options.out.mkdir(parents=True, exist_ok=True)
    for row in _chosen(options):
        for part in PARTS if options.part == "all" else (options.part,):
            path = _path(options, part, row)
            if path.exists():
                continue
            begun = time.perf_counter()
            found = {"attack": attack, "accuracy": accuracy, "cost": cost}[part](row, options)
            record = {
                "format": FORMAT,
                "version": __version__,
                "torch": torch.__version__,
                "part": part,
                "title": row.title,
                "vertical": options.vertical,
                "data": Path(options.data).name,
                "model": options.model,
                "seed": options.seed,
                "seconds": round(time.perf_counter() - begun, 1),
                **found,
            }
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            sys.stderr.write(f"{record['seconds']:8.1f} s  {path.name}\n")


def _chosen(options: argparse.Namespace) -> list[Row]:
    rows = (*(VERTICAL if options.vertical else HORIZONTAL), *_more(options))
    wanted = {part.strip() for part in options.row.split(";") if part.strip()}
    unknown = wanted - {row.title for row in rows}
    if unknown:
        raise SystemExit(f"no row is called {sorted(unknown)[0]!r}; rows: {'; '.join(row.title for row in rows)}")
    return [row for row in rows if not wanted or row.title in wanted]


def _more(options: argparse.Namespace) -> tuple[Row, ...]:
    """Return the rows of ``--also``: the same defense at a strength that the paper has not."""
    pairs = [text.partition("=") for text in options.also]
    return tuple(Row(title.strip(), spelling.strip()) for title, _, spelling in pairs)


def _path(options: argparse.Namespace, part: str, row: Row) -> Path:
    kind = "vertical-" if options.vertical else ""
    name = "_".join(re.findall(r"[\w.-]+", row.title))
    return Path(options.out) / f"{part}-{kind}{name}-{options.seed}.json"


def attack(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Attack the row's records, plain and informed."""
    spelling = row.spelling.format(refresh=1)
    cell = Cell(
        data=options.data,
        labels=options.labels,
        model=options.model,
        weights=options.weights,
        state="given" if options.weights else "untrained",
        records=options.records,
        ensemble=options.ensemble,
        steps=options.steps,
        device=options.device,
        seed=options.seed,
        defense=spelling,
        risk=options.risk,
        **({"cut": options.cut, "parts": options.parts} if options.vertical else {}),
    )
    folder = _path(options, "cells", row).with_suffix("")
    command = "python benchmarks/invl_defenses.py " + " ".join(sys.argv[1:])
    run_cells([cell], folder, lambda keys: describe_cells([cell], keys, command, f"{row.title} of the InvRE paper"), workers=1)
    (path,) = (each for each in (folder / "cells").glob("*.json") if not each.name.endswith(".timing.json"))
    result = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: result.get(name) for name in ("n", "plain", "informed", "bar", "checks", "attackers", "risk")}
    where = {"cut": options.cut, "parts": options.parts, "state": cell.state} if options.vertical else {}
    return {"defense": spelling, "records": options.records, "ensemble": options.ensemble, "cell": result["key"], **where, **kept}


def accuracy(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Train with the row's defense."""
    if options.vertical:
        trained = (row.trained or row.spelling).format(refresh=options.refresh)
        each = row.title in ("InvL-DNP", "InvL-ENP")  # a basis for every record of every step would take days
        found: dict[str, Any] = invl_vertical.accuracy(row.spelling, "" if each else trained, options)
    else:
        found = invl_horizontal.accuracy((row.trained or row.spelling).format(refresh=options.refresh), options)
    return found


def cost(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Time one client's round with the row's defense, over the same without one."""
    found: dict[str, Any] = invl_horizontal.cost(row.spelling.format(refresh=options.refresh), options)
    return found


def table(options: argparse.Namespace) -> None:
    """Print what a folder holds as tables in Markdown."""
    found: dict[tuple[str, bool, str], list[dict[str, Any]]] = {}
    for path in sorted(options.out.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("format") == FORMAT:
            found.setdefault((record["part"], record["vertical"], record["title"]), []).append(record)
    trainings = [record for key, records in found.items() if key[:2] == ("accuracy", False) for record in records]
    rounds = invl_horizontal.at_the_same_round(trainings)
    for vertical, rows in ((False, HORIZONTAL), (True, VERTICAL)):
        if not any(key[1] == vertical for key in found):
            continue
        sys.stdout.write(
            f"\n{'vertical' if vertical else f'horizontal; accuracy after {rounds} rounds'}\n\n"
            "| defense | plain: identified | MSE | PSNR, dB | SSIM | informed: identified | MSE | PSNR, dB | SSIM | accuracy | "
            "client time | paper: MSE / PSNR / SSIM / accuracy |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n"
        )
        extra = [Row(title, "") for _, own, title in found if own == vertical and title not in {row.title for row in rows}]
        for row in (*rows, *dict.fromkeys(extra)):
            parts = {part: found.get((part, vertical, row.title), []) for part in PARTS}
            if any(parts.values()):
                sys.stdout.write(_line(row, parts))


def _line(row: Row, parts: dict[str, list[dict[str, Any]]]) -> str:
    cells = [row.title]
    attacked = invl_vertical.pooled(parts["attack"]) if parts["attack"] else None
    for side in ("plain", "informed"):
        summary = (attacked[side] or attacked["plain"]) if attacked else None
        cells += _privacy(summary, attacked["n"]) if summary and attacked else ["–"] * 4
    finals = [100 * record["final_accuracy"] for record in parts["accuracy"] if "predicted" not in record]
    told = f"{sum(finals) / len(finals):.1f} % ({len(finals)} seeds)" if finals else invl_vertical.told(parts["accuracy"])
    cells.append(told)
    cells.append(f"{parts['cost'][0]['ratio']:.2f}×" if parts["cost"] else "–")
    cells.append(" / ".join(f"{value:g}" for value in row.published) if row.published else "–")
    return "| " + " | ".join(cells) + " |\n"


def _privacy(summary: dict[str, Any], n: int) -> list[str]:
    share = summary["identified"]
    told = [f"{round(share['value'] * n)} of {n} ({100 * share['low']:.0f}–{100 * share['high']:.0f} %)"]
    for name in METRICS:
        value = summary.get(name)
        told.append(f"{value['median']:.{1 if name == 'psnr' else 3}f}" if isinstance(value, dict) and "median" in value else "–")
    return told


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=("run", "table", "rows", "weights"), help="weights: train without a defense, for --vertical"
    )
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--row", default="", help="titles separated by semicolons; all without")
    parser.add_argument("--also", action="append", default=[], metavar="TITLE=DEFENSE", help="one more row")
    parser.add_argument("--predicted", type=int, default=0, help="test records of predictions, for --vertical; 0 takes all")
    parser.add_argument("--vertical", action="store_true", help="Table 3: embeddings of a cut model")
    parser.add_argument("--data", default="photos")
    parser.add_argument("--labels", default="")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--weights", default="", help="trained weights to attack at; untrained without")
    parser.add_argument("--cut", default="", help="where the model is cut, for --vertical")
    parser.add_argument("--parts", default="whole", help="who owns which features, for --vertical")
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--ensemble", default="quick")
    parser.add_argument("--steps", type=int, default=0, help="cap on steps per recipe; 0 leaves the ensemble's own")
    parser.add_argument("--risk", default="off", help="also score the records without an attack: auto, gram, leading")
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--minibatch", type=int, default=32)
    parser.add_argument("--server-rate", type=float, default=1e-3)
    parser.add_argument("--refresh", type=int, default=50, help="rounds a kept basis lasts")
    parser.add_argument("--cost-records", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("invl"))
    options = parser.parse_args()
    if options.what == "rows":
        for row in VERTICAL if options.vertical else HORIZONTAL:
            print(f"{row.title:28} {row.spelling.format(refresh=options.refresh)}")
        return
    {"run": run, "table": table, "weights": invl_vertical.write_weights}[options.what](options)


if __name__ == "__main__":
    main()
