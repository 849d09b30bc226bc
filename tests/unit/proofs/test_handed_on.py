"""Every argument of the proofs reaches the formula it is for, and is named by itself where it is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gradveil.errors import UsageError
from gradveil.proofs import bounds
from gradveil.proofs.accountant import epsilon, gaussian_epsilon, noise_for, sampled_gaussian_rdp
from gradveil.proofs.bounds import advantage_bound, gaussian_bound, mixed_bound, sampled_advantage, sampled_bound
from gradveil.randomness import Seed

EPSILON: dict[str, Any] = {"noise_multiplier": 2.0, "steps": 20, "sampling_rate": 0.1, "delta": 1e-5}
SAMPLED: dict[str, Any] = {"kappa": 0.1, "noise_multiplier": 1.0, "sampling_rate": 0.3, "steps": 4, "samples": 4000}
CALLS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (epsilon, EPSILON, {"noise_multiplier": 1.5, "steps": 21, "sampling_rate": 0.12, "delta": 1e-6}),
    (
        noise_for,
        {"target_epsilon": 2.0, **{n: v for n, v in EPSILON.items() if n != "noise_multiplier"}},
        {"target_epsilon": 1.5, "steps": 40, "sampling_rate": 0.2, "delta": 1e-7},
    ),
    (gaussian_bound, {"kappa": 0.1, "noise_multiplier": 1.0, "steps": 2}, {"kappa": 0.2, "noise_multiplier": 1.2, "steps": 3}),
    (
        mixed_bound,
        {"kappas": [0.1, 0.2], "weights": [1.0, 2.0], "noise_multiplier": 1.0, "steps": 2},
        {"kappas": [0.1, 0.3], "weights": [2.0, 1.0], "noise_multiplier": 1.2, "steps": 3},
    ),
    (
        sampled_bound,
        SAMPLED,
        {
            "kappa": 0.2,
            "noise_multiplier": 1.1,
            "sampling_rate": 0.4,
            "steps": 5,
            "samples": 6000,
            "confidence": 0.9,
            "seed": Seed(5),
        },
    ),
    (
        sampled_advantage,
        {n: v for n, v in SAMPLED.items() if n != "kappa"},
        {"noise_multiplier": 1.1, "sampling_rate": 0.4, "steps": 5, "samples": 6000, "confidence": 0.9, "seed": Seed(5)},
    ),
    (
        advantage_bound,
        {"noise_multiplier": 1.0, "steps": 2, "replaced": True, "collision": 0.1},
        {"noise_multiplier": 1.2, "steps": 3, "replaced": False, "collision": 0.2},
    ),
]


@pytest.mark.parametrize(
    ("formula", "given", "name", "value"),
    [(formula, given, name, value) for formula, given, others in CALLS for name, value in others.items()],
    ids=lambda each: each.__name__ if callable(each) else str(each) if isinstance(each, str) else "",
)
def test_every_argument_counts(formula: Any, given: dict[str, Any], name: str, value: Any) -> None:
    assert formula(**given) != formula(**(given | {name: value}))


WRONG: dict[str, list[tuple[Any, str]]] = {
    "noise_multiplier": [(-1.0, "it must be a number at least 0"), (math.nan, "it must be a number at least 0")],
    "steps": [(-1, "it must be a whole number of at least 0"), (1.5, "it must be a whole number of at least 0")],
    "sampling_rate": [(1.5, "it must be between 0 and 1")],
    "delta": [(0.0, "it must be above 0 and below 1"), (1.0, "it must be above 0 and below 1")],
    "kappa": [(1.5, "it must be between 0 and 1")],
    "collision": [(-0.5, "it must be between 0 and 1")],
    "confidence": [(1.0, "it must be above 0 and below 1")],
}


@pytest.mark.parametrize(
    ("formula", "given", "name", "wrong", "says"),
    [
        (formula, given, name, wrong, says)
        for formula, given, others in CALLS
        for name in others
        for wrong, says in WRONG.get(name, [])
    ],
    ids=lambda each: each.__name__ if callable(each) else str(each) if isinstance(each, str | float | int) else "",
)
def test_every_argument_is_refused_in_its_own_name(formula: Any, given: dict[str, Any], name: str, wrong: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        formula(**(given | {name: wrong}))
    assert str(caught.value) == f"{name} is {wrong!r}; {says}"


def test_methods_are_refused_in_their_own_name() -> None:
    with pytest.raises(UsageError, match=r"^method is 'rumour'; known: prv, rdp$"):
        epsilon(noise_multiplier=1.0, method="rumour")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^method is 'rumour'; known: prv, rdp$"):
        noise_for(1.0, method="rumour")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^epsilon is -1; it must be a number above 0$"):
        noise_for(-1)


def test_noise_for_asks_the_method_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[Any, ...]] = set()

    def told(**given: Any) -> float:
        asked.add(tuple(given[name] for name in ("steps", "sampling_rate", "delta", "method")))
        return 1.0 / float(given["noise_multiplier"])

    monkeypatch.setattr("gradveil.proofs.accountant.epsilon", told)
    assert noise_for(0.5, steps=7, sampling_rate=0.2, delta=1e-3, method="prv") == pytest.approx(2.0, rel=1e-3)
    assert asked == {(7, 0.2, 1e-3, "prv")}


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_where_the_bound_can_be_worked_out_it_is(rate: float, steps: int) -> None:
    found = sampled_bound(0.1, noise_multiplier=0.8, sampling_rate=rate, steps=steps, samples=2000)
    if rate == 0 or steps == 0:
        assert (found.bound, found.estimate, found.samples, found.confidence) == (0.1, 0.1, 0, 1.0)
    elif rate == 1:
        assert found.bound == gaussian_bound(0.1, noise_multiplier=0.8, steps=steps)
    elif steps == 1:
        assert found.bound == pytest.approx(0.6 * 0.1 + 0.4 * gaussian_bound(0.1, noise_multiplier=0.8))
    else:
        assert found.samples == 1000
    silent = sampled_bound(0.1, noise_multiplier=0.0, sampling_rate=rate, steps=steps)
    assert silent.bound == pytest.approx(1 - 0.9 * (1 - rate) ** steps)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(300.0, 0.5, 1), (0.4, 0.01, 1), (2.0, 0.1, 50)])
def test_the_best_order_is_found_wherever_it_lies(sigma: float, rate: float, steps: int) -> None:
    """By a grid of orders finer than the one that is searched, and as wide; far noise is best told by the largest order."""
    delta = 1e-9
    bounds = []
    for place in range(153):
        order = 1 + 0.02 * math.exp(0.075 * place)
        if (order + 24 * sigma) * 16 / min(sigma, sigma**2) < 2e6:
            divergence = steps * sampled_gaussian_rdp(sigma, rate, order)
            bounds.append(divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))
    exact = gaussian_epsilon(math.sqrt(steps) / sigma, delta)
    found = epsilon(noise_multiplier=sigma, sampling_rate=rate, steps=steps, delta=delta)
    assert found == pytest.approx(max(0.0, min(exact, *bounds)), rel=5e-3, abs=1e-6)


@pytest.mark.parametrize("formula", [sampled_bound, sampled_advantage])
def test_unless_a_seed_is_given_draws_begin_at_zero(formula: Any) -> None:
    given = {name: value for name, value in SAMPLED.items() if name != "kappa" or formula is sampled_bound}
    assert formula(**given) == formula(**given, seed=Seed(0)) != formula(**given, seed=Seed(1))
    assert formula(**given).samples == SAMPLED["samples"] / 2
    assert formula(**given).estimate != formula(**given).bound


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_advantage_of_one_sampled_release_needs_no_draws(rate: float, steps: int) -> None:
    found = sampled_advantage(noise_multiplier=0.8, sampling_rate=rate, steps=steps, samples=2000)
    whole = advantage_bound(noise_multiplier=0.8, steps=steps)
    assert (found.samples, found.confidence) == (0, 1.0)
    assert found.bound == found.estimate == pytest.approx((rate if steps else 0.0) * whole)
    silent = sampled_advantage(noise_multiplier=0.0, sampling_rate=rate, steps=3)
    assert silent.bound == pytest.approx(1 - (1 - rate) ** 3) and silent.samples == 0


@pytest.mark.parametrize("formula", [sampled_bound, sampled_advantage])
@pytest.mark.parametrize(("samples", "confidence"), [(4000, 0.9), (5001, 0.99)])
def test_what_was_drawn_is_told(formula: Any, samples: int, confidence: float) -> None:
    given = {name: value for name, value in SAMPLED.items() if name != "kappa" or formula is sampled_bound}
    found = formula(**{**given, "samples": samples, "confidence": confidence})
    assert (found.samples, found.confidence) == (samples - samples // 2, confidence)
    assert found.estimate <= found.bound <= 1
    surer = formula(**{**given, "samples": samples, "confidence": 0.9999})
    assert surer.bound > found.bound and surer.estimate == found.estimate


@pytest.mark.parametrize("kappa", [0.01, 0.2])
def test_a_bound_by_draws_is_never_above_that_without_sampling(kappa: float) -> None:
    """Few draws have a margin so wide that the exact value without sampling is the better bound."""
    whole = gaussian_bound(kappa, noise_multiplier=1.5, steps=3)
    found = sampled_bound(kappa, noise_multiplier=1.5, sampling_rate=0.97, steps=3, samples=1000)
    assert found.bound == whole < 1 and kappa <= found.estimate <= whole


@pytest.mark.parametrize("formula", [sampled_bound, sampled_advantage])
def test_a_thousand_draws_are_enough_and_no_fewer(formula: Any) -> None:
    given = {name: value for name, value in SAMPLED.items() if name != "kappa" or formula is sampled_bound}
    assert formula(**{**given, "samples": 1000}).samples == 500
    with pytest.raises(UsageError, match=r"^samples is 999; a certified mean needs at least 1000 draws$"):
        formula(**{**given, "samples": 999})


@pytest.mark.parametrize("log_lambda", [-0.5, 0.0, 1.0])
def test_the_margin_of_a_mean_is_that_of_maurer_and_pontil(log_lambda: float) -> None:
    log_ratios, confidence = np.array([-1.0, 0.2, 0.7, 1.5, 2.0]), 0.9
    values = [max(0.0, 1 - math.exp(log_lambda - each)) for each in log_ratios]
    mean = sum(values) / 5
    variance = sum((left - right) ** 2 for left in values for right in values) / (2 * 5 * 4)
    wanted = math.sqrt(2 * variance * math.log(2 / 0.1) / 5) + 7 * math.log(2 / 0.1) / (3 * 4)
    assert bounds._excess(log_ratios, log_lambda, confidence) == pytest.approx((mean, wanted))
