"""Objectives are zero at the truth, finite everywhere, and tell small angles apart; priors are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.engine.priors import energy, total_variation
from gradveil.errors import UsageError
from gradveil.records import Comparison
from gradveil.tensors import Named

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "attacks.json").read_text())
NAMES = OBJECTIVES.names()


def draw(seed: int, dtype: torch.dtype = torch.float64) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn((4, 3), generator=generator).to(dtype),
        "a.bias": torch.randn(4, generator=generator).to(dtype),
    }


def score(name: str, simulated: Named, observed: Named) -> float:
    return float(OBJECTIVES.get(name)(Comparison(simulated, observed)))


def flat(named: Named) -> Tensor:
    return torch.cat([value.reshape(-1) for value in named.values()])


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1000))
def test_zero_at_the_truth_and_positive_elsewhere(name: str, seed: int) -> None:
    assert score(name, draw(seed), draw(seed)) == pytest.approx(0, abs=1e-15)
    assert score(name, draw(seed), draw(seed + 1)) > 1e-3


@given(seed=st.integers(0, 1000), factor=st.floats(1e-3, 1e3))
def test_cosines_are_blind_to_scale_and_others_are_not(seed: int, factor: float) -> None:
    scaled = {name: value * factor for name, value in draw(seed).items()}
    for name in ("cosine", "layer_cosine"):
        assert score(name, scaled, draw(seed + 1)) == pytest.approx(score(name, draw(seed), draw(seed + 1)), rel=1e-6)
        assert score(name, scaled, draw(seed)) == pytest.approx(0, abs=1e-12)
    assert factor == pytest.approx(1, abs=1e-2) or score("relative_l2", scaled, draw(seed)) > 1e-5


@given(seed=st.integers(0, 1000))
def test_cosine_is_one_minus_the_cosine(seed: int) -> None:
    left, right = draw(seed), draw(seed + 1)
    whole = 1 - torch.cosine_similarity(flat(left), flat(right), dim=0)
    assert score("cosine", left, right) == pytest.approx(float(whole), rel=1e-12)
    layers = [1 - torch.cosine_similarity(left[n].reshape(-1), right[n].reshape(-1), dim=0) for n in left]
    assert score("layer_cosine", left, right) == pytest.approx(float(torch.stack(layers).mean()), rel=1e-12)


def test_l2_and_relative_l2_are_what_they_say() -> None:
    simulated = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([2.0])}
    observed = {"a": torch.tensor([0.0, 4.0]), "b": torch.tensor([1.0])}
    assert score("l2", simulated, observed) == pytest.approx(9 + 16 + 1)
    assert score("relative_l2", simulated, observed) == pytest.approx((25 / 16 + 1) / 2)


def test_float32_tells_small_angles_apart() -> None:
    case = GOLDEN["small_angle"]
    turn = torch.tensor(case["value"]["angle"], dtype=torch.float64)
    left = {"a": torch.tensor([1.0, 0.0])}
    right = {"a": torch.stack([turn.cos(), turn.sin()]).float()}
    assert score("cosine", left, right) == pytest.approx(case["value"]["loss"], rel=case["tolerance"])
    naive = 1 - torch.cosine_similarity(left["a"], right["a"], dim=0)
    assert float(naive) != pytest.approx(case["value"]["loss"], rel=0.5), (
        "the usual form would do, and the stable one is not needed"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("zero", ["simulated", "observed", "both", "a layer"])
@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_finite_where_a_side_is_silent(name: str, zero: str, dtype: torch.dtype) -> None:
    simulated, observed = draw(0, dtype), draw(1, dtype)
    for side, what in ((simulated, "simulated"), (observed, "observed")):
        for key in side:
            if zero in (what, "both") or (zero == "a layer" and side is simulated and key == "a.bias"):
                side[key] = torch.zeros_like(side[key])
    slopes = grad(lambda named: OBJECTIVES.get(name)(Comparison(named, observed)))(simulated)
    assert all(bool(torch.isfinite(slope).all()) for slope in slopes.values())


def test_layers_seen_as_zero_are_left_out() -> None:
    observed = draw(1) | {"a.bias": torch.zeros(4, dtype=torch.float64)}
    for name in ("layer_cosine", "relative_l2"):
        only = score(name, {"a.weight": draw(0)["a.weight"]}, {"a.weight": observed["a.weight"]})
        assert score(name, draw(0), observed) == pytest.approx(only)


@pytest.mark.parametrize("name", NAMES)
def test_safe_under_vmap(name: str) -> None:
    many = [(draw(seed), draw(seed + 10)) for seed in range(3)]
    left, right = ({n: torch.stack([pair[side][n] for pair in many]) for n in many[0][0]} for side in (0, 1))
    together = vmap(lambda s, o: OBJECTIVES.get(name)(Comparison(s, o)))(left, right)
    assert together.tolist() == pytest.approx([score(name, *pair) for pair in many])


def test_an_unknown_objective_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'cosine'"):
        OBJECTIVES.get("cosin")


def test_total_variation_counts_neighbours_along_every_axis() -> None:
    ramp = torch.linspace(0, 1, 5).expand(1, 1, 5, 5)
    assert float(total_variation(ramp)) == pytest.approx(0.25)
    assert float(total_variation(ramp + ramp.transpose(2, 3))) == pytest.approx(0.5)
    assert float(total_variation(torch.rand(2, 3, 1, 1))) == 0
    assert float(total_variation(torch.linspace(0, 1, 5).expand(1, 1, 5))) == pytest.approx(0.25)
    assert float(total_variation(torch.rand(2, 7))) == 0


def test_energy_is_the_distance_to_grey() -> None:
    assert float(energy(torch.full((1, 3), 0.5))) == 0
    assert float(energy(torch.ones(2, 3))) == pytest.approx(0.25)
