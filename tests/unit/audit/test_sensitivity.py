"""The fitted d': known values, and that it comes back from ranks of Gaussian scores."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from gradveil.audit.sensitivity import first_among, fit_sensitivity, rank_probabilities


def drawn_ranks(d: float, size: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    others = torch.randn(count, size - 1, generator=generator, dtype=torch.float64)
    own = d + torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return (1 + (others >= own).sum(1)).tolist()


@pytest.mark.parametrize("d", [-1.0, 0.0, 0.7, 3.0])
def test_probabilities_of_all_ranks_add_up_and_two_candidates_have_the_closed_form(d: float) -> None:
    assert rank_probabilities(range(1, 31), [30] * 30, d).sum() == pytest.approx(1.0, abs=1e-9)
    assert first_among(2, d) == pytest.approx(stats.norm.cdf(d / math.sqrt(2)), abs=1e-9)


def test_without_sensitivity_every_rank_is_as_likely() -> None:
    assert rank_probabilities([1, 100, 256], [256] * 3, 0.0) == pytest.approx([1 / 256] * 3)
    assert first_among(10**6, 0.0) == pytest.approx(1e-6, rel=1e-4)


@pytest.mark.parametrize(("d", "size"), [(0.5, 256), (2.0, 64), (3.5, 256)])
def test_the_fit_finds_the_d_that_scores_were_drawn_with_and_foretells_other_lists(d: float, size: int) -> None:
    found = fit_sensitivity(drawn_ranks(d, size, 400), [size] * 400)
    assert found.d is not None and found.low is not None and found.high is not None
    assert found.low < d < found.high and found.high - found.low < 0.5
    elsewhere = drawn_ranks(d, 1000, 1000)
    assert found.at["1000"] == pytest.approx(sum(rank == 1 for rank in elsewhere) / 1000, abs=0.1)
    assert list(found.at) == ["2", "10", "100", "1000", "1000000"]
    assert sorted(found.at.values(), reverse=True) == list(found.at.values())


def test_lists_of_several_sizes_are_fitted_together() -> None:
    ranks = drawn_ranks(1.5, 20, 300) + drawn_ranks(1.5, 200, 300)
    found = fit_sensitivity(ranks, [20] * 300 + [200] * 300)
    assert found.low is not None and found.high is not None and found.low < 1.5 < found.high


def test_always_first_has_a_lower_end_alone_which_rises_with_the_records() -> None:
    few, many = fit_sensitivity([1] * 8, [256] * 8), fit_sensitivity([1] * 64, [256] * 64)
    assert few.d is None and few.high is None and few.low is not None and many.low is not None
    assert few.low < many.low
    assert first_among(256, few.low) ** 8 == pytest.approx(math.exp(-stats.chi2.ppf(0.95, 1) / 2), rel=1e-3)
    assert few.at["100"] == pytest.approx(first_among(100, few.low))


def test_always_last_is_below_zero() -> None:
    found = fit_sensitivity([64] * 5, [64] * 5)
    assert found.d is not None and found.d < -1


def test_records_that_share_their_luck_make_a_wider_interval() -> None:
    ranks, sizes = [1, 2, 1, 5, 3, 1, 9, 2] * 4, [16] * 32
    alone, shared = fit_sensitivity(ranks, sizes), fit_sensitivity(ranks, sizes, worth=8.0)
    assert alone.d == pytest.approx(shared.d, abs=1e-3)
    assert alone.low and alone.high and shared.low and shared.high
    assert (shared.high - shared.low) / (alone.high - alone.low) == pytest.approx(2, rel=0.1)
