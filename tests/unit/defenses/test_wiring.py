"""Every setting of every defense matters: change it, and the same client with the same draws sends something else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gradveil.client.embedding import read_embedding, run_party
from gradveil.client.update import run_client
from gradveil.defenses import DEFENSES
from gradveil.defenses.base import Defense, State
from gradveil.defenses.outpost import Outpost
from gradveil.errors import UsageError
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.randomness import Seed
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.testing.defenses_scene import SHAPE, EmbeddingScene, Scene

PUBLIC = torch.rand((6, 3, 8, 8), generator=torch.Generator().manual_seed(8))
ROUNDS = 2

# The other value, and what else must be set for it to mean anything. What is not here is made half as large again, or turned.
OTHERS: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    ("censor", "scope"): ("whole", {}),
    ("censor", "sampling"): ("public", {}),
    ("censor", "trials"): (2, {}),
    ("censor", "active_rounds"): (1, {}),
    ("clipping", "bound"): (0.5, {}),
    ("clipping", "scope"): ("layer", {"bound": 0.1}),
    ("data_noise", "law"): ("laplace", {}),
    ("dgp", "smallest"): (0.5, {}),
    ("dgp", "largest"): (0.2, {}),
    ("dp_sgd", "scope"): ("layer", {}),
    ("dp_sgd", "bound"): (0.5, {}),
    ("dp_sgd", "expected_batch"): (7, {}),
    ("embedding_dropout", "rate"): (0.4, {}),
    ("embedding_pruning", "rate"): (0.4, {}),
    ("example_clipping", "bound"): (0.5, {}),
    ("example_clipping", "scope"): ("layer", {"bound": 0.1}),
    ("graddefense", "clip"): (0.1, {}),
    ("graddefense", "noisy"): (2, {}),
    ("graddefense", "slices"): (7, {}),
    ("invl_dnp", "share"): (0.5, {}),
    ("invl_dnp", "rule"): ("count", {"share": 0.5}),
    ("invl_dnp", "basis"): ("class", {}),
    ("invl_dnp", "refresh"): (2, {"basis": "class"}),
    ("invl_dnp", "most"): (2, {"mode": "leading", "most": 4}),
    ("invl_enp", "variance"): (False, {"delta": 0.5}),
    ("invl_enp", "share"): (0.7, {}),
    ("invl_enp", "spared"): (0.3, {}),
    ("invl_enp", "rule"): ("count", {}),
    ("invl_enp", "basis"): ("public", {}),
    ("invl_enp", "refresh"): (2, {"basis": "public"}),
    ("invl_enp", "most"): (2, {"mode": "leading", "most": 4, "spared": 0.0}),
    ("invl_gnp", "share"): (0.7, {}),
    ("invl_gnp", "spared"): (0.3, {}),
    ("invl_gnp", "rule"): ("count", {}),
    ("invl_gnp", "refresh"): (2, {"centres": "public"}),
    ("invl_gnp", "centres"): ("public", {}),
    ("invl_gnp", "most"): (2, {"mode": "leading", "most": 4, "spared": 0.0}),
    ("mq", "bits"): ((8, 2), {}),
    ("outpost", "rate"): (0.4, {}),
    ("outpost", "decay"): (4.0, {}),
    ("percentile_noise", "percentile"): (50.0, {}),
    ("pfgd", "rate"): (0.5, {}),
    ("precode", "latent"): (32, {}),
    ("pruning", "rate"): (0.5, {}),
    ("quantisation", "mode"): ("sign", {}),
    ("refiner", "epsilon"): (0.01, {}),
    ("refiner", "scope"): ("layer", {"epsilon": 0.02, "relative": True}),
    ("refiner", "relative"): (True, {"epsilon": 0.05}),
    ("refiner", "match"): ("example", {}),
    ("refiner", "terms"): ("log", {}),
    ("refiner", "optimiser"): ("gradient", {}),
    ("refiner", "blend"): (0.3, {}),
    ("refiner", "decay"): (0.5, {}),
    ("soteria", "rate"): (0.4, {}),
    ("svdefense", "beta"): (4.0, {}),
    ("svdefense", "weights"): ("none", {}),
    ("svdefense", "adaptive"): (False, {}),
    ("svdefense", "threshold"): (0.2, {"adaptive": False}),
    ("svdefense", "least_error"): (3.0, {"hardened": True}),
}

# What decides only the attacker, the search for something, or more than a round of one client can show has its tests elsewhere.
ELSEWHERE = {
    *(("invl_dnp", "mode"), ("invl_enp", "mode"), ("invl_gnp", "mode")),  # another way to the same basis
    *(("svdefense", "layer_wise"), ("graddefense", "compensate")),  # what the server does
    ("mq", "observer"),  # which of two attackers looks
    ("refiner", "network"),
}
SHADOW = "shadow"  # wants a generator from a file: `test_shadow.py`
CASES = [
    (name, field.name)
    for name in DEFENSES.names()
    for field in dataclasses.fields(DEFENSES.build(name))
    if name != SHADOW and (name, field.name) not in ELSEWHERE
]


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put brightness in the place of refiner's trained network."""

    class Brightness(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1).square().mean(1)

    monkeypatch.setattr("gradveil.defenses.refiner.defense.evaluation_network", lambda name, like: Brightness())


