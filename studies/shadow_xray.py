"""The shadow defense beside others on chest X-rays: nine hospitals, whole image and target region, plain and informed attacker.

No plan says it: clients are attacked in the middle of a training, with the state they keep there; a plan attacks fresh clients.

One row is one training with one defense, stopped at some rounds to attack it.
The hospitals have the paper's sizes, 8, 32, 128, 512, twice, and one record, scaled to ``records``. Attacks invert the
gradient of single records at the global weights of that round, with known labels: the strongest position, and the same for every
row. Runs share partition, batches and first weights, so the time of a row is compared with that of FedAvg on the same machine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from gradveil.data import Dataset, load_data
from gradveil.federation.engine import run_training
from gradveil.federation.setup import build_federation
from gradveil.randomness import Seed
from gradveil.study.federation import FederationSettings
from studies.shadow_attack import INFORMED, NO_PICTURES, PHOTOGRAPHS, PLAIN, attack_round, client_states
from studies.shared import MISSING, grouped, table

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
FORMAT = "gradveil-shadow-xray-1"
LEFT_OUT = {
    "shadow": "nothing",
    "shadow, no codes": "codes",
    "shadow, no fine-tuning": "fine-tuning",
    "shadow, no equalisation": "equalisation",
    "shadow, no foreground": "foreground",
}
PUBLIC = 64
"""Pictures of the same collection that the informed attacker has; nobody trains on them."""


def spelled(row: str, options: SimpleNamespace) -> str:
    """Return the defense of a row; the shadow's schedule is that of the training: a fifth of its rounds, as 20 of 100."""
    own = f"rounds={options.rounds}, until={max(1, options.rounds // 5)}"
    steps = "" if "latent_steps" in ROWS[row] else f", latent_steps={options.latent_steps}"
    return ROWS[row].format(own + steps)


def load(options: SimpleNamespace) -> tuple[Dataset, Dataset, torch.Tensor]:
    """Return training records, cut to the number asked for, test records, and public pictures nobody trains on, all resized."""
    sets = [load_data(options.data), load_data(options.data, split="test")]
    for place, data in enumerate(sets):
        size = (options.size, options.size)
        images = F.interpolate(data.inputs, size=size, mode="bilinear", align_corners=False, antialias=True).clamp(0, 1)
        sets[place] = dataclasses.replace(data, inputs=images)
    order = Seed(options.seed).child("records").numpy("choice").permutation(len(sets[0]))
    own, public = order[: options.records], order[options.records :][-PUBLIC:]
    return sets[0].take(sorted(int(row) for row in own)), sets[1], sets[0].inputs[[int(row) for row in public]]


def settings(row: str, options: SimpleNamespace) -> FederationSettings:
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


def units(settings: SimpleNamespace) -> list[str]:
    """Name the rows."""
    return list(grouped(settings))


