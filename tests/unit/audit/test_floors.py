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
from gradveil.audit.scene import Subject, build_subject
from gradveil.learning import Learner, loss_by_name
from gradveil.randomness import Seed
from gradveil.risk.mean_error import MeanErrorBound, mean_error_bound, smoothed_score
from gradveil.spectra.jacobians import gradient_jacobian, jacobian_of
from gradveil.study.codec import encode
from tests.unit.audit.small import CELL, few_digits, make_subject

NOISY = "gaussian_noise(std=0.05)"
SMOOTH = "mlp(hidden=16, activation='sigmoid')"


def smooth_subject(**changes: Any) -> Subject:
    return make_subject(**{"model": SMOOTH, "defense": NOISY, **changes})


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
    found = mean_error_of_cell(smooth_subject(**changes))
    assert found.mse is None and reason in found.reason
    assert encode(found) == {"mse": None, "reason": found.reason}


def test_a_model_that_has_seen_the_records_has_no_floor() -> None:
    cell = CELL.replace(model=SMOOTH, defense=NOISY, state="trained(steps=2)")
    assert "trained on the audited records" in mean_error_of_cell(build_subject(cell, few_digits(), 0)).reason
    assert mean_error_of_cell(smooth_subject(state="trained(steps=2)")).mse is not None


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
    found = mean_error_of_cell(smooth_subject(**changes))
    assert found.mse is not None and found.low is not None and found.high is not None
    assert 0 < found.low < found.mse < found.high
    assert found.mse < SMOOTHING**2
    told = encode(found)
    assert told["psnr"] == pytest.approx(-10 * math.log10(found.low)) and told["n"] == 32
    json.dumps(told, allow_nan=False)


def test_more_noise_raises_the_floor_up_to_what_the_prior_leaves() -> None:
    values = [mean_error_of_cell(smooth_subject(defense=f"gaussian_noise(std={std})")).mse or 0.0 for std in (0.01, 0.1, 1e3)]
    assert values[0] < values[1] < values[2] == pytest.approx(SMOOTHING**2, rel=1e-3)


def test_the_trace_is_looser_than_the_matrix_and_both_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = mean_error_of_cell(smooth_subject())
    monkeypatch.setattr(floors, "DENSE_ENTRIES", 0)
    trace = mean_error_of_cell(smooth_subject())
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
    found = certify(smooth_subject())
    assert found.identified is None and found.floor is not None and (found.floor.mse or 0.0) > 0
    assert certify(make_subject()).floor is None


def test_a_floor_of_zero_has_no_psnr() -> None:
    assert as_floor(MeanErrorBound(0.0, 0.0, 0.0, 2, "trace", 0.95), 0.1).psnr is None


@pytest.mark.parametrize("model", ["mlp(hidden=16)", "lenet(activation='leaky_relu')", "convnet(width=4, activation='tanh')"])
def test_a_network_with_kinks_has_no_floor(model: str) -> None:
    found = mean_error_of_cell(make_subject(model=model, defense=NOISY))
    assert found.mse is None and found.reason.startswith("no floor: the network has kinks")


class Thermometer(torch.nn.Module):
    """Compares every entry with many thresholds: the gradient of the biases says which are passed, and its derivative nothing."""

    def __init__(self, activation: torch.nn.Module, entries: int = 4, steps: int = 40) -> None:
        super().__init__()
        hidden = entries * steps
        self.first, self.activation, self.last = torch.nn.Linear(entries, hidden), activation, torch.nn.Linear(hidden, 2)
        with torch.no_grad():  # inputs and hidden values are small, so that gradients of weights carry next to nothing
            self.first.weight.copy_(torch.eye(entries).repeat_interleave(steps, 0))
            self.first.bias.copy_(SMALL * -torch.linspace(0.2, 0.8, steps).repeat(entries))
            self.last.weight.copy_(torch.stack([torch.ones(hidden), -torch.ones(hidden)]))
            self.last.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.activation(self.first(SMALL * x.flatten(1))))
        return out


SMALL = 1e-3


def floor_and_attack(activation: torch.nn.Module, std: float) -> tuple[float, float]:
    """Return what the formula says, and what a linear estimate from the noisy gradient reaches on inputs it was not fitted to."""
    learner = Learner.of(Thermometer(activation), loss_by_name("cross_entropy"))
    generator = Seed(9).generator("thermometer")
    inputs = 0.5 + SMOOTHING * torch.randn((1200, 4), generator=generator)
    biases = torch.func.vmap(lambda x: learner.update(x.unsqueeze(0), torch.tensor([0]))["first.bias"])(inputs)
    noisy = biases + std * torch.randn(biases.shape, generator=generator)
    seen = torch.cat([noisy, torch.ones(1200, 1)], 1).double()
    normal = seen[:1000].T @ seen[:1000] + torch.eye(161, dtype=torch.float64)
    fitted = torch.linalg.solve(normal, seen[:1000].T @ inputs[:1000].double())
    reached = float((seen[1000:] @ fitted - inputs[1000:]).square().mean())
    grams = []
    for x in inputs[:32]:
        columns = gradient_jacobian(learner, x, torch.tensor(0)).push(torch.eye(4, dtype=torch.float64))
        grams.append((columns @ columns.T).numpy())
    return mean_error_bound(grams, noise_std=std, score=smoothed_score(4, SMOOTHING)).value, reached


def test_kinks_break_the_formula_and_a_smooth_network_keeps_it() -> None:
    """So the refusal is no caution: on ReLU the attacker is below what the formula calls the least error."""
    floor, reached = floor_and_attack(torch.nn.ReLU(), 0.1)
    assert reached < 0.5 * floor
    floor, reached = floor_and_attack(torch.nn.Softplus(beta=3e4), 0.1)
    assert reached > floor
