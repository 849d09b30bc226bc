"""Adam is written once; each of its users still gets the bits of the formula it wrote down before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradveil.attacks.engine.optimisers import SEARCHING
from gradveil.defenses.refiner.refinement import RULE
from gradveil.federation.server import FED_ADAM
from gradveil.learning.adam import USUAL, AdamRule, AdamStep, adam_step
from gradveil.learning.learner import DIFFERENTIABLE

STEPS, RATE = 7, 0.03
Formula = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def client(g: Tensor, mean: Tensor, square: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g.square()
    first, second = 1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)
    return RATE * (mean / first) / ((square / second + 1e-24).sqrt() + 1e-8), mean, square


def shadow(g: Tensor, mean: Tensor, square: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g.square()
    return RATE * (mean / (1 - 0.9 ** (step + 1))) / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8), mean, square


def refiner(g: Tensor, mean: Tensor, square: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g.square()
    return RATE * ((mean / (1 - 0.9 ** (step + 1))) / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12)), mean, square


def attacker(g: Tensor, mean: Tensor, square: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, square = mean.lerp(g, 0.1), square.lerp(g.square(), 0.001)
    corrected = mean / (1 - 0.9 ** (step + 1))
    return RATE * corrected / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12), mean, square


def server(g: Tensor, mean: Tensor, square: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, square = 0.9 * mean + (1 - 0.9) * g, 0.99 * square + (1 - 0.99) * g.square()
    return RATE * mean / (square.sqrt() + 1e-3), mean, square


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("formula", "rule"),
    [(client, DIFFERENTIABLE), (shadow, USUAL), (refiner, RULE), (attacker, SEARCHING), (server, FED_ADAM)],
    ids=lambda value: getattr(value, "__name__", "rule"),
)
def test_every_user_keeps_its_bits(formula: Formula, rule: AdamRule, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    mean = square = torch.zeros(4000, dtype=dtype)
    found = AdamStep(mean, mean, square)
    for step in range(STEPS):
        gradient = torch.randn(4000, generator=generator, dtype=dtype) * torch.logspace(-9, 3, 4000, dtype=dtype)
        gradient[:10] = 0
        wanted, mean, square = formula(gradient, mean, square, step)
        rate = None if rule is RULE else RATE
        found = adam_step(gradient, found.mean, found.square, step, rate=rate, rule=rule)
        move = RATE * found.move if rate is None else found.move
        assert torch.equal(move, wanted) and torch.equal(found.mean, mean) and torch.equal(found.square, square)


def test_it_is_torchs_adam() -> None:
    generator = torch.Generator().manual_seed(4)
    theirs = torch.randn(50, generator=generator, dtype=torch.float64).requires_grad_()
    ours, mean, square = theirs.detach().clone(), torch.zeros_like(theirs), torch.zeros_like(theirs)
    optimiser = torch.optim.Adam([theirs], lr=RATE)
    for step in range(STEPS):
        theirs.grad = torch.randn(50, generator=generator, dtype=torch.float64)
        move, mean, square = adam_step(theirs.grad, mean, square, step, rate=RATE)
        optimiser.step()
        ours = ours - move
    assert torch.allclose(ours, theirs.detach(), rtol=0, atol=1e-12)


def test_a_client_that_is_replayed_has_a_finite_derivative_where_its_gradient_is_zero() -> None:
    gradient = torch.zeros(3, requires_grad=True)
    zeros = torch.zeros(3)
    (slope,) = torch.autograd.grad(adam_step(gradient, zeros, zeros, 0, rate=RATE, rule=DIFFERENTIABLE).move.sum(), gradient)
    assert bool(torch.isfinite(slope).all())
