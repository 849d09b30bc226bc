"""Attack clients of a training that `shadow_xray.py` stopped, and score what is found against x and what was trained on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gradveil.attacks import Ensemble, informed_twins, launch, line_up, resolve
from gradveil.attacks.base import AttackContext
from gradveil.attacks.ensembles import Member
from gradveil.client.update import run_client
from gradveil.defenses import Defense
from gradveil.federation.setup import Federation
from gradveil.learning import Learner
from gradveil.metrics import Unavailable, measure
from gradveil.metrics.regions import bounding_boxes, measure_region
from gradveil.models.grad_cam import grad_cam_pp
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Observation, Reconstruction, ThreatModel
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

__all__ = ["INFORMED", "NO_PICTURES", "PHOTOGRAPHS", "PLAIN", "attack_round", "client_states"]

METRICS = ("mse", "psnr", "ssim", "lpips")
RELATIVE = "rdlv"
PLAIN, INFORMED, PHOTOGRAPHS, NO_PICTURES = "plain", "informed", "informed, photographs", "informed, no pictures"


def client_states(folder: Path) -> dict[int, Named]:
    """Read what clients keep from a training's checkpoint."""
    index = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    states: dict[int, Named] = {}
    for client, name in index["clients"].items():
        prefix, own = f"{client}/state/", {}
        if name:
            with safe_open(str(folder / "checkpoint" / name), framework="pt") as opened:
                keys = [key for key in opened.keys() if key.startswith(prefix)]  # noqa: SIM118
                own = {key.removeprefix(prefix): opened.get_tensor(key) for key in keys}
        states[int(client)] = own
    return states


def attack_round(
    federation: Federation,
    weights: Named,
    states: dict[int, Named],
    round_index: int,
    *,
    steps: int,
    each: int,
    pictures: Tensor,
    others: bool = True,
) -> list[dict[str, Any]]:
    """Attack one record of each client (``each`` of the larger ones), and return scores per record, stance and reference.

    The informed attacker has ``pictures`` of the same kind as the records. Beside it stand, with ``others``, one who has
    photographs only, and one who has none.
    """
    defense, learner = federation.defense, _learner(federation, weights)
    observations, batches, trained = [], [], []
    for client in range(len(federation.parts)):
        whole = federation.batch(client, round_index)
        for row in range(min(each, len(whole))):
            batch = Batch(whole.inputs[row : row + 1], whole.targets[row : row + 1], whole.records[row : row + 1])
            seed = federation.seed.child("attacked", client, row)
            state = {name: value.to(batch.inputs.device) for name, value in states.get(client, {}).items()} or None
            if state is not None and not hasattr(defense, "latent_steps"):
                state = None  # error feedback and the like belong to the client's own round, not to an extra one
            observation, seen = _observe(learner, batch, defense, seed, state, round_index, federation)
            observations.append(observation.replace(public=pictures))
            batches.append(batch)
            trained.append(seen)
    further = {PHOTOGRAPHS: federation.public, NO_PICTURES: None} if others else {}
    found = _attack(observations, steps, federation.seed, further)
    original = torch.cat([batch.inputs for batch in batches])
    noisy = torch.cat(trained)
    targets = torch.cat([batch.targets for batch in batches])
    saliency = grad_cam_pp(lambda x: learner.logits(weights, x), learner.model, original, targets)
    boxes = bounding_boxes(saliency.cpu())
    prior = federation.inputs.mean(0).cpu()
    rows = []
    for stance, images in {**found, "data mean": prior.expand_as(original)}.items():
        for reference, truth in (("x", original), ("x_N", noisy)):
            scores = _scores(images.cpu(), truth.cpu(), boxes, prior)
            rows.append({"round": round_index, "stance": stance, "reference": reference, "records": len(original), **scores})
    return rows


def _learner(federation: Federation, weights: Named) -> Learner:
    settings = TrainingSettings(learning_rate=federation.settings.learning_rate, batch_norm="eval")
    return federation.learner.replace(weights=weights, settings=settings)


def _observe(
    learner: Learner, batch: Batch, defense: Defense, seed: Seed, state: Named | None, round_index: int, federation: Federation
) -> tuple[Observation, Tensor]:
    result = run_client(learner, batch, defense, seed, state=state, round_index=round_index, public=federation.public)
    observation = Observation(
        learners=(learner,),
        updates=(defense.decode(result.payload, ModelSpec.of(learner.model)),),
        payloads=(result.payload,),
        input_shape=tuple(batch.inputs.shape[1:]),
        classes=federation.train.classes,
        examples=1,
        threat=ThreatModel(),
        adversary=defense.adversary(),
        labels=batch.targets,
        public=federation.public,
    )
    return observation, result.trained_batch.inputs


def _attack(observations: list[Observation], steps: int, seed: Seed, others: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the reconstructions of the plain and the informed attackers, in the order of the observations.

    ``others`` names further informed attackers by the public pictures they have; only an attacker who finishes the plain one's
    reconstructions differs by them.
    """
    recipe = dataclasses.replace(resolve("quick").members[0].attack, steps=steps)
    ensemble = Ensemble("shadow-xray", "One recipe.", (Member(recipe, (PLAIN, INFORMED)),), rehearsals=0)
    context = AttackContext(seed=seed.child("attacker"), budget=steps)
    best: dict[str, dict[int, Reconstruction]] = {}
    for attack in line_up(ensemble, observations[0], context):
        candidates = launch(attack, observations, context)
        for one in (*candidates, *informed_twins(candidates, observations)):
            kept = best.setdefault(one.stance, {})
            if one.target not in kept or one.best_loss < kept[one.target].best_loss:
                kept[one.target] = one
    if observations[0].adversary.arrives(observations[0]).plain_search:
        for name, public in others.items():
            twins = informed_twins(list(best[PLAIN].values()), [each.replace(public=public) for each in observations])
            best[name] = {one.target: one for one in twins}
    # Where the informed attacker has nothing to add to a reconstruction, it is the plain one.
    plain = best[PLAIN]
    return {
        stance: torch.cat([best.get(stance, {}).get(index, plain[index]).inputs for index in range(len(observations))])
        for stance in (PLAIN, INFORMED, *(name for name in others if best.get(name)))
    }


def _scores(images: Tensor, truth: Tensor, boxes: Tensor, prior: Tensor) -> dict[str, Any]:
    whole = measure(images, truth, (*METRICS, RELATIVE), {"prior": prior})
    parts = measure_region(images, truth, boxes, METRICS, {"prior": prior})
    return {
        name: str(values) if isinstance(values, Unavailable) else [round(float(value), 5) for value in values]
        for name, values in {**whole, **parts}.items()
    }
