"""Attack an update captured in a running federation. The truth is unknown here, so nothing is called identified that was not.

What can be said: how well the best reconstruction explains the update beside guesses that never saw it, and which of the user's
records it is nearest to, by what margin. The one who captured the update knows whether that record was in it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil.attacks import Referee, line_up, resolve
from gradveil.attacks.referee import recipe_key
from gradveil.audit.cells import Cell
from gradveil.audit.describe import describe_cells
from gradveil.audit.measure import STEP_LIMIT, attack_all
from gradveil.audit.store import Store, npz_bytes
from gradveil.audit.subjects import Subject, build_subject, load_cell_data
from gradveil.errors import BadUpdate, UsageError
from gradveil.records import ModelSpec, Observation, Reconstruction, Update
from gradveil.wire import read_payload

__all__ = ["CapturedResult", "audit_captured"]

NULL_TRIES = 8


@dataclass(frozen=True)
class CapturedResult:
    """What an attack on a captured update found."""

    out: Path
    record: dict[str, Any]

    def sentences(self) -> list[str]:
        """Return the result in plain words."""
        record = self.record
        share = record["unexplained"]
        lines = [
            f"The best of {record['tries']} reconstructions leaves {share['best']:.2g} of the update unexplained; "
            f"guesses that never saw it leave {share['null']:.2g}.",
            f"It was made by {record['recipe']} ({record['stance']}); the labels it implies: {record['labels']}.",
        ]
        for row in record["nearest"]:
            lines.append(
                f"Input {row['input']}: of {record['candidates']} records, the nearest is row {row['row']} "
                f"({row['psnr']:.1f} dB), the next {row['next_psnr']:.1f} dB."
            )
        lines.append("Whether that record was behind the update is for you to say: the audit does not know the truth.")
        return lines


def audit_captured(update: Path, cell: Cell, out: Path, *, command: str = "") -> CapturedResult:
    """Attack one captured payload with the cell's model, defense and ensemble, and compare with the cell's data."""
    payload = read_payload(update)
    dataset = load_cell_data(cell)
    if payload.examples % (cell.batch_size * cell.clients) and payload.examples != cell.batch_size * cell.clients:
        raise UsageError(f"the update claims {payload.examples} examples; say --batch-size {payload.examples}")
    ensemble = resolve(cell.ensemble)
    own = cell.replace(records=cell.batch_size * cell.clients)
    subject = build_subject(own, dataset, ensemble.rehearsals)
    observation = _observe(subject, payload)
    desk = subject.desk(STEP_LIMIT)
    everyone = [observation, *(r.observation for r in subject.rehearsals)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = attack_all(line_up(ensemble, observation, desk), everyone, desk)
    finally:
        torch.set_num_threads(before)
    referee = Referee.rehearsed(
        [r.observation for r in subject.rehearsals],
        [(r.trained_inputs, r.batch.targets.to(cell.device)) for r in subject.rehearsals],
        [r.batch.inputs.to(cell.device) for r in subject.rehearsals],
        found[1:],
    )
    verdict = referee.select(observation, found[0])
    chosen = found[0][verdict.chosen]
    record = {
        "format": "gradveil-captured-1",
        "update": update.name,
        "cell": own.as_dict(),
        "threat": own.threat().as_dict(),
        "recipe": recipe_key(chosen),
        "stance": chosen.stance,
        "tries": len(found[0]),
        "labels": [int(label) for label in chosen.targets.reshape(-1)],
        "unexplained": {"best": verdict.scores[verdict.chosen], "null": _null_score(subject, observation, referee)},
        "candidates": len(dataset),
        "nearest": _nearest(chosen, dataset.inputs),
    }
    store = Store(out)
    with store.lock():
        store.write_run(describe_cells([own], [], command, f"captured update {update.name}"))
        (out / "captured.json").write_text(json.dumps(record, indent=1) + "\n")
        (out / "captured.npz").write_bytes(npz_bytes({"reconstruction": chosen.inputs.cpu().numpy().astype(np.float32)}))
    return CapturedResult(out, record)


def _observe(subject: Subject, payload: Any) -> Observation:
    spec = ModelSpec.of(subject.learner.model)
    try:
        decoded = subject.defense.decode(payload, spec)
    except BadUpdate as error:
        raise BadUpdate(f"the captured update does not fit model and defense: {error}") from error
    device = next(iter(subject.learner.weights.values())).device
    update = Update({n: v.to(device) for n, v in decoded.weights.items()}, decoded.examples, decoded.round)
    made = subject.targets[0].observation
    if decoded.examples != made.examples:
        raise UsageError(f"the update claims {decoded.examples} examples; say --batch-size {decoded.examples}")
    return dataclasses.replace(made, updates=(update,), payloads=(payload,), labels=None)


def _null_score(subject: Subject, observation: Observation, referee: Referee) -> float:
    """Return the best score of inputs that have nothing to do with the update: public images with the recovered labels."""
    from gradveil.attacks.labels import recover_labels

    labels = recover_labels(observation)
    nulls = [Reconstruction(r.batch.inputs.to(labels.device), labels, recipe="null") for r in subject.rehearsals[:NULL_TRIES]]
    return min(referee.scores(observation, nulls)) if nulls else float("nan")


def _nearest(chosen: Reconstruction, candidates: torch.Tensor) -> list[dict[str, Any]]:
    rows = []
    for index, image in enumerate(chosen.inputs.cpu().float()):
        error = (candidates - image).square().flatten(1).mean(1).clamp_min(1e-6)
        order = error.argsort()
        psnr = [-10 * float(torch.log10(error[i])) for i in order[:2]]
        rows.append({"input": index, "row": int(order[0]), "psnr": psnr[0], "next_psnr": psnr[-1]})
    return rows
