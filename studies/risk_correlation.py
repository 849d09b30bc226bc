"""Does InvRE, which runs no attack, tell what attacks get? Figures 3 and 5 to 8 of Xu et al. 2025, on CIFAR-10.

No plan says it: attackers are mixed by how long they run, E[MSE] over iterations, and risks are taken per cut and strength; a
plan has one attacker per cell. Parts take minutes of a core each, those of group ``cuda`` hours.

Risks are exact (mode ``gram``). Attacks are ours, with labels given: ``dlg`` is L-BFGS on squared differences, ``ig`` is Adam on
cosines with total variation. E[MSE] = Σ P_t MSE_t over attackers of Iter_t iterations, P_t ∝ 1 / T_t, T_t = Iter_1 + … + Iter_t.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gradveil.defenses import DEFENSES
from studies import risk_tables
from studies.risk_scenes import ITERATIONS, Place, attacked, defended, defended_embedding, nulls, risks
from studies.risk_tables import NULLS

RECORDS, FEW, DEFENDED = 128, 16, 8
DEFENSE_STEPS = 300
LADDERS = {
    "data_noise": ("std", (0.02, 0.05, 0.1, 0.2)),
    "gaussian_noise": ("std", (1e-5, 1e-4, 1e-3, 1e-2)),
    "pruning": ("rate", (0.5, 0.8, 0.95, 0.99)),
    "entry_dropout": ("rate", (0.5, 0.8, 0.95, 0.99)),
}
"""Strengths, weak to strong; other defenses use the ladders of their cards."""
GUIDED = ("invl_dnp", "invl_gnp")
"""Each of their records needs a decomposition of its own, so their parts are as small as those of embeddings."""
PAIRS = 4
"""Parts that the pictures under one strength of a dear defense are dealt to."""
EMBEDDING_LADDERS = {"noise": (0.05, 0.2, 0.7, 2.0), "pruning": (0.5, 0.8, 0.95, 0.99), "dropout": (0.5, 0.8, 0.95, 0.99)}


@dataclass(frozen=True)
class Part:
    """One unit of work.

    Attributes:
        name: Of its unit.
        job: risk, attack, defense, embedding, or null: what needs no attack.
        subject: A scene, or a defense's spelling.
        attack: dlg or ig.
        rows: First and last (exclusive) picture.
        group: cpu, or cuda for those that take hours on a core.
        strength: Of an embedding's defense.
    """

    name: str
    job: str
    subject: str
    rows: tuple[int, int]
    group: str = "cpu"
    attack: str = ""
    strength: float = 0.0


def parts() -> list[Part]:
    """Return all parts, the longest first within a group."""
    return [Part(NULLS, "null", "", (0, RECORDS)), *_figure3(), *_figures5and6(), *_figures7and8()]


def _shards(name: str, count: int, total: int = RECORDS) -> list[tuple[str, tuple[int, int]]]:
    edges = [round(total * index / count) for index in range(count + 1)]
    if count == 1:
        return [(name, (0, total))]
    return [(f"{name}.{index}", (edges[index], edges[index + 1])) for index in range(count)]


def _figure3() -> list[Part]:
    found = []
    # Scene, group, shards of risk, DLG and IG: chosen so that no part takes more than some minutes.
    for scene, group, risk, dlg, ig in (
        ("lenet", "cpu", 8, 1, 2),
        ("lenet-trained", "cpu", 8, 1, 2),
        ("resnet20-cut1", "cpu", 16, 2, 4),
        ("resnet20-trained-cut1", "cpu", 16, 2, 4),
        ("resnet18-cut1", "cuda", 2, 1, 1),
    ):
        found += [Part(name, "risk", scene, rows, group) for name, rows in _shards(f"fig3-{scene}-risk", risk)]
        for attack, shards in (("dlg", dlg), ("ig", ig)):
            found += [
                Part(name, "attack", scene, rows, group, attack) for name, rows in _shards(f"fig3-{scene}-{attack}", shards)
            ]
    return found


def _figures5and6() -> list[Part]:
    found = []
    for scene, group, shards in (
        ("mlp", "cpu", 4),
        ("lenet", "cpu", 1),
        ("convnet", "cpu", 8),
        ("resnet20", "cpu", 8),
        *((f"resnet20-cut{i}", "cpu", 2) for i in (1, 2, 3)),
        *((f"resnet20-trained-cut{i}", "cpu", 2) for i in (1, 2, 3)),
        *((f"resnet18-cut{i}", "cuda", 1) for i in (1, 2, 3)),
    ):
        found += [Part(name, "risk", scene, rows, group) for name, rows in _shards(f"fig56-{scene}-risk", shards, FEW)]
        for attack in ITERATIONS:
            found += [
                Part(name, "attack", scene, rows, group, attack) for name, rows in _shards(f"fig56-{scene}-{attack}", shards, FEW)
            ]
    return found


def _figures7and8() -> list[Part]:
    found = [Part("fig7-none", "defense", "none", (0, DEFENDED))]
    for name in (*LADDERS, *(name for name in GUIDED if name in DEFENSES.names())):
        setting, strengths = LADDERS.get(name, ("", ()))
        rungs: list[Mapping[str, Any]] = [{setting: value} for value in strengths]
        rungs = rungs or list(DEFENSES.card(name).ladder)
        for index, rung in enumerate(rungs):
            told = ", ".join(f"{key}={value!r}" for key, value in rung.items())
            shards = _shards(f"fig7-{name}-{index}", PAIRS if name in GUIDED else 1, DEFENDED)
            found += [Part(stem, "defense", f"{name}({told})", rows) for stem, rows in shards]
    rungs8 = [("fig8-none", "noise", 0.0)]
    for kind, values in EMBEDDING_LADDERS.items():
        rungs8 += [(f"fig8-{kind}-{index}", kind, value) for index, value in enumerate(values)]
    for stem, kind, value in rungs8:
        found += [Part(name, "embedding", kind, rows, strength=value) for name, rows in _shards(stem, PAIRS, DEFENDED)]
    return found


def units(settings: SimpleNamespace) -> list[str]:
    """Name the parts of the groups asked for."""
    return [part.name for part in parts() if part.group in settings.groups]


def measure(unit: str, settings: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Measure one part."""
    part = next(part for part in parts() if part.name == unit)
    # Parts of one process share spectra: noise leaves a Jacobian as it is.
    place = Place(Path(settings.data), settings.weights, work, torch.device(settings.device))
    rows = list(range(*part.rows))
    wall, cpu = time.perf_counter(), time.process_time()
    if part.job == "risk":
        found: Any = risks(part.subject, place, rows)
    elif part.job == "attack":
        found = attacked(part.subject, part.attack, place, rows)
    elif part.job == "defense":
        found = defended(part.subject, place, rows, DEFENSE_STEPS)
    elif part.job == "null":
        found = nulls(place, rows)
    else:
        found = defended_embedding("resnet20-cut1", part.subject, part.strength, place, rows, DEFENSE_STEPS)
    return {
        "part": part.name,
        "job": part.job,
        "subject": part.subject,
        "attack": part.attack,
        "strength": part.strength,
        "wall": round(time.perf_counter() - wall, 1),
        "cpu": round(time.process_time() - cpu, 1),
        "test_pictures": place.test_pictures,
        "found": found,
    }


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show records, the order of architectures and cuts, and defenses of gradients and embeddings."""
    found = list(documents.values())
    return {
        "records": risk_tables.records(found),
        "order": risk_tables.order(found),
        "gradients": risk_tables.defenses(found, "fig7"),
        "embeddings": risk_tables.defenses(found, "fig8"),
    }
