"""The records that cross borders."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from gradveil.adversary import OpenAdversary, prefixed, with_prefix
from gradveil.defenses import DEFENSES
from gradveil.records import (
    AdversaryModel,
    Batch,
    Comparison,
    Knowledge,
    ModelSpec,
    Payload,
    Reconstruction,
    Role,
    ThreatModel,
    Update,
)
from gradveil.testing.defenses_scene import Scene


def test_a_specification_tells_weights_buffers_and_counters_apart() -> None:
    spec = ModelSpec.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert list(spec.named(Role.WEIGHT)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(spec.named(Role.BUFFER)) == ["1.running_mean", "1.running_var"]
    assert list(spec.named(Role.COUNTER)) == ["1.num_batches_tracked"]
    assert spec.tensors["0.weight"].shape == (2, 3)
    assert spec.parameters == 12


@pytest.mark.parametrize(
    "record",
    [
        Batch(torch.ones(2, 3), torch.zeros(2)),
        Update({"w": torch.ones(1)}, examples=2),
        Payload("x", {}, examples=1),
        ThreatModel(),
        Reconstruction(torch.ones(1, 2), torch.zeros(1), "x"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_records_are_frozen(record: Any) -> None:
    field = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, None)


def test_changed_copies_leave_the_original() -> None:
    batch = Batch(torch.ones(2, 3), torch.zeros(2))
    assert len(batch) == 2
    assert batch.replace(records=("a", "b")).records == ("a", "b")
    assert batch.records == ()
    assert Update({}, examples=2).replace(round=3).round == 3
    assert Reconstruction(torch.ones(1, 2), torch.zeros(1), "x").replace(restart=2).restart == 2


def test_a_threat_model_says_in_words_and_numbers_who_attacks() -> None:
    plain = ThreatModel()
    text = " ".join(plain.describe())
    assert "one client's update in one round" in text
    assert "only watches" in text
    assert Knowledge.LABELS not in plain.knows
    strong = ThreatModel(clients=5, rounds=3, knows=frozenset(Knowledge), active=True)
    text = " ".join(strong.describe())
    assert "secure aggregate of 5 clients in 3 rounds" in text
    assert "nothing is withheld" in text
    assert "alters the model" in text
    assert "nothing else" in " ".join(ThreatModel(knows=frozenset()).describe())
    assert json.loads(json.dumps(strong.as_dict()))["clients"] == 5


def test_residuals_are_simulated_minus_observed() -> None:
    comparison = Comparison({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
    assert comparison.residuals()["w"].tolist() == [2.0]


def test_an_observation_points_to_its_first_round() -> None:
    scene = Scene.of(DEFENSES.build("none"))
    seen = scene.observe(DEFENSES.build("none"), 1, scene.batch)
    assert seen.update is seen.updates[0]
    assert seen.learner is seen.learners[0]
    assert seen.replace(classes=9).classes == 9


def test_prefixes_file_and_find_tensors() -> None:
    both = with_prefix({"w": torch.ones(1)}, "a/") | with_prefix({"w": torch.zeros(1)}, "b/")
    assert sorted(both) == ["a/w", "b/w"]
    assert prefixed(both, "b/")["w"].tolist() == [0.0]


def test_the_open_attacker_knows_that_nothing_was_done() -> None:
    adversary: AdversaryModel = OpenAdversary()
    scene = Scene.of(DEFENSES.build("none"))
    seen = scene.observe(DEFENSES.build("none"), 1, scene.batch)
    simulated = adversary.replay(scene.learner, scene.batch.inputs, scene.batch.targets, {})
    comparison = adversary.compare(adversary.evidence(seen, 0), simulated, {})
    assert all(torch.allclose(value, torch.zeros_like(value), atol=1e-6) for value in comparison.residuals().values())
    assert adversary.arrives(seen).exact() == frozenset(seen.update.weights)
    assert adversary.arrives(seen).noise_std is None
    assert adversary.variables(seen, torch.Generator()) == {}
    assert float(adversary.penalty({})) == 0
    assert not adversary.arrives(seen).incomplete
