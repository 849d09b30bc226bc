"""Intervals against published values and simulation, and the form of a summary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.errors import UsageError
from gradveil.metrics import Unavailable, bootstrap_median, summarise, wilson
from gradveil.randomness import Seed
from gradveil.study.codec import decode, encode
from gradveil.study.measures import Quality, Summary

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "metrics.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["wilson"]["value"], ids=lambda case: f"{case['count']}-of-{case['n']}")
def test_wilson_equals_scipy(case: dict[str, float]) -> None:
    low, high = wilson(int(case["count"]), int(case["n"]))
    assert low == pytest.approx(case["low"], abs=GOLDEN["wilson"]["tolerance"])
    assert high == pytest.approx(case["high"], abs=GOLDEN["wilson"]["tolerance"])


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999, 1 - 1e-4 / 3])
def test_wilson_is_the_formula_of_the_textbook(confidence: float) -> None:
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    for n in (*range(1, 34), 64, 128, 1000):
        for count in {*range(0, n + 1, max(1, n // 20)), n}:
            share, scale = count / n, 1 + z * z / n
            centre = (share + z * z / (2 * n)) / scale
            half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
            assert wilson(count, n, confidence) == pytest.approx((centre - half, centre + half), abs=1e-12)
        assert wilson(0, n)[0] == 0 and wilson(n, n)[1] == 1, "exactly, not up to rounding"


@settings(deadline=None)
@given(st.integers(1, 500), st.floats(0, 1), st.floats(0.5, 0.999))
def test_wilson_holds_the_share_inside_the_unit_interval(n: int, share: float, confidence: float) -> None:
    count = round(share * n)
    low, high = wilson(count, n, confidence)
    assert 0.0 <= low <= count / n <= high <= 1.0
    assert low < high


@pytest.mark.parametrize(("count", "n", "confidence"), [(1, 0, 0.95), (3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_wilson_refuses_what_is_no_share(count: int, n: int, confidence: float) -> None:
    with pytest.raises(UsageError, match="no share"):
        wilson(count, n, confidence)


def test_bootstrap_repeats_and_differs_by_seed() -> None:
    values = np.random.default_rng(0).normal(size=40)
    assert bootstrap_median(values, Seed(1)) == bootstrap_median(values, Seed(1))
    assert bootstrap_median(values, Seed(1)) != bootstrap_median(values, Seed(2))


def test_bootstrap_of_one_value_is_that_value() -> None:
    assert bootstrap_median([3.5], Seed(0)) == (3.5, 3.5)


def test_bootstrap_covers_the_true_median() -> None:
    generator = np.random.default_rng(5)
    covered = 0
    for trial in range(200):
        low, high = bootstrap_median(generator.normal(size=31), Seed(trial), resamples=300)
        covered += low <= 0.0 <= high
    # 95 % nominal; the percentile bootstrap of a median is close to it at n = 31.
    assert 0.89 <= covered / 200 <= 0.99


def test_bootstrap_refuses_what_it_cannot_resample() -> None:
    with pytest.raises(UsageError, match="finite"):
        bootstrap_median([1.0, math.nan], Seed(0))
    with pytest.raises(UsageError, match="at least one"):
        bootstrap_median([], Seed(0))


def test_summary_has_the_form_of_the_results_folder() -> None:
    found = summarise(
        {
            "identified": torch.tensor([True, True, False, True]),
            "psnr": torch.tensor([30.0, 60.0, 10.0, 20.0], dtype=torch.float64),
            "ssim": [0.9, 0.95, 0.1, 0.5],
            "mse": torch.tensor([0.001, 1e-6, 0.1, 0.01]),
            "lpips": Unavailable("no weights"),
            "label_accuracy": [1.0, 1.0, 1.0, 0.0],
        },
        Seed(0),
        Summary,
    )
    summary = encode(found)
    low, high = wilson(3, 4)
    assert summary["identified"] == {"value": 0.75, "low": low, "high": high, "count": 3, "n": 4}
    assert summary["label_accuracy"]["count"] == 3
    assert summary["psnr"]["median"] == 25.0
    assert summary["psnr"]["worst"] == 60.0 and summary["ssim"]["worst"] == 0.95
    assert summary["mse"]["worst"] == pytest.approx(1e-6)
    assert summary["lpips"] == {"unavailable": "no weights"}
    assert 10.0 <= summary["psnr"]["low"] <= summary["psnr"]["high"] <= 60.0
    assert set(summary["psnr"]) == {"median", "low", "high", "worst", "n"}
    assert decode(Summary, json.loads(json.dumps(summary, allow_nan=False))) == found


def test_summary_of_one_record() -> None:
    summary = encode(summarise({"identified": [True], "psnr": [31.0]}, Seed(0), Summary))
    assert summary["psnr"] == {"median": 31.0, "low": 31.0, "high": 31.0, "worst": 31.0, "n": 1}
    assert summary["identified"]["value"] == 1.0 and summary["identified"]["low"] < 0.3


def test_one_more_metric_changes_no_other() -> None:
    values = np.random.default_rng(1).uniform(size=20)
    alone, together = (summarise(each, Seed(3), Quality) for each in ({"ssim": values}, {"mse": values**2, "ssim": values}))
    assert alone.ssim == together.ssim is not None


def test_values_that_are_not_finite_are_told_and_never_written() -> None:
    summary = encode(summarise({"psnr": [math.inf, 3.0, math.nan], "mse": [0.1, 0.2, 0.3]}, Seed(0), Quality))
    assert summary["psnr"] == {"unavailable": "2 of 3 values are not finite"}
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"psnr": [1.0], "mse": [1.0, 2.0]}, "same number"),
        ({"psnr": []}, "at least one"),
        ({}, "none at all"),
        ({"pnsr": [1.0]}, "did you mean 'psnr'"),
        ({"identified": [0.5]}, "0 or 1"),
        ({"mse": torch.zeros(2, 2)}, "one value per record"),
    ],
)
def test_summary_refuses_what_it_cannot_sum_up(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        summarise(values, Seed(0), Quality)
