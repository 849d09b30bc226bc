"""The regression is the textbook's: the posterior mean of a linear-Gaussian model, chosen by errors on what was left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradveil.attacks.engine.regression import COLUMNS, STRENGTHS, WEIGHINGS, fit_regression, held_out_errors
from gradveil.attacks.engine.sketches import Sketcher
from gradveil.errors import UsageError

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "attacks.json").read_text())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def folds_of(count: int) -> Tensor:
    return torch.arange(count) % 4


def test_of_a_linear_client_of_full_rank_the_input_comes_back() -> None:
    golden = GOLDEN["kernel_regression_error"]
    mixing, inputs = drawn(9, 6, seed=1), drawn(40, 6, seed=2)
    fit = fit_regression(inputs @ mixing.T, inputs, folds_of(40), [slice(0, 9)])
    fresh = drawn(5, 6, seed=3)
    assert float((fit.predict(fresh @ mixing.T) - fresh).abs().max()) < golden["value"]
    assert fit.strength == min(STRENGTHS) and fit.error < 1e-6 * fit.spread


@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_the_ridge_is_the_posterior_mean_under_the_covariance_of_the_examples(noise: float) -> None:
    """``mu + S Aᵀ (A S Aᵀ + s² I)⁻¹ (g - A mu)``: the examples are sent without noise, and lambda is N s²."""
    mixing, inputs = drawn(7, 5, seed=4), drawn(30, 5, seed=5) + 2
    fit = fit_regression(inputs @ mixing.T, inputs, folds_of(30), [slice(0, 7)])
    mean, apart = inputs.mean(0), inputs - inputs.mean(0)
    covariance = apart.T @ apart / 30
    scaled = mixing * fit.scale[:, None]
    gram = (apart @ scaled.T) @ (apart @ scaled.T).T
    variance = fit.strength * float(gram.diagonal().sum()) / 29 / 30
    seen = mixing @ (drawn(5, seed=6) + 2) + noise * drawn(7, seed=7)
    gain = covariance @ scaled.T @ torch.linalg.inv(scaled @ covariance @ scaled.T + variance * torch.eye(7))
    expected = mean + gain @ ((seen - mixing @ mean) * fit.scale)
    assert torch.allclose(fit.predict(seen[None])[0], expected, rtol=1e-6, atol=1e-8)


def test_errors_of_what_is_left_out_are_those_of_leaving_it_out() -> None:
    features, outputs = drawn(20, 12, seed=8) + 3, drawn(20, 4, seed=9) - 1
    folds = torch.tensor([0, 0, 1, 2, 1] * 4)
    apart = features - features.mean(0)
    strength = 0.37 * float(apart.square().sum()) / 19
    total = 0.0
    for fold in range(3):
        held, kept = folds == fold, folds != fold
        centre, mean = features[kept].mean(0), outputs[kept].mean(0)
        known = features[kept] - centre
        weights = torch.linalg.solve(
            known.T @ known + strength * torch.eye(12, dtype=torch.float64), known.T @ (outputs[kept] - mean)
        )
        answer = mean + (features[held] - centre) @ weights
        total += float((answer - outputs[held]).square().sum())
    found = held_out_errors(features @ features.T, outputs @ outputs.T / 4, folds, (0.37,))
    assert float(found) == pytest.approx(total / 20 / 4, rel=1e-9)


def test_the_weighing_that_left_out_examples_ask_for_is_taken() -> None:
    """Where one loud entry says nothing, entries alike are chosen; where all is noise, answers stay at the mean."""
    inputs, mixing = drawn(120, 4, seed=10), drawn(30, 4, seed=11)
    quiet = inputs @ mixing.T
    loud = torch.cat([1e4 * drawn(120, 3, seed=12), quiet], 1)
    fit = fit_regression(loud, inputs, folds_of(120), [slice(0, 33)])
    assert fit.weighing == "entries" and fit.error < 0.05 * fit.spread
    apart = fit_regression(loud, inputs, folds_of(120), [slice(0, 3), slice(3, 33)])
    assert apart.error < 0.05 * apart.spread
    lost = fit_regression(drawn(120, 30, seed=13), inputs, folds_of(120), [slice(0, 30)])
    assert lost.error > 0.9 * lost.spread
    assert float((lost.predict(drawn(20, 30, seed=14)) - lost.mean).square().mean()) < 0.3
    assert {fit.weighing, apart.weighing, lost.weighing} <= set(WEIGHINGS)


def test_what_never_moves_counts_nothing() -> None:
    features = torch.cat([drawn(40, 5, seed=15), torch.full((40, 4), 7.0, dtype=torch.float64)], 1)
    fit = fit_regression(features, features[:, :2], folds_of(40), [slice(0, 5), slice(5, 9)])
    again = features[:3].clone()
    again[:, 5:] += 1e-9
    assert torch.allclose(fit.predict(again), features[:3, :2], atol=1e-4)


def test_wide_features_are_summed_block_by_block() -> None:
    features = drawn(24, 2 * COLUMNS + 3, seed=16)
    fit = fit_regression(features, features[:, :3], folds_of(24), [slice(0, features.shape[1])])
    gram = ((features - features.mean(0)) * fit.scale) @ ((features - features.mean(0)) * fit.scale).T
    unit = float(gram.diagonal().sum()) / 23
    dual = torch.linalg.solve(gram + fit.strength * unit * torch.eye(24), features[:, :3] - features[:, :3].mean(0))
    assert torch.allclose(fit.predict(features[:2]), features[:, :3].mean(0) + gram[:2] @ dual, atol=1e-8)


def test_one_fold_is_refused() -> None:
    with pytest.raises(UsageError, match="teach no regression"):
        fit_regression(drawn(5, 3), drawn(5, 2), torch.zeros(5), [slice(0, 3)])


def test_small_updates_are_kept_whole() -> None:
    many = {"a": drawn(6, 3, 5), "b": drawn(6, 4, seed=1)}
    sketcher = Sketcher.of({name: value[0] for name, value in many.items()}, 19)
    assert torch.equal(sketcher.rows(many), torch.cat([value.flatten(1) for value in many.values()], 1))
    assert sketcher.parts == [slice(0, 15), slice(15, 19)] and not sketcher.signs


def test_sketches_keep_gram_matrices() -> None:
    """A deviation of about one over the root of the width, and no bias: the mean over seeds is nearer than any one."""
    common = drawn(1, 40_000, seed=2)
    many = {"large": (drawn(8, 40_000, seed=1) + common).reshape(8, 200, 200), "small": drawn(8, 30, seed=3)}
    exact = sum((value.flatten(1) @ value.flatten(1).T for value in many.values()), torch.zeros(8, 8))
    size = exact.diagonal().sqrt()
    errors = []
    for seed in range(6):
        sketcher = Sketcher.of({name: value[0] for name, value in many.items()}, 4030, seed)
        rows = sketcher.rows(many)
        assert rows.shape == (8, 4030) and torch.equal(rows[:, sketcher.parts[1]], many["small"])
        errors.append((rows @ rows.T - exact) / (size[:, None] * size))
    assert all(float(error.abs().max()) < 5 / 4000**0.5 for error in errors)
    assert float(torch.stack(errors).mean(0).abs().mean()) < 0.6 * float(torch.stack(errors).abs().mean())
    again = Sketcher.of({name: value[0] for name, value in many.items()}, 4030, 0)
    assert torch.equal((again.rows(many) @ again.rows(many).T - exact) / (size[:, None] * size), errors[0])
