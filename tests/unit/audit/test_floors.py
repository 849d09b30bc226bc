"""The floor under the mean error of a cell: where there is one, that it is the formula, and that no attacker gets below it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from gradveil.audit import floors
from gradveil.audit.certified import certify
from gradveil.audit.floors import SMOOTHING, as_floor, mean_error_of_cell
from gradveil.audit.scene import build_subject
from gradveil.randomness import Seed
from gradveil.risk.mean_error import MeanErrorBound, mean_error_bound, smoothed_score
from gradveil.spectra.jacobians import jacobian_of
from gradveil.study.codec import encode
from tests.unit.audit.small import CELL, few_digits, make_subject

NOISY = "gaussian_noise(std=0.05)"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"defense": "none"}, "no Gaussian noise"),
        ({"defense": "laplace_noise(scale=0.1)"}, "no Gaussian noise"),
        ({"defense": "gaussian_noise(std=0.0)"}, "no Gaussian noise"),
        ({"defense": "pruning(rate=0.5) + gaussian_noise(std=0.1)"}, "after nothing but clipping"),
        ({"defense": "gaussian_noise(std=0.1) + clipping(bound=1)"}, "after nothing but clipping"),
        ({"batch_size": 2}, "one record in one update"),
        ({"rounds": 2}, "one record in one update"),
        ({"defense": "dp_sgd(noise_multiplier=1.0)", "local_steps": 2}, "bends the path"),
    ],
)
def test_without_a_smooth_gaussian_law_there_is_a_reason(changes: dict[str, Any], reason: str) -> None:
    found = mean_error_of_cell(make_subject(**{"defense": NOISY, **changes}))
    assert found.mse is None and reason in found.reason
    assert encode(found) == {"mse": None, "reason": found.reason}


def test_a_model_that_has_seen_the_records_has_no_floor() -> None:
    cell = CELL.replace(defense=NOISY, state="trained(steps=2)")
    assert "trained on the audited records" in mean_error_of_cell(build_subject(cell, few_digits(), 0)).reason
    assert mean_error_of_cell(make_subject(defense=NOISY, state="trained(steps=2)")).mse is not None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"defense": "clipping(bound=0.5) + gaussian_noise(std=0.05)"},
        {"defense": "dp_sgd(noise_multiplier=0.1)"},
        {"local_steps": 2, "learning_rate": 1.0},
    ],
)
def test_the_floor_has_an_interval_and_lies_below_the_prior(changes: dict[str, Any]) -> None:
    found = mean_error_of_cell(make_subject(**{"defense": NOISY, **changes}))
    assert found.mse is not None and found.low is not None and found.high is not None
    assert 0 < found.low < found.mse < found.high
    assert found.mse < SMOOTHING**2
    told = encode(found)
    assert told["psnr"] == pytest.approx(-10 * math.log10(found.low)) and told["n"] == 32
    json.dumps(told, allow_nan=False)


def test_more_noise_raises_the_floor_up_to_what_the_prior_leaves() -> None:
    values = [mean_error_of_cell(make_subject(defense=f"gaussian_noise(std={std})")).mse or 0.0 for std in (0.01, 0.1, 1e3)]
    assert values[0] < values[1] < values[2] == pytest.approx(SMOOTHING**2, rel=1e-3)


def test_the_trace_is_looser_than_the_matrix_and_both_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = mean_error_of_cell(make_subject(defense=NOISY))
    monkeypatch.setattr(floors, "DENSE_ENTRIES", 0)
    trace = mean_error_of_cell(make_subject(defense=NOISY))
    assert matrix.mse is not None and trace.mse is not None
    assert (matrix.form, trace.form) == ("matrix", "trace")
    assert trace.mse < matrix.mse


def test_the_trace_is_estimated_without_bias() -> None:
    matrix = torch.randn((30, 20), generator=Seed(3).generator("matrix"))
    jacobian = jacobian_of(lambda x: matrix @ x, torch.zeros(20), dtype=torch.float32)
    found = [floors._trace(jacobian, Seed(index)) for index in range(400)]
    assert sum(found) / len(found) == pytest.approx(float(matrix.square().sum()), rel=0.02)


def test_the_best_linear_attacker_of_a_linear_release_meets_the_floor() -> None:
    """With a Gaussian prior of width τ alone the floor is its posterior variance, which the ridge estimate reaches."""
    generator = Seed(5).generator("attack")
    std, size = 0.05, 6
    matrix = torch.randn((12, size), generator=generator, dtype=torch.float64)
    gram = (matrix.T @ matrix).numpy()
    bound = mean_error_bound([gram, gram], noise_std=std, score=smoothed_score(size, SMOOTHING))
    x = SMOOTHING * torch.randn((20000, size), generator=generator, dtype=torch.float64)
    sent = x @ matrix.T + std * torch.randn((20000, 12), generator=generator, dtype=torch.float64)
    ridge = torch.linalg.solve(matrix.T @ matrix / std**2 + torch.eye(size) / SMOOTHING**2, matrix.T @ sent.T / std**2).T
    reached = float((ridge - x).square().mean())
    assert reached == pytest.approx(bound.value, rel=0.03)


def test_it_is_part_of_the_certificate_even_where_nothing_else_is_certified() -> None:
    found = certify(make_subject(defense=NOISY))
    assert found.identified is None and found.floor is not None and (found.floor.mse or 0.0) > 0
    assert certify(make_subject()).floor is None


def test_a_floor_of_zero_has_no_psnr() -> None:
    assert as_floor(MeanErrorBound(0.0, 0.0, 0.0, 2, "trace", 0.95), 0.1).psnr is None
