"""Distances with few passes over memory are the plain ones, in value and in both derivatives, for one and for many candidates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from gradveil.attacks.engine.lean_distances import squared_distance, unit_distance
from gradveil.attacks.engine.objectives import OBJECTIVES, TINY
from gradveil.randomness import Seed
from gradveil.records import Comparison

GENERATOR = Seed(0).generator("lean")
LEFT = [torch.randn((5, *shape), generator=GENERATOR, dtype=torch.float64) for shape in ((4, 3), (7,), ())]
RIGHT = [value + 0.3 * torch.randn(value.shape, generator=GENERATOR, dtype=torch.float64) for value in LEFT]


def objective(name: str) -> Callable[..., Tensor]:
    def distance(*both: Tensor) -> Tensor:
        left, right = both[: len(both) // 2], both[len(both) // 2 :]
        named = [{str(i): value for i, value in enumerate(side)} for side in (left, right)]
        return OBJECTIVES.get(name)(Comparison(simulated=named[0], observed=named[1]))

    return distance


def lean_cosine(*both: Tensor) -> Tensor:
    return unit_distance(both[: len(both) // 2], both[len(both) // 2 :], TINY)


@pytest.mark.parametrize("arguments", [(0, 1, 2), (3, 4, 5), (0, 3), (0, 1, 2, 3, 4, 5)])
def test_the_cosine_and_its_derivatives_agree_for_many_candidates(arguments: tuple[int, ...]) -> None:
    slopes, values = vmap(grad_and_value(objective("cosine"), argnums=arguments))(*LEFT, *RIGHT)
    lean_slopes, lean_values = vmap(grad_and_value(lean_cosine, argnums=arguments))(*LEFT, *RIGHT)
    torch.testing.assert_close(lean_values, values)
    torch.testing.assert_close(lean_slopes, slopes)


@pytest.mark.parametrize("arguments", [(0,), (1,), (0, 1)])
def test_the_squared_distance_and_its_derivatives_agree(arguments: tuple[int, ...]) -> None:
    slopes, values = vmap(grad_and_value(objective("l2"), argnums=arguments))(LEFT[0], RIGHT[0])
    lean_slopes, lean_values = vmap(grad_and_value(squared_distance, argnums=arguments))(LEFT[0], RIGHT[0])
    torch.testing.assert_close(lean_values, values)
    torch.testing.assert_close(lean_slopes, slopes)


def test_small_angles_keep_their_digits_in_single_precision() -> None:
    left = torch.randn(10_000, generator=Seed(1).generator("left"))
    right = left + 1e-4 * torch.randn(10_000, generator=Seed(1).generator("right"))
    exact = unit_distance([left.double()], [right.double()], TINY)
    assert float(unit_distance([left], [right], TINY)) == pytest.approx(float(exact), rel=1e-3)


def test_silent_updates_give_finite_answers() -> None:
    zero, some = torch.zeros(3), torch.ones(3)
    for left, right in ((zero, some), (some, zero), (zero, zero)):
        slope, value = grad_and_value(lean_cosine)(left.double(), right.double())
        plain = grad_and_value(objective("cosine"))(left.double(), right.double())
        torch.testing.assert_close((slope, value), plain)
    slope, value = grad_and_value(squared_distance)(some, some)
    assert float(value) == 0 and not bool(slope.any())
