"""Attack an update captured in a running federation. The truth is unknown here, so nothing is called identified that was not.

What can be said: how well the best reconstruction explains the update beside guesses that never saw it, and which of the user's
records it is nearest to, by what margin. The one who captured the update knows whether that record was in it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from gradveil.attacks import Attack, AttackContext, Referee, line_up, resolve
from gradveil.audit.cell import STEP_LIMIT, attack_all
from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.audit.threat import threat_of
from gradveil.errors import BadUpdate, UsageError
from gradveil.provenance import provenance
from gradveil.records import ModelSpec, Observation, Payload, Reconstruction, Update
from gradveil.storage.files import write_whole
from gradveil.storage.run_folder import Store, npz_bytes
from gradveil.study.cell import Cell
from gradveil.tensors import norm
from gradveil.wire import read_payload

__all__ = ["CapturedResult", "audit_captured"]

NULL_TRIES = 8
TINY = 1e-30
FAR = 5.0
"""Factor between the size of an update that nothing explains and of one made here from which it is worth a sentence."""
SHARE, NOISE = "share of the update", "power of the known noise"


@dataclass(frozen=True)
class CapturedResult:
    """What an attack on a captured update found."""

    out: Path
    record: dict[str, Any]

    @property
    def explains(self) -> bool:
        """Whether the best reconstruction explains the update better than guesses that never saw it, and than nothing at all."""
        told = self.record["unexplained"]
        best, null = told["best"], told["null"]
        # An update of zeros leaves all of it: who leaves more replays another training.
        most = min(math.inf if null is None else null, 1.0 if told["unit"] == SHARE else math.inf)
        return best is not None and best < most

    @property
    def says_training(self) -> bool:
        """Whether anything was said about local training; else the update was taken for the gradient of one batch."""
        return bool(self.record["cell"]["shares"] != "gradient")

    def sentences(self) -> list[str]:
        """Return the result in plain words; no record is named where nothing was explained."""
        record = self.record
        best, null = (_number(record["unexplained"][name]) for name in ("best", "null"))
        what = "of the update" if record["unexplained"]["unit"] == SHARE else "times the power of the known noise"
        lines = [
            f"The best of {record['tries']} reconstructions leaves {best} {what} unexplained; "
            f"guesses that never saw it leave {null}.",
            f"It was made by {record['recipe']} ({record['stance']}); the labels it implies: {record['labels']}.",
        ]
        if not record["cell"]["weights"]:
            lines.append(
                f"No weights were given, so the attackers took those a new model has with seed {record['cell']['seed']}; "
                "give --weights with those the client started from."
            )
        if not self.explains:
            far = not 1 / FAR <= record["size"] <= FAR
            told = (
                f"The update is {record['size']:.2g} times as large as one that this training makes of other records: "
                "another learning rate or number of local steps may be why."
            )
            return [*lines, told] if far else lines
        for row in record["nearest"]:
            lines.append(
                f"Input {row['input']}: of {record['candidates']} records, the nearest is row {row['row']} "
                f"({row['psnr']:.1f} dB), the next {row['next_psnr']:.1f} dB."
            )
        lines.append("Whether that record was behind the update is for you to say: the audit does not know the truth.")
        return lines


def audit_captured(update: Path, cell: Cell, out: Path, *, command: str = "") -> CapturedResult:
    """Attack one captured payload with the cell's model, defense and ensemble, and compare with the cell's data.

    Args:
        update: File written by `gradveil.wire.write_payload`, or a plain safetensors file of named tensors.
        cell: Model, training, defense and ensemble; its data are what reconstructions are compared with.
        out: Results folder; ``captured.json`` and ``captured.npz`` are written there, and nothing else is touched.
        command: How to run it again.
    """
    if cell.cut:
        raise UsageError("a captured file holds an update of weights, not an embedding; leave cut out with --update")
    if cell.rounds > 1:
        raise UsageError(f"rounds is {cell.rounds}, and a captured update is of one round; set rounds = 1")
    # Any of the user's records may be behind the update, so none of them may be learned from.
    prior = "other" if cell.prior == "same" else cell.prior
    own = cell.replace(records=cell.batch_size * cell.clients, known_labels=False, prior=prior)
    payload = _read(update, own)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        case = _prepare(payload, own)
        store = Store(out)
        with store.lock():
            record, rebuilt = _attack(case)
            came_from = provenance(own.seed, own.device)
            head = {"format": "gradveil-captured-1", "update": update.name, "command": command, "provenance": came_from}
            record = head | record
            write_whole(out / "captured.npz", npz_bytes({"reconstruction": rebuilt.cpu().numpy().astype(np.float32)}))
            write_whole(out / "captured.json", (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())
    finally:
        torch.set_num_threads(before)
    return CapturedResult(out, record)


def _read(update: Path, cell: Cell) -> Payload:
    """Read the payload; a plain safetensors file says nothing about its examples, so the cell's word counts."""
    payload = read_payload(update)
    with safe_open(str(update), framework="pt") as opened:
        claims = "gradveil" in (opened.metadata() or {})
    if not claims:
        payload = dataclasses.replace(payload, examples=cell.records)
    if payload.examples != cell.records:
        size = max(1, payload.examples // cell.clients)
        raise UsageError(f"the update claims {payload.examples} examples, not {cell.records}; say --batch-size {size}")
    return payload


@dataclass(frozen=True)
class _Case:
    """The captured update before the attackers, with the cell's own clients for rehearsals."""

    subject: Subject
    observation: Observation
    context: AttackContext
    attacks: list[Attack]


def _prepare(payload: Payload, cell: Cell) -> _Case:
    """Refuse whatever does not fit, before anything is written."""
    ensemble = resolve(cell.ensemble)
    subject = build_subject(cell, load_cell_data(cell), ensemble.rehearsals)
    observation = _observe(subject, payload)
    context = subject.context(STEP_LIMIT)
    attacks = line_up(ensemble, observation, context)
    if not attacks:
        raise UsageError(f"no attack of {ensemble.name!r} applies to this model and batch size; choose another ensemble")
    return _Case(subject, observation, context, attacks)


def _attack(case: _Case) -> tuple[dict[str, Any], torch.Tensor]:
    """Return what the attackers found, and the reconstruction they select."""
    subject, observation, cell = case.subject, case.observation, case.subject.cell
    found = attack_all(case.attacks, [observation, *(r.observation for r in subject.rehearsals)], case.context)
    referee = Referee.rehearsed(
        [r.observation for r in subject.rehearsals],
        [(r.replayed_inputs, r.batch.targets.to(cell.device)) for r in subject.rehearsals],
        [r.batch.inputs.to(cell.device) for r in subject.rehearsals],
        found[1:],
    )
    verdict = referee.select(observation, found[0])
    chosen = found[0][verdict.chosen]
    record = {
        "cell": cell.as_dict(),
        "threat": threat_of(cell).as_dict(),
        "recipe": chosen.recipe,
        "stance": chosen.stance,
        "tries": len(found[0]),
        "labels": None if observation.classes == 0 else [int(label) for label in chosen.targets.reshape(-1)],
        "size": _size(observation) / max(_size(subject.targets[0].observation), TINY),
        "unexplained": _unexplained(observation, verdict.scores[verdict.chosen], _null_score(subject, observation, referee)),
        "candidates": len(subject.dataset),
        "nearest": _nearest(chosen, subject.dataset.inputs),
    }
    return record, chosen.inputs


def _size(observation: Observation) -> float:
    return float(norm(observation.update.weights))


def _unexplained(observation: Observation, best: float, null: float) -> dict[str, Any]:
    """Return the referee's scores in words people can read: a share of the update, or multiples of the noise's power."""
    noisy = bool(observation.adversary.arrives(observation).noise_std)
    # Under known noise the score is half the squared residual per entry over the noise's variance: 1/2 at the truth.
    scores = {"best": best, "null": null}
    finite = {name: (2 * value if noisy else value) if math.isfinite(value) else None for name, value in scores.items()}
    return {"unit": NOISE if noisy else SHARE, **finite}


def _number(value: float | None) -> str:
    return "an unknown part" if value is None else f"{value:.2g}"


def _observe(subject: Subject, payload: Payload) -> Observation:
    spec = ModelSpec.of(subject.learner.model)
    try:
        decoded = subject.defense.decode(payload, spec)
    except BadUpdate as error:
        raise BadUpdate(f"the captured update does not fit model and defense: {error}") from error
    device = subject.learner.device
    if not any(bool(value.any()) for value in decoded.weights.values()):
        raise BadUpdate("the captured update is zero everywhere, so there is nothing to attack; capture one after training")
    update = Update({n: v.to(device) for n, v in decoded.weights.items()}, decoded.examples, decoded.round)
    made = subject.targets[0].observation
    # Which public inputs the client had, if any, nobody here knows; the attacker has its own all the same.
    return dataclasses.replace(made, updates=(update,), payloads=(payload,), public=None, own=made.public)


def _null_score(subject: Subject, observation: Observation, referee: Referee) -> float:
    """Return the best score of inputs that have nothing to do with the update: public images with the recovered labels."""
    from gradveil.attacks.engine.labels import recover_labels

    labels = recover_labels(observation, informed=True)
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
