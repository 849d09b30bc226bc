"""What the two attackers with a prior from public pictures get on the records of `risk_correlation`, labels given.

No plan says it: embeddings are defended and cut here as that study does. The prior is mean and principal directions of all
training pictures of the file; attacked are the test pictures that the study of risk scores attacked, of LeNet those of the
file with 400 that it had then, which are the first of today's. Settings are the attacks' defaults, chosen on training pictures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks.base import Attack, AttackContext, PublicRecords, Simulate, launch
from gradveil.attacks.linear_map import LinearMap
from gradveil.attacks.wiener import Wiener
from gradveil.client.update import run_client
from gradveil.defenses import build_defense
from gradveil.defenses.embedding_noise import NoisyEmbeddingAdversary
from gradveil.defenses.parts.sparse_update import ZeroedEntriesAdversary
from gradveil.learning.embedding import EMBEDDING
from gradveil.learning.learner import Learner
from gradveil.metrics.mse import mean_squared_error
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Observation, Update
from studies.risk_scenes import SCENES, Place, learner_of, observe
from studies.risk_tables import TITLES
from studies.shared import table

FIRST_FILE = 400
"""Test pictures of the file that gradients of LeNet were attacked on."""


@dataclass(frozen=True)
class Case:
    """What is sent of one scene.

    Attributes:
        scene: Of `risk_scenes`.
        defense: A spelling where the gradient is sent; else noise, dropout or none.
        strength: Of an embedding's defense.
    """

    scene: str
    defense: str = "none"
    strength: float = 0.0


CASES = {
    **{f"lenet-noise-{std:g}": Case("lenet", f"gaussian_noise(std={std})") for std in (1e-4, 1e-3, 1e-2)},
    **{f"lenet-pruning-{rate}": Case("lenet", f"pruning(rate={rate})") for rate in (0.95, 0.99)},
    **{f"lenet-dropout-{rate}": Case("lenet", f"entry_dropout(rate={rate})") for rate in (0.95, 0.99)},
    **{f"cut1-noise-{std:g}": Case("resnet20-cut1", "noise", std) for std in (0.2, 0.7, 2.0)},
    **{f"cut1-dropout-{rate}": Case("resnet20-cut1", "dropout", rate) for rate in (0.8, 0.95)},
    **{f"cut{cut}": Case(f"resnet20-cut{cut}") for cut in (2, 3)},
    **{f"trained-cut{cut}": Case(f"resnet20-trained-cut{cut}") for cut in (2, 3)},
}


def units(settings: SimpleNamespace) -> list[str]:
    """Name the cases."""
    return list(CASES)


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Attack the records of one case with both attackers."""
    case = CASES[unit]
    place = Place(Path(settings.data), settings.weights, work, torch.device(settings.device))
    learner, batch, public = learner_of(SCENES[case.scene], place), _pictures(case, place, settings.records), _public(place)
    observations, simulate = _gradients(case, learner, batch) if case.scene == "lenet" else _embeddings(case, learner, batch)
    null = mean_squared_error(public.inputs.mean(0, keepdim=True).expand_as(batch.inputs), batch.inputs)
    found: dict[str, Any] = {"case": unit, "null": null.tolist()}
    attacks: list[Attack] = [LinearMap(stance="informed"), Wiener(stance="informed")]
    # Shared: what is learned of public pictures alone is the same for every rank asked for.
    memory: dict[Any, Any] = {}
    for attack in attacks:
        started = time.process_time()
        context = AttackContext(seed=Seed(place.seed), budget=10**9, simulate=simulate, public=public, memory=memory)
        guesses = launch(attack, observations, context)
        errors = mean_squared_error(torch.cat([each.inputs for each in guesses]), batch.inputs)
        found[attack.card.name] = {"mse": errors.tolist(), "cpu": round(time.process_time() - started, 1)}
    return found


def _public(place: Place) -> PublicRecords:
    with np.load(place.data, allow_pickle=False) as archive:
        inputs, labels = archive["x_train"], archive["y_train"]
    pictures = torch.from_numpy(inputs).permute(0, 3, 1, 2).float() / 255
    return PublicRecords(pictures.to(place.device), torch.from_numpy(labels.astype(np.int64)).to(place.device), "same")


def _pictures(case: Case, place: Place, count: int) -> Batch:
    if case.scene != "lenet":
        return place.pictures(list(range(count)))
    with np.load(place.data, allow_pickle=False) as archive:
        inputs, labels = archive["x_test"][:FIRST_FILE], archive["y_test"][:FIRST_FILE]
    rows = np.random.default_rng(place.seed).permutation(FIRST_FILE)[:count]
    pictures = torch.from_numpy(inputs[rows]).permute(0, 3, 1, 2).float() / 255
    return Batch(pictures.contiguous().to(place.device), torch.from_numpy(labels[rows].astype(np.int64)).to(place.device))


def _gradients(case: Case, learner: Learner, batch: Batch) -> tuple[list[Observation], Simulate]:
    defense = build_defense(case.defense)

    def simulate(inputs: Tensor, targets: Tensor, draw: int) -> tuple[dict[str, Tensor], ...]:
        result = run_client(learner, Batch(inputs, targets), defense, Seed(draw).child("rehearsal"))
        return (defense.decode(result.payload, ModelSpec.of(learner.model)).weights,)

    return [observe(learner, batch, row, defense, Seed(row)) for row in range(len(batch))], simulate


def _embeddings(case: Case, learner: Learner, batch: Batch) -> tuple[list[Observation], Simulate]:
    adversaries = {"noise": NoisyEmbeddingAdversary(case.strength), "dropout": ZeroedEntriesAdversary(), "none": OpenAdversary()}

    def sent(value: Tensor, seed: Seed) -> Tensor:
        generator = seed.generator("embedding")
        noise = torch.randn(value.shape, generator=generator).to(value)
        if case.defense == "noise":
            return value + case.strength * noise
        kept = (torch.rand(value.shape, generator=generator).to(value) >= case.strength).to(value)
        return value * kept if case.defense == "dropout" else value

    def simulate(inputs: Tensor, targets: Tensor, draw: int) -> tuple[dict[str, Tensor], ...]:
        return ({EMBEDDING: sent(learner.update(inputs, targets)[EMBEDDING], Seed(draw).child("rehearsal"))},)

    observations = []
    for row in range(len(batch)):
        seen = observe(learner, batch, row)
        update = Update(weights={EMBEDDING: sent(seen.update.weights[EMBEDDING], Seed(row))}, examples=1)
        observations.append(seen.replace(updates=(update,), adversary=adversaries[case.defense]))
    return observations, simulate


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show both attackers beside the null."""
    rows = []
    for name, case in CASES.items():
        own = next((each for each in documents.values() if each["case"] == name), None)
        if own is None:
            continue
        defense = case.defense if case.scene == "lenet" else f"{case.defense} {case.strength:g}" if case.strength else "none"
        seconds = " / ".join(f"{own[attack]['cpu'] / len(own['null']):.1f}" for attack in ("linear_map", "wiener"))
        scores = [f"{_decibels(errors):.1f}" for errors in (own["linear_map"]["mse"], own["wiener"]["mse"], own["null"])]
        rows.append([TITLES[case.scene], f"`{defense}`", str(len(own["null"])), *scores, seconds])
    head = ["shared", "defense", "n", "`linear_map`", "`wiener`", "null: mean of public pictures", "seconds of a core a picture"]
    return {"priors": table(head, rows)}


def _decibels(errors: list[float]) -> float:
    return -10 * math.log10(sum(errors) / len(errors))
