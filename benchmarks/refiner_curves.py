r"""Refiner beside the paper's Tables 6 to 9 and Figure 7: leakage (plain and informed attacker), accuracy kept (PMM) and λ.

    python benchmarks/refiner_curves.py list
    python benchmarks/refiner_curves.py run --data cifar10_12k.npz --only beta --records 32 --out DIR
    python benchmarks/refiner_curves.py run --data cifar10_12k.npz --row 'refiner(epsilon=0.01)' --parts training --out DIR
    python benchmarks/refiner_curves.py table --out DIR

A processor can train a LeNet with Refiner on some thousand pictures (40 ms each), not on the paper's million a client:

    python benchmarks/refiner_curves.py run --data cifar10_12k.npz --parts training --row none refiner --clients 100 \
        --clients-per-round 2 --minibatch 16 --rounds 128 --learning-rate 1 --server-optimizer adam \
        --server-learning-rate 0.003 --train-model "lenet(activation='relu', normalize='cifar10')" --out DIR

One row, one JSON file; parts (the attack, each seed of the training) already in a file are not run again, so rows can be spread
over machines and a run that ends early is continued by the same command. PMM is accuracy over the undefended accuracy of the same
seed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradveil import __version__
from gradveil.audit.cell import run_cell
from gradveil.defenses import build_defense
from gradveil.defenses.refiner.restorer import MOST_CONTRAST
from gradveil.federation.engine import train
from gradveil.study.cell import Cell
from gradveil.study.federation import FederationSettings

NONE = "none"
FORMAT = "gradveil-refiner-curves-1"
LAMBDA = "measured_lambda"


@dataclass(frozen=True)
class Row:
    """One setting of one table.

    Attributes:
        table: Which table or curve it belongs to.
        title: The value that is varied.
        spelling: As `gradveil.defenses.build_defense` reads it.
        psnr: What the paper reports against InvertingGrad on CIFAR-10 with LeNet, in dB.
        pmm: The same, in percent.
    """

    table: str
    title: str
    spelling: str
    psnr: float | None = None
    pmm: float | None = None


def _published(table: str, setting: str, values: dict[float, tuple[float, float]]) -> list[Row]:
    """Return the rows of a table of the paper, at its ε of 0.1."""
    return [Row(table, f"{v:g}", f"refiner({setting}={v:g}, epsilon=0.1)", *figures) for v, figures in values.items()]


ROWS: tuple[Row, ...] = (
    Row("curve", "none", NONE),
    *_published(
        "beta",
        "balance",
        {
            1e-3: (13.89, 91.93),
            1e-2: (13.62, 91.12),
            1e-1: (13.44, 91.06),
            1.0: (13.20, 90.69),
            1e1: (13.08, 90.00),
            1e2: (12.70, 89.30),
            1e3: (12.04, 88.90),
        },
    ),
    *_published("iota", "steps", {5: (13.05, 85.61), 10: (13.20, 90.69), 15: (13.37, 91.19), 20: (13.45, 92.17)}),
    *_published(
        "alpha",
        "blend",
        {
            0.0: (21.24, 98.52),
            0.1: (16.52, 95.45),
            0.3: (14.99, 92.61),
            0.5: (13.20, 90.69),
            0.7: (12.53, 90.08),
            0.9: (10.52, 89.34),
        },
    ),
    *_published(
        "tau",
        "decay",
        {0.91: (12.93, 90.98), 0.93: (13.05, 90.82), 0.95: (13.10, 90.69), 0.97: (13.15, 90.46), 1.0: (15.44, 89.28)},
    ),
    *(Row("curve", f"Refiner, ε = {e:g}", f"refiner(epsilon={e:g})") for e in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9)),
    Row("curve", "Refiner, no ball", "refiner"),
    *(Row("curve", f"Refiner, α = {a:g}, no ball", f"refiner(blend={a:g})") for a in (0.1, 0.3, 0.7, 0.9)),
    *(Row("curve", f"Refiner, β = {b:g}, no ball", f"refiner(balance={b:g})") for b in (100, 1000)),
    *(
        Row("curve", f"DP-Gaussian, {s:g}", f"clipping(bound=1) + gaussian_noise(std={s:g})")
        for s in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    ),
    *(Row("curve", f"GQ, {b} bits", f"quantisation(mode='uniform', bits={b})") for b in (2, 4, 8, 12, 16)),
    *(Row("curve", f"pruning, {p:g}", f"pruning(rate={p:g})") for p in (0.1, 0.3, 0.5, 0.7, 0.9)),
    *(Row("curve", f"Soteria, {p:g}", f"soteria(rate={p:g})") for p in (0.1, 0.3, 0.5, 0.7, 0.9)),
)


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the spellings to run, each once, the undefended first: PMM needs it."""
    if options.row:
        return list(dict.fromkeys(options.row))
    rows = [row for row in ROWS if not options.only or row.table in options.only or row.spelling == NONE]
    return list(dict.fromkeys(row.spelling for row in rows))


