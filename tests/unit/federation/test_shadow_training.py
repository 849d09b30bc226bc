"""The shadow defense in federated training: by name, killed and resumed, with running statistics, under SCAFFOLD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from gradveil.data import Dataset, load_data
from gradveil.federation.engine import run_training
from gradveil.study.federation import FederationSettings
from gradveil.testing.shadow_scene import generator


def settings(**changes: Any) -> FederationSettings:
    base: dict[str, Any] = {
        "data": "digits",
        "model": "lenet",
        "clients": 3,
        "clients_per_round": 2,
        "rounds": 4,
        "minibatch": 4,
        "defense": f"shadow(generator={generator(1)!r}, latent_steps=3, fit_steps=2, until=3, rounds=4)",
    }
    return FederationSettings(**{**base, **changes})


def few() -> tuple[Dataset, Dataset]:
    digits = load_data("digits")
    return digits.take(list(range(24))), digits.take(list(range(24, 40)))


def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    data, test = few()
    whole = run_training(settings(), dataset=data, test=test)
    for last in (1, 2, 3, 4):
        resumed = run_training(settings(), dataset=data, test=test, out=tmp_path / "run", stop_after=last)
    for name, value in whole.weights.items():
        assert torch.equal(value, resumed.weights[name]), name
    plain = run_training(settings(defense="none"), dataset=data, test=test)
    assert any(not torch.equal(value, plain.weights[name]) for name, value in whole.weights.items())


def test_what_lies_on_the_disk_shrinks_after_termination(tmp_path: Path) -> None:
    data, test = few()
    everyone = settings(clients_per_round=3)
    names: dict[int, set[str]] = {}
    for last in (3, 4):
        run_training(everyone, dataset=data, test=test, out=tmp_path / "run", stop_after=last)
        (path,) = (tmp_path / "run" / "checkpoint").glob("clients-*.safetensors")
        with safe_open(str(path), framework="pt") as opened:
            names[last] = {key.rpartition("state/")[2] for key in opened.keys()}  # noqa: SIM118
    assert {"keys", "maps", "codes"} < names[3] and any(name.startswith("shadow/") for name in names[3])
    assert names[4] == {"keys", "maps"}


WITH_STATISTICS = {"model": "convnet(width=2, norm='batch')", "batch_norm": "train"}


@pytest.mark.parametrize("changes", [{"aggregation": "scaffold"}, WITH_STATISTICS])
def test_other_trainings(changes: dict[str, Any]) -> None:
    data, test = few()
    result = run_training(settings(rounds=1, clients_per_round=3, **changes), dataset=data, test=test)
    assert all(bool(torch.isfinite(value).all()) for value in result.weights.values())


@pytest.mark.parametrize("name", ["digits", "photos"])
def test_by_name_on_built_in_data_with_shipped_weights(name: str) -> None:
    data = load_data(name)
    few_records = data.take(list(range(0, len(data), len(data) // 6))[:6])
    asked = settings(data=name, defense="shadow(latent_steps=2, fit_steps=1)", rounds=1, clients=2, clients_per_round=2)
    result = run_training(asked, dataset=few_records, test=few_records)
    assert result.rounds[0].refused == 0
