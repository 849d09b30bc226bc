"""pFGD: the transform is the orthonormal DCT-IV, the defense a projection, and its attacker projects alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from gradveil.defenses.pfgd import KEEP_UP_TO, PFGD, HighPassAdversary, dct4, high_pass, removed
from gradveil.errors import UsageError
from gradveil.testing.defenses_adversary import relative_residual
from gradveil.testing.defenses_scene import Scene, draw_batch

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_transforms.json").read_text())
SINE = torch.sin(torch.arange(101.0, dtype=torch.float64))


def matrix(n: int) -> Tensor:
    half = torch.arange(n, dtype=torch.float64) + 0.5
    return math.sqrt(2 / n) * torch.cos(math.pi / n * torch.outer(half, half))


def draw(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=dtype)


def test_the_transform_agrees_with_scipy() -> None:
    golden = GOLDEN["dct4_of_sine"]
    found = dct4(SINE).tolist()
    assert found[:6] == pytest.approx(golden["value"]["first"], abs=golden["tolerance"])
    assert found[-3:] == pytest.approx(golden["value"]["last"], abs=golden["tolerance"])


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 101, 255])
def test_the_transform_is_its_matrix(n: int) -> None:
    assert torch.allclose(dct4(draw(n)), matrix(n) @ draw(n), atol=1e-12)


@pytest.mark.parametrize(
    ("n", "dtype", "error"),
    [(101, torch.float64, 1e-13), (2**17, torch.float32, 1e-5), (2**17 + 1, torch.float32, 1e-5)],
)
@pytest.mark.parametrize("kept", [KEEP_UP_TO, 1])
def test_the_transform_is_its_own_inverse_and_keeps_lengths(
    n: int, dtype: torch.dtype, error: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.defenses.pfgd.KEEP_UP_TO", kept)
    value = draw(n, dtype)
    assert float((dct4(dct4(value)) - value).norm() / value.norm()) < error
    assert float(dct4(value).norm() / value.norm()) == pytest.approx(1, abs=error)


def test_the_transform_differentiates_under_vmap() -> None:
    rows = torch.stack([draw(30), 2 * draw(30)])
    slopes = vmap(grad(lambda row: dct4(row)[3]))(rows)
    assert torch.allclose(slopes, matrix(30)[3].expand(2, -1), atol=1e-12)


@pytest.mark.parametrize("row", GOLDEN["pfgd_of_sine"]["value"], ids=str)
def test_the_defense_agrees_with_scipy(row: dict[str, float]) -> None:
    left, tolerance = high_pass(SINE.reshape(1, -1), row["rate"]), GOLDEN["pfgd_of_sine"]["tolerance"]
    assert removed(101, row["rate"]) == row["removed"]
    assert float(left.norm()) == pytest.approx(row["norm"], abs=tolerance)
    assert [float(left[0, 0]), float(left[0, -1])] == pytest.approx([row["first"], row["last"]], abs=tolerance)


def test_it_is_a_projection_and_spares_small_tensors() -> None:
    once = high_pass(SINE, 0.3)
    assert torch.allclose(high_pass(once, 0.3), once, atol=1e-12)
    assert float(dct4(once)[: removed(101, 0.3)].abs().max()) < 1e-12
    assert high_pass(SINE[:99], 0.01) is not None and torch.equal(high_pass(SINE[:99], 0.01), SINE[:99])
    assert not torch.equal(high_pass(SINE[:100], 0.01), SINE[:100])


def test_the_attacker_meets_the_truth_exactly_and_knows_what_is_whole() -> None:
    defense = PFGD(rate=0.5)
    scene = Scene.of(defense)
    truth = draw_batch(1)
    observation = scene.observe(defense, 1, truth)
    evidence = observation.adversary.evidence(observation, 0)

    def score(adversary: Any) -> float:
        return float(relative_residual(adversary, scene.learner, evidence, truth.inputs, truth.targets, {}))

    assert score(observation.adversary) < 1e-10
    assert score(HighPassAdversary(0.1)) > 1e-3
    assert HighPassAdversary(0.01).arrives(observation).exact() == {"conv.bias", "gain", "head.bias", "unused"}


def test_a_share_of_one_is_refused() -> None:
    with pytest.raises(UsageError, match="below 1"):
        PFGD(rate=1.0)