def attack(spelling: str, options: argparse.Namespace) -> dict[str, Any]:
    """Attack single records of the untrained model, as the paper does, and keep the summary."""
    started = time.perf_counter()
    cell = Cell(
        data=options.data,
        model=options.model,
        records=options.records,
        batch_size=1,
        ensemble=options.ensemble,
        steps=options.steps,
        device=options.device,
        seed=options.seed,
        defense=spelling,
        risk="off",
    )
    record = run_cell(cell).record
    informed = record["informed"] or record["plain"]
    return {
        "n": record["n"],
        "ensemble": record["cell"]["ensemble"],
        "model": options.model,
        "steps": options.steps,
        "seed": options.seed,
        "measured": record["defense"]["measured"],
        # Rows measured before the attacker learned a filter from public pictures have no such entry.
        "learned_filter": getattr(build_defense(spelling).adversary(), "defense", None) is not None,
        # Nor have those from before the filter gave back contrast this one.
        "contrast": MOST_CONTRAST,
        "plain": _figures(record["plain"]),
        "informed": _figures(informed),
        "selected": _figures(record["selected"]),
        "bar": record["bar"],
        "seconds": round(time.perf_counter() - started, 1),
    }


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    # LPIPS has no median where its weights are not at hand.
    kept = {name: summary[name]["median"] for name in ("psnr", "ssim", "lpips") if "median" in (summary.get(name) or {})}
    return {**kept, "identified": summary["identified"]["value"]}