def sent(defense: Defense) -> list[Named]:
    """Return all that one client sends in a few rounds, as the server reads it."""
    local = TrainingSettings(shares="weights", local_steps=3) if isinstance(defense, Outpost) else None
    scene, found = Scene.of(defense, settings=local), []
    state: State | None = None
    batch = scene.batch.replace(targets=torch.tensor([1, 1, 3]))
    for index in range(ROUNDS):
        moved = {name: (1 + 0.3 * index) * value for name, value in scene.learner.weights.items()}
        learner = scene.learner.replace(weights=moved)
        more: dict[str, Any] = {"state": state, "round_index": index, "public": PUBLIC}
        if isinstance(scene, EmbeddingScene):
            assert isinstance(learner, EmbeddingLearner)
            party = run_party(learner, batch, defense, Seed(1), **more)
            state, arrived = party.state, read_embedding(party.payload, scene.party, SHAPE)
        else:
            client = run_client(learner, batch, defense, Seed(1), **more)
            state, arrived = client.state, scene.deliver(defense, client.payload)
        found.append(dict(arrived.weights))
    return found


def other(value: Any) -> Any:
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else 1.5 * value


@pytest.mark.parametrize(("name", "setting"), CASES, ids=lambda value: str(value))
def test_each_setting_decides_what_is_sent(name: str, setting: str) -> None:
    base = DEFENSES.build(name)
    value, also = OTHERS.get((name, setting), (None, {}))
    base = dataclasses.replace(base, **also)
    value = other(getattr(base, setting)) if value is None else value
    left, right = sent(base), sent(dataclasses.replace(base, **{setting: value}))
    assert any(
        one.keys() != two.keys() or any(one[key].shape != two[key].shape or not torch.equal(one[key], two[key]) for key in one)
        for one, two in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("name", [name for name in DEFENSES.names() if name != SHADOW])
def test_an_attacker_is_told_every_setting_it_has_a_name_for(name: str) -> None:
    """Settings are other than by default, so that none is right by itself."""
    defense = DEFENSES.build(name)
    for field in dataclasses.fields(defense):
        value, also = OTHERS.get((name, field.name), (None, {}))
        if isinstance(getattr(defense, field.name), (bool, str)) or field.name in {"bits", "refresh"}:
            continue
        try:
            defense = dataclasses.replace(defense, **(also | {field.name: other(getattr(defense, field.name))}))
        except (UsageError, TypeError):
            defense = dataclasses.replace(defense, **(also | {field.name: value})) if value is not None else defense
    adversary = defense.adversary()
    told = {field.name for field in dataclasses.fields(adversary)} if dataclasses.is_dataclass(adversary) else set()
    shared = told & {field.name for field in dataclasses.fields(defense)}
    for setting in shared:
        own = getattr(defense, setting)
        assert getattr(adversary, setting) == own, setting
