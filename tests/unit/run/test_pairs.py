"""Means over seeds and differences of pairs, against numbers worked out by hand and by scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from gradveil.run.pairs import pair_up, t_interval
from gradveil.study.measures import Estimate


def test_the_interval_is_student_t() -> None:
    values = [0.61, 0.64, 0.58, 0.66]
    found = t_interval(values)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert found.n == 4
    assert [found.value, found.low, found.high] == pytest.approx([0.6225, low, high])


def test_three_seeds_by_hand() -> None:
    # mean 0.6, standard deviation 0.1, t(2) = 4.3027
    found = t_interval([0.5, 0.6, 0.7])
    assert found.high == pytest.approx(0.6 + 4.3027 * 0.1 / 3**0.5, abs=1e-4)
    assert t_interval([0.5, 0.6, 0.7], most=0.65).high == 0.65


def test_one_seed_has_no_interval() -> None:
    assert (t_interval([0.5]).low, t_interval([0.5]).high) == (None, None)


def width(found: Estimate) -> float:
    assert found.low is not None and found.high is not None
    return found.high - found.low


def test_pairs_remove_what_the_seed_decides() -> None:
    undefended = {0: 0.5, 1: 0.7, 2: 0.9}
    found = pair_up({seed: value - 0.1 for seed, value in undefended.items()}, undefended)
    assert found["difference"].value == pytest.approx(-0.1)
    assert width(found["difference"]) < 1e-9
    assert width(found["accuracy"]) > 0.5
    assert found["pmm"].value == pytest.approx((0.8 + 6 / 7 + 8 / 9) / 3)


def test_only_seeds_on_both_sides_count() -> None:
    found = pair_up({0: 0.4, 1: 0.5}, {1: 0.6, 2: 0.9})
    assert found["difference"].value == pytest.approx(-0.1) and found["difference"].n == 1
    with pytest.raises(ValueError, match="no seed"):
        pair_up({0: 0.4}, {1: 0.6})


def test_no_ratio_to_nothing() -> None:
    assert "pmm" not in pair_up({0: 0.4}, {0: 0.0})


def test_the_interval_covers_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    hits = [(found := t_interval(random.normal(0.0, 1.0, 3).tolist())).low <= 0 <= found.high for _ in range(2000)]  # type: ignore[operator]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.015)
