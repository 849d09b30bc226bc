"""Noise measured on the update itself: its size, and what an attacker who sees only the sum makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.percentile_noise import PercentileNoise, estimate_scale, magnitude_percentile
from gradveil.errors import UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import ThreatModel, Update
from gradveil.tensors import Named, flatten
from gradveil.testing.defenses_scene import Scene

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_privacy.json").read_text())


@pytest.mark.parametrize("row", GOLDEN["percentile_of_sine"]["value"], ids=str)
def test_the_percentile_is_numpys_over_all_tensors_without_zeros(row: dict[str, float]) -> None:
    sine = torch.sin(torch.arange(101, dtype=torch.float64))
    sine = torch.where(sine < -0.5, 0.0, sine)
    update = {"a": sine[:40].reshape(8, 5), "b": sine[40:], "c": torch.tensor(0.0), "d": torch.empty(0)}
    assert magnitude_percentile(update, row["percentile"]) == pytest.approx(
        row["found"], rel=GOLDEN["percentile_of_sine"]["tolerance"]
    )


def test_more_entries_than_quantile_takes() -> None:
    many = torch.ones(17_000_000, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(many.float(), 0.95)
    assert magnitude_percentile({"w": many}, 95.0) == 1.0


def test_nothing_but_zeros_gets_no_noise() -> None:
    assert magnitude_percentile({"w": torch.zeros(5), "none": torch.empty(0)}, 95.0) == 0.0
    assert estimate_scale(torch.zeros(5), 1.0, 95.0) == 0.0
    assert estimate_scale(torch.empty(0), 1.0, 95.0) == 0.0


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_noise_grows_with_the_update_and_is_the_same_for_all_tensors(size: float) -> None:
    defense = PercentileNoise(share=0.5)
    weights = {"large": size * torch.linspace(-1, 1, 100_000), "small": torch.zeros(100_000)}
    update = Update(weights, examples=3, round=1, buffers={"mean": torch.ones(2)})
    sent, _ = defense.protect_update(update, Scene.of(defense).view(), {})
    assert torch.equal(sent.buffers["mean"], torch.ones(2))
    for name, value in sent.weights.items():
        assert float((value - weights[name]).std()) == pytest.approx(0.5 * 0.95 * size, rel=0.02)


def lenet_gradient(activation: str) -> Named:
    model = build_model(f"lenet(activation='{activation}')", input_shape=(3, 32, 32), classes=10, seed=Seed(0))
    learner = Learner.of(model, loss_by_name("cross_entropy"))
    inputs = torch.rand((1, 3, 32, 32), generator=torch.Generator().manual_seed(2))
    return learner.gradient(learner.weights, inputs, torch.tensor([3]))


@pytest.mark.parametrize(("activation", "slack"), [("sigmoid", 0.15), ("relu", 0.3)])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0, 2.0])
def test_an_attacker_estimates_the_noise_of_a_real_update(activation: str, share: float, slack: float) -> None:
    clean = lenet_gradient(activation)
    truth = share * float(magnitude_percentile(clean, 95.0))
    vector = flatten(clean)
    seen = vector + truth * torch.randn(vector.shape, generator=torch.Generator().manual_seed(1))
    assert estimate_scale(seen, share, 95.0) == pytest.approx(truth, rel=slack)


def laplacian(entries: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    draws = torch.rand((2, entries), generator=generator, dtype=torch.float64).log()
    return draws[0] - draws[1]


def test_the_estimate_is_consistent() -> None:
    # The exact 95th percentile of |Laplace| is log 20, so the only error left is that of the sample and of the grid.
    errors = []
    for entries in (1_000, 1_000_000):
        clean = laplacian(entries)
        noise = math.log(20) * torch.randn(entries, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        errors.append(abs(estimate_scale(clean + noise, 1.0, 95.0) / math.log(20) - 1))
    assert errors[1] < 0.02
    assert errors[1] < errors[0]


def test_the_attacker_of_an_aggregate_expects_less() -> None:
    defense = PercentileNoise(share=1.0)
    scene = Scene.of(defense)
    seen = scene.observe(defense, 1, scene.batch)
    alone = seen.adversary.arrives(seen).noise_std
    aggregate = seen.replace(threat=ThreatModel(clients=4))
    many = seen.adversary.arrives(aggregate).noise_std
    assert alone is not None and many is not None and many < alone
    assert seen.adversary.arrives(seen).exact() == frozenset()
    assert PercentileNoise(share=0).adversary() == OpenAdversary()


@pytest.mark.parametrize("wrong", [{"share": -1}, {"share": math.nan}, {"percentile": 0}, {"percentile": 100}], ids=str)
def test_nonsense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        PercentileNoise(**wrong)