def training(spelling: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train with the defense: one local step of one minibatch a round, as the paper does."""
    started = time.perf_counter()
    settings = FederationSettings(
        data=options.data,
        model=options.train_model,
        defense=spelling,
        clients=options.clients,
        clients_per_round=options.clients_per_round or options.clients,
        rounds=options.rounds,
        local_steps=1,
        minibatch=options.minibatch,
        learning_rate=options.learning_rate,
        server_optimizer=options.server_optimizer,
        server_learning_rate=options.server_learning_rate,
        partition=options.partition,
        evaluate_every=max(1, options.rounds // 10),
        seed=seed,
        device=options.device,
    )
    result = train(settings)
    told = [record.counters[LAMBDA] for record in result.rounds if LAMBDA in record.counters]
    own = {
        "seed": seed,
        "accuracy": result.final_accuracy,
        "best_accuracy": result.best_accuracy,
        "lambda": statistics.mean(told) if told else None,
        "lambda_first_last": [told[0], told[-1]] if told else None,
    }
    settings_told = {**settings.as_dict(), "data": Path(options.data).name, "seed": None}
    return {"runs": [own], "settings": settings_told, "seconds": round(time.perf_counter() - started, 1)}


def joined(earlier: dict[str, Any] | None, later: dict[str, Any]) -> dict[str, Any]:
    """Return the trainings of several seeds as one, or refuse if their settings differ."""
    if earlier is None:
        return later
    if earlier["settings"] != later["settings"]:
        raise SystemExit("the file holds trainings with other settings; choose another folder")
    runs = {each["seed"]: each for each in (*earlier["runs"], *later["runs"])}
    return {**later, "runs": [runs[seed] for seed in sorted(runs)], "seconds": round(earlier["seconds"] + later["seconds"], 1)}


def run(options: argparse.Namespace) -> int:
    """Run what is missing, row by row and seed by seed; what is done is on disk before the next begins."""
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for spelling in chosen(options):
        path = options.out / f"{_file_name(spelling)}.json"
        record: dict[str, Any] = {"format": FORMAT, "defense": spelling}
        if path.exists():
            record = json.loads(path.read_text(encoding="utf-8"))

        def keep(part: str, found: dict[str, Any], record: dict[str, Any] = record, path: Path = path) -> None:
            record[part] = found
            record |= {"version": __version__, "torch": torch.__version__, "data": Path(options.data).name}
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            sys.stderr.write(f"{record['defense']}: {part}, {found['seconds']} s in all\n")

        if "attack" in options.parts and "attack" not in record:
            keep("attack", attack(spelling, options))
        if "training" in options.parts:
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                if seed not in _accuracies(record):
                    keep("training", joined(record.get("training"), training(spelling, seed, options)))
    return 0


def _file_name(spelling: str) -> str:
    return "_".join(re.findall(r"[\w.-]+", spelling))


def show(options: argparse.Namespace) -> int:
    """Print the files of a folder as one Markdown table for each table of the paper; † de-blends instead of a learned filter."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.out.glob("*.json"))]
    # By what a spelling builds: one setting stands in several tables of the paper under several spellings.
    records = {_setting(record["defense"]): record for record in found if record.get("format") == FORMAT}
    undefended = _accuracies(records.get(_setting(NONE), {}))
    for table in dict.fromkeys(row.table for row in ROWS):
        rows = [row for row in ROWS if row.table == table and _setting(row.spelling) in records]
        if not rows:
            continue
        sys.stdout.write(
            f"\n| {table} | PSNR, dB: plain | informed | identified: plain | informed | λ, attack | λ, training | accuracy, % | "
            "PMM, % | paper: PSNR | PMM |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
        )
        for row in rows:
            sys.stdout.write("| " + " | ".join(_cells(row, records[_setting(row.spelling)], undefended)) + " |\n")
    return 0


def _setting(spelling: str) -> str:
    return repr(build_defense(spelling))


def _accuracies(record: dict[str, Any]) -> dict[int, float]:
    return {each["seed"]: each["accuracy"] for each in record.get("training", {}).get("runs", ())}


def _cells(row: Row, record: dict[str, Any], undefended: dict[int, float]) -> list[str]:
    attacked, runs = record.get("attack", {}), record.get("training", {}).get("runs", ())
    own = _accuracies(record)
    paired = [100 * own[seed] / undefended[seed] for seed in own if seed in undefended]
    shares = [each["lambda"] for each in runs if each["lambda"] is not None]

    older = "refiner" in record["defense"] and "learned_filter" not in attacked

    def psnr(stance: str) -> str:
        mark = " †" if older and stance == "informed" else ""
        return f"{attacked[stance]['psnr']:.2f}{mark}" if attacked else "–"

    def identified(stance: str) -> str:
        return f"{round(attacked[stance]['identified'] * attacked['n'])} of {attacked['n']}" if attacked else "–"

    return [
        row.title,
        psnr("plain"),
        psnr("informed"),
        identified("plain"),
        identified("informed"),
        _number(attacked.get("measured", {}).get(LAMBDA), 3),
        _number(statistics.mean(shares) if shares else None, 3),
        _number(100 * statistics.mean(own.values()) if own else None, 1),
        _number(statistics.mean(paired) if paired else None, 1),
        _number(row.psnr, 2),
        _number(row.pmm, 2),
    ]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def show_rows(options: argparse.Namespace) -> int:
    """Print what would be run."""
    sys.stdout.write("".join(f"{spelling}\n" for spelling in chosen(options)))
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "list"))
    parser.add_argument("--data", default="photos")
    parser.add_argument("--model", default="lenet", help="attacked")
    parser.add_argument("--train-model", default="lenet(activation='relu')", help="trained")
    parser.add_argument("--only", nargs="*", default=[], choices=("beta", "iota", "alpha", "tau", "curve"))
    parser.add_argument("--row", nargs="*", default=[], help="spellings")
    parser.add_argument("--parts", nargs="*", default=["attack", "training"], choices=("attack", "training"))
    parser.add_argument("--records", type=int, default=32)
    parser.add_argument("--ensemble", default="quick")
    parser.add_argument("--steps", type=int, default=0, help="cap on steps per recipe; 0 leaves the ensemble's own")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--clients-per-round", type=int, default=0, help="0: all")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--minibatch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=0.1, help="1 sends gradients in the units that are attacked")
    parser.add_argument("--server-optimizer", default="sgd", choices=("sgd", "adam"))
    parser.add_argument("--server-learning-rate", type=float, default=1.0)
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of a row")
    parser.add_argument("--first-seed", type=int, default=0, help="of the trainings")
    parser.add_argument("--seed", type=int, default=0, help="of the attack")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("refiner_curves"))
    options = parser.parse_args()
    return {"run": run, "table": show, "list": show_rows}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