def measure(unit: str, asked: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Train and attack one row."""
    options = grouped(asked)[unit]
    data, test, public = load(options)
    training, folder = settings(options.row, options), work / "runs" / unit
    stops = sorted({min(options.rounds, max(1, round(share * options.rounds))) for share in options.stops})
    scores, seconds = [], 0.0
    for stop in stops:
        result = run_training(training, dataset=data, test=test, out=folder, stop_after=stop)
        begun = time.perf_counter()
        federation = build_federation(training, data, test)
        scores += attack_round(
            federation,
            result.weights,
            client_states(folder),
            stop - 1,
            steps=options.steps,
            each=options.each,
            pictures=public.to(options.device),
            others=options.other_attackers,
        )
        seconds += time.perf_counter() - begun
    reached = federation.scores(result.weights, result.buffers)
    return {
        "format": FORMAT,
        "row": options.row,
        "settings": {**training.as_dict(), "data": Path(training.data).name},
        "options": {name: getattr(options, name) for name in ("records", "size", "steps", "each", "latent_steps")},
        "clients": [len(part) for part in federation.parts],
        "f1": reached.f1,
        "accuracy": reached.accuracy,
        "client_seconds": [record.client_seconds for record in result.rounds],
        "attack_seconds": round(seconds, 1),
        "scores": scores,
    }


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show all rows, two rows over seeds, and the shadow with parts left out."""
    found = {name: each for name, each in documents.items() if each["format"] == FORMAT}
    rows = {each["row"]: each for name, each in found.items() if "/" not in name}
    return {"rows": _rows(rows), "seeds": _seeds(rows, found), "parts": _parts(rows, found)}


def _rows(rows: Mapping[str, Any]) -> str:
    base, lines = rows[FEDAVG], []
    for row in (row for row in ROWS if row in rows):
        record = rows[row]
        rounds, whole = record["settings"]["rounds"], base["settings"]["rounds"]
        lines.append(
            [
                row if rounds == whole else f"{row} ({rounds} rounds)",
                *(_pair(record, PLAIN), _pair(record, INFORMED)),
                " / ".join(_mean(record, stance, "region_psnr") for stance in (PLAIN, INFORMED)),
                _mean(record, PLAIN, "psnr", reference="x_N"),
                " / ".join(_mean(record, stance, "lpips", 2) for stance in (PLAIN, INFORMED)),
                f"{record['f1']:.3f}",
                _times(sum(record["client_seconds"]) / sum(base["client_seconds"])) if rounds == whole else MISSING,
            ]
        )
    for stance, title in ((PHOTOGRAPHS, "attacker with photographs only"), (NO_PICTURES, "attacker without pictures")):
        own = rows["shadow"]
        region, far = (_mean(own, stance, name, digits) for name, digits in (("region_psnr", 1), ("lpips", 2)))
        lines.append([f"shadow, {title}", "", _pair(own, stance), f"{MISSING} / {region}", "", f"{MISSING} / {far}", "", ""])
    null = [_mean(base, "data mean", name, digits) for name, digits in (("region_psnr", 1), ("lpips", 2))]
    lines.append(["(mean of the data)", _pair(base, "data mean"), "", null[0], "", null[1], "", ""])
    return table(
        "row | plain: PSNR / SSIM | informed: PSNR / SSIM | target region, PSNR: plain / informed | "
        "against what was trained on, PSNR: plain | LPIPS: plain / informed | F1 | client time",
        lines,
    )


def _seeds(rows: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Show FedAvg and the shadow by seed, and the means over seeds."""
    both: dict[int, dict[str, Any]] = {rows[FEDAVG]["settings"]["seed"]: {row: rows[row] for row in (FEDAVG, "shadow")}}
    for each in (each for name, each in found.items() if name.startswith("seed_")):
        both.setdefault(each["settings"]["seed"], {})[each["row"]] = each
    columns = ((FEDAVG, PLAIN), ("shadow", PLAIN), ("shadow", INFORMED), (FEDAVG, "data mean"))
    lines = [[seed, *(_pair(own[row], stance) for row, stance in columns)] for seed, own in sorted(both.items())]
    means = [
        " / ".join(f"{fmean(_value(own[row], stance, name) for own in both.values()):.{d}f}" for name, d in WHOLE)
        for row, stance in columns
    ]
    return table("seed | FedAvg | shadow: plain | informed | mean of the data", [*lines, ["all", *means]])


def _parts(rows: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Show the shadow under a whole attack with parts left out; the time of the whole is that of the other seeds."""
    own = {"shadow": rows["shadow"]} | {
        each["row"]: each for name, each in found.items() if name.startswith("parts_under_attack/")
    }
    others = [each for name, each in found.items() if name.startswith("seed_") and each["row"] == "shadow"]
    lines = []
    for row in (row for row in LEFT_OUT if row in own):
        timed = others if row == "shadow" and others else [own[row]]
        seconds = f"{fmean(sum(each['client_seconds']) for each in timed):.0f} s"
        told = [
            _mean(own[row], PLAIN, "psnr"),
            _mean(own[row], INFORMED, "psnr"),
            _mean(own[row], PLAIN, "psnr", reference="x_N"),
        ]
        lines.append([LEFT_OUT[row], *told, seconds + (" (other seeds)" if timed is others else "")])
    return table("left out | plain | informed | what was trained on, by the plain attacker | client time, one core", lines)


def _times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 100 else f"{ratio:.2f}×"


WHOLE = (("psnr", 1), ("ssim", 3))


def _pair(record: Mapping[str, Any], stance: str) -> str:
    return " / ".join(_mean(record, stance, name, digits) for name, digits in WHOLE)


def _mean(record: Mapping[str, Any], stance: str, name: str, digits: int = 1, reference: str = "x") -> str:
    value = _value(record, stance, name, reference)
    return MISSING if value is None else f"{value:.{digits}f}"


def _value(record: Mapping[str, Any], stance: str, name: str, reference: str = "x") -> Any:
    """Return the mean over records and rounds; None where the metric was not at hand."""
    chosen = [s for s in record["scores"] if (s["stance"], s["reference"]) == (stance, reference) and isinstance(s[name], list)]
    return fmean(fmean(s[name]) for s in chosen) if chosen else None
