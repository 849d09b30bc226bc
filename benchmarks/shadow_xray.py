"""The shadow defense beside others on chest X-rays: nine hospitals, whole image and target region, plain and informed attacker.

No study: clients are attacked in the middle of a training, with the state they keep there; a plan attacks fresh clients.

    python benchmarks/shadow_xray.py run --data pneumoniamnist.npz --row shadow --out DIR
    python benchmarks/shadow_xray.py pictures --data pneumoniamnist.npz --out DIR
    python benchmarks/shadow_xray.py table --out DIR

One row is one training with one defense, stopped at some rounds to attack it, and one JSON file; a finished row is not repeated.
The hospitals have the paper's sizes, 8, 32, 128, 512, twice, and one record, scaled to ``--records``. Attacks invert the
gradient of single records at the global weights of that round, with known labels: the strongest position, and the same for every
row. Runs share partition, batches and first weights, so the time of a row is compared with that of FedAvg on the same machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from shadow_attack import RELATIVE, STANCES, attack_round, client_states

from gradveil import __version__
from gradveil.data import Dataset, load_data
from gradveil.defenses.base import ClientView
from gradveil.defenses.shadow.defense import Shadow
from gradveil.defenses.shadow.fit import choose_generator, generator_on, imagine, styles_of
from gradveil.defenses.shadow.noise import error_map, inverse_softmax, relative_noise
from gradveil.federation.engine import run_training
from gradveil.federation.setup import build_federation
from gradveil.randomness import Seed
from gradveil.significance import daggers
from gradveil.study.federation import FederationSettings

FEDAVG = "FedAvg"
ROWS = {
    FEDAVG: "none",
    "SCAFFOLD": "none",
    "noise": "gaussian_noise(std=0.03)",
    "GS": "pruning(rate=0.9)",
    "GC": "clipping(bound=0.1)",
    "Soteria": "soteria",
    "Outpost": "outpost",
    "CENSOR": "censor",
    "image noise, weak": "data_noise(std=0.05)",
    "image noise, strong": "data_noise(std=0.2)",
    "shadow": "shadow({})",
    "shadow, no codes": "shadow({}, latent_steps=0)",
    "shadow, no fine-tuning": "shadow({}, fit_steps=0)",
    "shadow, no equalisation": "shadow({}, equalised=False)",
    "shadow, no foreground": "shadow({}, foreground=0.0)",
    "shadow, T = 1": "shadow({}, temperature=1.0)",
}
HEAD = "| row | attacker | F1 | MSE | PSNR | LPIPS | SSIM | RDLV | time |\n|---|---|---|---|---|---|---|---|---|\n"
PUBLIC = 64
"""Pictures of the same collection that the informed attacker has; nobody trains on them."""
PAPER_TIME = 720.711 / 566.436
"""Supplementary Table 1: seconds of the shadow defense over those of FedAvg, on EyePACS."""


def spelled(row: str, options: argparse.Namespace) -> str:
    """Return the defense of a row; the shadow's schedule is that of the training: a fifth of its rounds, as 20 of 100."""
    own = f"rounds={options.rounds}, until={max(1, options.rounds // 5)}"
    steps = "" if "latent_steps" in ROWS[row] else f", latent_steps={options.latent_steps}"
    return ROWS[row].format(own + steps)


def load(options: argparse.Namespace) -> tuple[Dataset, Dataset, torch.Tensor]:
    """Return training records, cut to the number asked for, test records, and public pictures nobody trains on, all resized."""
    sets = [load_data(options.data), load_data(options.data, split="test")]
    for place, data in enumerate(sets):
        size = (options.size, options.size)
        images = F.interpolate(data.inputs, size=size, mode="bilinear", align_corners=False, antialias=True).clamp(0, 1)
        sets[place] = dataclasses.replace(data, inputs=images)
    order = Seed(options.seed).child("records").numpy("choice").permutation(len(sets[0]))
    own, public = order[: options.records], order[options.records :][-PUBLIC:]
    return sets[0].take(sorted(int(row) for row in own)), sets[1], sets[0].inputs[[int(row) for row in public]]


