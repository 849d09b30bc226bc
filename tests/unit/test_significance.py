"""The signed-rank test against scipy, and the daggers it earns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import wilcoxon

from gradveil.metrics import daggers, signed_rank


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
