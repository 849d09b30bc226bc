"""Intervals of shares, clusters, McNemar and the signed-rank test against scipy, and the daggers it earns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.stats import wilcoxon

from gradveil.metrics import daggers, signed_rank
from gradveil.significance import effective_number, exact_upper, fewest_to_show, mcnemar, wilson
from gradveil.study.measures import Share


@pytest.mark.parametrize("n", [1, 2, 5, 9, 20, 50])
def test_exact_against_scipy(n: int) -> None:
    random = np.random.default_rng(n)
    left, right = random.normal(size=n), random.normal(size=n) + 0.3
    expected = wilcoxon(left, right, method="exact")
    found = signed_rank(left.tolist(), right.tolist())
    assert found.statistic == pytest.approx(expected.statistic) and found.n == n
    assert found.p == pytest.approx(expected.pvalue, rel=1e-12)


@pytest.mark.parametrize("step", [1e-9, 0.5])
def test_many_pairs_against_scipy(step: float) -> None:
    """Without ties and with many."""
    random = np.random.default_rng(7)
    left, right = (np.round(random.normal(loc, size=200) / step) * step for loc in (0.2, 0.0))
    expected = wilcoxon(left, right, method="approx")
    found = signed_rank(left.tolist(), right.tolist())
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)


def test_few_tied_pairs_are_counted_out() -> None:
    """Differences 1, 1, -1, 2 have ranks 2, 2, 2, 4: of 16 signings 8 leave a sum of at most 2 on one side."""
    values = [1.0, 1.0, -1.0, 2.0]
    sums = [sum(r for r, keep in zip((2, 2, 2, 4), f"{code:04b}", strict=True) if keep == "1") for code in range(16)]
    expected = 2 * sum(total <= 2 for total in sums) / 16
    assert signed_rank(values, [0.0] * 4).p == pytest.approx(expected)


def test_equal_pairs_say_nothing() -> None:
    assert signed_rank([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert signed_rank([1.0, 2.0, 5.0], [1.0, 2.0, 4.0]).n == 1


@pytest.mark.parametrize(("left", "right"), [([], []), ([1.0], [1.0, 2.0]), ([float("nan")], [1.0])])
def test_what_cannot_be_paired_is_refused(left: list[float], right: list[float]) -> None:
    with pytest.raises(ValueError, match=r"signed-rank|paired"):
        signed_rank(left, right)


def test_daggers() -> None:
    records = [f"r{i}" for i in range(12)]
    base = {name: 20.0 + 0.1 * i for i, name in enumerate(records)}
    columns = {
        "none": base,
        "same": {name: value + (0.01 if i % 2 else -0.01) for i, (name, value) in enumerate(base.items())},
        "lower": {name: value - 5 - 0.01 * i for i, (name, value) in enumerate(base.items())},
    }
    assert daggers(columns, "none") == {"none": "", "same": "", "lower": "‡"}
    columns["as low"] = {name: value + (0.01 if i % 2 else -0.01) for i, (name, value) in enumerate(columns["lower"].items())}
    assert daggers(columns, "none") == {"none": "", "same": "", "lower": "†", "as low": "†"}
    assert daggers({"none": base, "lower": columns["lower"]}, "none")["lower"] == "†", "one other row is not all others"
    assert daggers(columns, "missing") == dict.fromkeys(columns, "")
    assert daggers({"none": base, "alien": {"x": 1.0}}, "none")["alien"] == "", "no record in common"


def test_golden() -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "metrics_shadow.json").read_text())["signed_rank"]
    case = golden["value"]
    found = signed_rank(case["left"], case["right"])
    assert found.statistic == case["statistic"]
    assert found.p == pytest.approx(case["p"], abs=golden["tolerance"])


@pytest.mark.parametrize(("count", "n"), [(0, 1), (0, 16), (0, 59), (1, 16), (7, 32), (15, 16), (64, 128), (3, 2000)])
def test_the_exact_upper_end_is_that_of_the_beta_distribution(count: int, n: int) -> None:
    """Clopper and Pearson: the 95 % quantile of a beta distribution with count + 1 and n - count."""
    assert exact_upper(count, n) == pytest.approx(float(stats.beta.ppf(0.95, count + 1, n - count)), abs=1e-9)


def test_all_hit_leaves_no_upper_end_below_one() -> None:
    assert exact_upper(5, 5) == 1.0


def test_a_fraction_of_a_record_errs_to_the_high_side() -> None:
    assert exact_upper(0, 8.9) == exact_upper(0, 8) and exact_upper(1.2, 9.0) == exact_upper(2, 9)


@pytest.mark.parametrize(("limit", "needed"), [(0.05, 59), (0.1, 29), (0.25, 11), (0.01, 299), (0.5, 5)])
def test_so_many_without_a_hit_show_a_limit_and_one_fewer_does_not(limit: float, needed: int) -> None:
    assert fewest_to_show(limit) == needed
    assert exact_upper(0, needed) <= limit < exact_upper(0, needed - 1)


def test_records_that_share_their_luck_are_worth_fewer() -> None:
    updates = [place // 4 for place in range(16)]
    alike = [1.0] * 8 + [0.0] * 8
    assert effective_number(alike, updates) == pytest.approx(3.0), "four updates, each all or nothing"
    mixed = [1.0, 0.0] * 8
    assert effective_number(mixed, updates) == 16, "clusters never make records worth more"
    assert effective_number([0.0] * 16, updates) == 4 == effective_number([1.0] * 16, updates), "nothing varies: count clusters"
    assert effective_number(alike) == 16 == effective_number(alike, range(16))
    assert effective_number(alike, [0] * 16) == 1, "one model, one draw"
    assert effective_number(alike, range(16), updates) == pytest.approx(3.0), "the clusters that leave least count"


def test_an_interval_with_clusters_covers_where_one_without_does_not() -> None:
    """Updates of four records that are hit together with probability .3: 95 % of intervals should hold .3."""
    rng = np.random.default_rng(0)
    clusters = [place // 4 for place in range(64)]
    held = {"clustered": 0, "plain": 0}
    for _ in range(400):
        hits = np.repeat(rng.random(16) < 0.3, 4).astype(float).tolist()
        worth, count = effective_number(hits, clusters), sum(hits)
        for name, size in (("clustered", worth), ("plain", 64.0)):
            low, high = wilson(count / 64 * size, size)
            held[name] += low <= 0.3 <= high
    assert held["clustered"] / 400 > 0.9 and held["plain"] / 400 < 0.75


def test_mcnemar_is_the_sign_test_of_who_alone_hits() -> None:
    first, second = [True] * 9 + [False] * 3 + [True] * 20, [False] * 9 + [True] * 2 + [False] + [True] * 20
    assert mcnemar(first, second) == pytest.approx(float(stats.binomtest(2, 11, 0.5).pvalue))
    assert mcnemar(first, second) == mcnemar(second, first) and mcnemar(first, first) == 1.0


def test_mcnemar_counts_a_cluster_once() -> None:
    first, second = [True] * 8, [False] * 8
    assert mcnemar(first, second) == pytest.approx(2 / 2**8)
    assert mcnemar(first, second, [0, 0, 0, 0, 1, 1, 1, 1]) == 0.5, "two updates cannot show anything"


@pytest.mark.parametrize(("limit", "share"), [(0.05, 0.02), (0.25, 0.1), (0.25, 0.125), (0.6, 0.5)])
def test_with_hits_it_takes_more_records(limit: float, share: float) -> None:
    needed = fewest_to_show(limit, share)
    assert needed is not None
    ends = [exact_upper(np.ceil(share * n - 1e-9), n) for n in range(1, needed + 1)]
    assert ends[-1] <= limit < min(ends[:-1]), "with whole hits 29 records can show what 33 cannot"


def test_no_number_of_records_shows_what_is_not_so() -> None:
    assert fewest_to_show(0.05, 0.05) is None and fewest_to_show(0.0) is None and fewest_to_show(0.05, 0.0499999) is None


@pytest.mark.parametrize(("clusters", "each"), [(16, 8), (8, 8), (40, 3), (5, 2)])
def test_one_hit_more_shows_no_less_of_a_leak(clusters: int, each: int) -> None:
    """No hit of 128 records in 16 updates could be 19 %, and one hit, that saw a variance, 4 %: more hits passed a gate."""
    names, highs, lows = [place // each for place in range(clusters * each)], [], []
    for hits in range(clusters + 1):
        hit = [float(place % each == 0 and place // each < hits) for place in range(clusters * each)]
        few, most = hit, [1 - one for one in hit]
        highs.append(Share.of(int(sum(few)), len(few), effective=effective_number(few, names)).high)
        lows.append(Share.of(int(sum(most)), len(most), effective=effective_number(most, names)).low)
    assert min(highs) >= highs[0] - 1e-6 and max(lows) <= lows[0] + 1e-6
    half = [float(place % 2) for place in range(clusters * each)]
    if each % 2 == 0:
        assert effective_number(half, names) == len(half), "half of each: nothing is shared, and that is seen"