def settings(row: str, options: argparse.Namespace) -> FederationSettings:
    """Return the training of a row: nine hospitals, all in every round."""
    return FederationSettings(
        data=options.data,
        model=options.model,
        defense=spelled(row, options),
        clients=9,
        clients_per_round=9,
        rounds=options.rounds,
        partition="sizes(scaled=True)",
        local_epochs=options.local_epochs,
        minibatch=options.minibatch,
        learning_rate=options.learning_rate,
        aggregation="scaffold" if row == "SCAFFOLD" else "fedavg",
        batch_norm="eval",
        evaluate_every=max(1, options.rounds // 10),
        seed=options.seed,
        device=options.device,
    )


def run(options: argparse.Namespace) -> None:
    """Train and attack one row, and write its JSON."""
    target = options.out / f"{options.row.replace(', ', '_').replace(' ', '-')}.json"
    if target.exists():
        sys.stderr.write(f"{target} is there already\n")
        return
    data, test, public = load(options)
    asked = settings(options.row, options)
    folder = (options.runs or options.out / "runs") / target.stem
    stops = sorted({min(options.rounds, max(1, round(share * options.rounds))) for share in options.stops})
    scores, seconds = [], 0.0
    for stop in stops:
        result = run_training(asked, dataset=data, test=test, out=folder, stop_after=stop)
        begun = time.perf_counter()
        federation = build_federation(asked, data, test)
        scores += attack_round(
            federation,
            result.weights,
            client_states(folder),
            stop - 1,
            steps=options.steps,
            each=options.each,
            pictures=public.to(options.device),
            others=not options.one_informed,
        )
        seconds += time.perf_counter() - begun
        reached = federation.scores(result.weights, result.buffers)
        record = {
            "format": "gradveil-shadow-xray-1",
            "row": options.row,
            "version": __version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "settings": {**asked.as_dict(), "data": Path(asked.data).name},
            "options": {name: getattr(options, name) for name in ("records", "size", "steps", "each", "latent_steps")},
            "clients": [len(part) for part in federation.parts],
            "f1": reached.f1,
            "accuracy": reached.accuracy,
            "client_seconds": [record.client_seconds for record in result.rounds],
            "attack_seconds": round(seconds, 1),
            "scores": scores,
        }
        # A run that is cut off leaves the rounds it attacked; only a finished row has a name that `table` reads.
        done = target if stop == stops[-1] else target.with_suffix(".unfinished")
        done.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    target.with_suffix(".unfinished").unlink(missing_ok=True)


def pictures(options: argparse.Namespace) -> None:
    """Write noise maps like the paper's Figure 5: x, imagined, M, N¹, N², N and x + N, one record per line."""
    from PIL import Image

    data, test, _ = load(options)
    federation = build_federation(settings(FEDAVG, options), data, test)
    defense = Shadow(rounds=options.rounds, latent_steps=options.latent_steps)
    batch = data.batch(list(range(0, len(data), max(1, len(data) // 6)))[:6])
    batch = batch.replace(inputs=batch.inputs.to(options.device), targets=batch.targets.to(options.device))
    view = ClientView(learner=federation.learner, seed=Seed(options.seed), weights=federation.learner.weights)
    noise, state = defense.noise(batch, view, {})
    network = generator_on(choose_generator("auto", batch.inputs), batch.inputs.device, max(batch.inputs.shape[2:]))
    weights = {name.removeprefix("shadow/"): value for name, value in state.items() if name.startswith("shadow/")}
    with torch.no_grad():
        imagined = imagine(network, styles_of(network, state["codes"]), weights, batch.inputs)
    errors = error_map(batch.inputs, imagined)
    maps = (errors, inverse_softmax(errors.double(), defense.temperature), relative_noise(errors, defense.temperature))
    columns = [batch.inputs, imagined, *(_levels(each.unsqueeze(1)) for each in (*maps, noise.squeeze(1)))]
    columns.append((batch.inputs + noise).clamp(0, 1))
    grey = torch.cat([column.mean(1).float().cpu() for column in columns], dim=2)  # (B, H, 7 W)
    array = (255 * grey.reshape(-1, grey.shape[-1])).round().byte().numpy()
    options.out.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).resize((4 * array.shape[1], 4 * array.shape[0]), Image.Resampling.NEAREST).save(
        options.out / "noise_maps.png", optimize=True
    )


def _levels(maps: torch.Tensor) -> torch.Tensor:
    low, high = maps.amin((1, 2, 3), keepdim=True), maps.amax((1, 2, 3), keepdim=True)
    return (maps - low) / (high - low).clamp_min(1e-12)


def table(options: argparse.Namespace) -> None:
    """Print the rows of a folder as tables in Markdown."""
    found = {record["row"]: record for path in sorted(options.out.glob("*.json")) if (record := _read(path))}
    if FEDAVG not in found:
        sys.exit("there is no FedAvg row to compare with; run it first")
    for reference in ("x", "x_N"):
        for region in ("", "region_"):
            what = "target region" if region else "whole image"
            sys.stdout.write(f"\nAgainst {reference}, {what}:\n\n{HEAD}")
            for stance in STANCES:
                sys.stdout.write("".join(_lines(found, stance, reference, region)))
            cells = [_mean(found[FEDAVG], "data mean", reference, region + name) for name in ("mse", "psnr", "lpips", "ssim")]
            sys.stdout.write(f"| (mean of the data) | none | | {' | '.join(cells)} | | |\n")
    sys.stdout.write(f"\nThe paper's time over FedAvg, for 100 rounds of which 20 update the shadow: {PAPER_TIME:.2f}×.\n")


def _lines(found: dict[str, dict[str, Any]], stance: str, reference: str, region: str) -> list[str]:
    columns = {row: _pairs(found[row], stance, reference, f"{region}psnr") for row in ROWS if row in found}
    columns = {row: values for row, values in columns.items() if values}
    marks = daggers(columns, FEDAVG) if len(columns) > 1 and FEDAVG in columns else {}
    base, lines = sum(found[FEDAVG]["client_seconds"]), []
    for row in columns:
        cells = [_mean(found[row], stance, reference, region + name) for name in ("mse", "psnr", "lpips", "ssim")]
        cells[1] += marks.get(row, "")
        cells.append("" if region else _mean(found[row], stance, reference, RELATIVE))
        cells.append(f"{sum(found[row]['client_seconds']) / base:.2f}×")
        lines.append(f"| {row} | {stance} | {found[row]['f1']:.3f} | {' | '.join(cells)} |\n")
    return lines


def _read(path: Path) -> dict[str, Any] | None:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record if record.get("format") == "gradveil-shadow-xray-1" else None


def _pairs(record: dict[str, Any], stance: str, reference: str, name: str) -> dict[str, float]:
    """Return the values of one metric by round and record."""
    chosen = [s for s in record["scores"] if (s["stance"], s["reference"]) == (stance, reference) and isinstance(s[name], list)]
    return {f"{s['round']}/{place}": value for s in chosen for place, value in enumerate(s[name])}


def _mean(record: dict[str, Any], stance: str, reference: str, name: str) -> str:
    """Return the mean over records and rounds, and the deviation of the rounds' means in brackets, as the paper has it."""
    chosen = [s for s in record["scores"] if (s["stance"], s["reference"]) == (stance, reference) and isinstance(s[name], list)]
    if not chosen:
        return "–"
    means = [float(np.mean(s[name])) for s in chosen]
    spread = f" ({statistics.stdev(means):.3g})" if len(means) > 1 else ""
    return f"{statistics.mean(means):.3g}{spread}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "pictures"))
    parser.add_argument("--row", choices=tuple(ROWS), default="shadow")
    parser.add_argument("--data", default="pneumoniamnist.npz")
    parser.add_argument("--records", type=int, default=1361, help="training records dealt out; the paper's sizes sum to 1361")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--model", default="resnet18(norm='group')")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--local-epochs", type=int, default=1)
    parser.add_argument("--minibatch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--latent-steps", type=int, default=500)
    parser.add_argument("--stops", type=float, nargs="+", default=(0.01, 0.25, 0.5, 0.75, 1.0), help="rounds attacked, as shares")
    parser.add_argument("--steps", type=int, default=1000, help="of the attack")
    parser.add_argument("--each", type=int, default=2, help="records attacked per client")
    parser.add_argument("--one-informed", action="store_true", help="leave out attackers with photographs or no pictures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=Path, help="where trainings keep their checkpoints; by default OUT/runs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"run": run, "table": table, "pictures": pictures}[options.what](options)


if __name__ == "__main__":
    main()
