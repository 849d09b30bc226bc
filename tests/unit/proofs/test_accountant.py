"""The accountant: against closed forms, against other accountants, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaln, logsumexp

from gradveil.errors import UsageError
from gradveil.proofs.accountant import epsilon, gaussian_delta, gaussian_epsilon, noise_for, sampled_gaussian_rdp

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_privacy.json").read_text())


@pytest.mark.parametrize("row", GOLDEN["gaussian_epsilon"]["value"], ids=str)
def test_without_sampling_it_is_exact(row: dict[str, Any]) -> None:
    wanted = row["epsilon"]
    found = epsilon(noise_multiplier=row["noise_multiplier"], steps=row["steps"], delta=row["delta"])
    assert found == pytest.approx(wanted, rel=GOLDEN["gaussian_epsilon"]["tolerance"])


def arguments(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("noise_multiplier", "sampling_rate", "steps", "delta")}


@pytest.mark.parametrize("row", GOLDEN["sampled_epsilon"]["value"], ids=str)
def test_with_sampling_it_agrees_with_other_accountants(row: dict[str, Any]) -> None:
    found = epsilon(**arguments(row))
    assert found == pytest.approx(row["rdp"], rel=GOLDEN["sampled_epsilon"]["tolerance"])
    assert found > row["pld"]


@pytest.mark.parametrize("row", [row for row in GOLDEN["sampled_epsilon"]["value"] if row["prv"]], ids=str)
def test_opacus_answers_behind_its_extra(row: dict[str, Any]) -> None:
    pytest.importorskip("opacus")
    assert epsilon(**arguments(row), method="prv") == pytest.approx(row["prv"], rel=1e-4)


def test_a_missing_opacus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opacus.accountants", None)
    with pytest.raises(UsageError, match=r"gradveil\[dp\]"):
        epsilon(noise_multiplier=1.0, sampling_rate=0.5, method="prv")


@pytest.mark.parametrize("row", GOLDEN["sampled_rdp_integer_orders"]["value"], ids=str)
def test_the_quadrature_agrees_with_the_binomial_sum(row: dict[str, Any]) -> None:
    sigma, q, order = row["noise_multiplier"], row["sampling_rate"], row["order"]
    terms = [
        float(gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1))
        + (order - k) * math.log1p(-q)
        + k * math.log(q)
        + (k * k - k) / (2 * sigma**2)
        for k in range(order + 1)
    ]
    wanted = float(logsumexp(terms)) / (order - 1)
    assert sampled_gaussian_rdp(sigma, q, order) == pytest.approx(wanted, rel=GOLDEN["sampled_rdp_integer_orders"]["tolerance"])


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 20), st.floats(1e-9, 0.5))
def test_epsilon_and_delta_are_inverse(mu: float, delta: float) -> None:
    eps = gaussian_epsilon(mu, delta)
    assert eps >= 0
    if eps > 0:
        assert gaussian_delta(mu, eps) == pytest.approx(delta, rel=1e-6)
    else:
        assert gaussian_delta(mu, 0.0) <= delta


@settings(max_examples=25, deadline=None)
@given(st.floats(0.3, 8), st.floats(0.001, 0.9), st.integers(1, 500))
def test_more_noise_fewer_steps_and_rarer_sampling_never_cost_more(sigma: float, q: float, steps: int) -> None:
    here = epsilon(noise_multiplier=sigma, sampling_rate=q, steps=steps)
    slack = 1e-3 * here + 1e-9  # the order is searched, not solved for
    assert epsilon(noise_multiplier=1.3 * sigma, sampling_rate=q, steps=steps) <= here + slack
    assert epsilon(noise_multiplier=sigma, sampling_rate=q, steps=steps + 10) >= here - slack
    assert epsilon(noise_multiplier=sigma, sampling_rate=min(1.0, 1.1 * q), steps=steps) >= here - slack
    assert here <= epsilon(noise_multiplier=sigma, steps=steps)


def test_edges() -> None:
    assert epsilon(noise_multiplier=0.0) == math.inf
    assert epsilon(noise_multiplier=0.0, steps=0) == 0.0
    assert epsilon(noise_multiplier=1.0, sampling_rate=0.0) == 0.0
    assert epsilon(noise_multiplier=1e6) == 0.0
    # Tiny noise needs a grid too fine to afford; the exact value without sampling still bounds it.
    tiny = epsilon(noise_multiplier=1e-3, sampling_rate=0.5, steps=3)
    assert tiny == epsilon(noise_multiplier=1e-3, steps=3)


@pytest.mark.parametrize(("target", "rate", "steps"), [(1.0, 1.0, 1), (8.0, 1.0, 50), (2.0, 0.01, 1000)])
def test_noise_for_a_target_is_enough_and_hardly_more(target: float, rate: float, steps: int) -> None:
    sigma = noise_for(target, sampling_rate=rate, steps=steps)
    assert epsilon(noise_multiplier=sigma, sampling_rate=rate, steps=steps) <= target
    assert epsilon(noise_multiplier=0.995 * sigma, sampling_rate=rate, steps=steps) > target


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"steps": -1},
        {"steps": 1.5},
        {"sampling_rate": 1.5},
        {"delta": 0.0},
        {"delta": 1.0},
        {"method": "rumour"},
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        epsilon(**({"noise_multiplier": 1.0} | wrong))


def test_a_target_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="above 0"):
        noise_for(0.0)
