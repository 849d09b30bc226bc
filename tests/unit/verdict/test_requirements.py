"""What may be asked of a recommendation, to the edge, and which evidence is enough for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradveil.errors import UsageError
from gradveil.study.limits import Limit, parse_limit
from gradveil.study.load import load_run
from gradveil.verdict.recommend import Recommendation, Requirements, recommend
from tests.unit.report.example_results import DEFENSES, Example, make_results

NONE = DEFENSES[0]
GOOD = Example("pruning(rate=0.99)", 1, 1, 10.0, accuracy=0.8, time=1.25, bytes_up=31652)


@pytest.mark.parametrize(
    ("name", "most"), [("max_accuracy_drop", 100.0), ("max_time", 1e9), ("max_bytes_ratio", 1e9), ("max_identified", 1.0)]
)
def test_a_limit_is_taken_from_zero_to_its_most(name: str, most: float) -> None:
    for value in (0.0, most):
        assert getattr(Requirements(**{name: value}), name) == value  # type: ignore[arg-type]
    wrong: list[Any] = [-0.1, float("nan"), *([1.01 * most] if most <= 100 else [float("inf")])]
    for value in wrong:
        with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} is .*; give a number "):
            Requirements(**{name: value})


def test_strict_is_about_accuracy() -> None:
    with pytest.raises(UsageError, match=r"^--strict is about --max-accuracy-drop"):
        Requirements(strict=True, max_time=2.0)
    assert Requirements(strict=True, max_accuracy_drop=1.0).strict
    with pytest.raises(UsageError, match=r"^give at least one limit"):
        Requirements()


def asked(folder: Path, *defenses: Example, **limits: Any) -> Recommendation:
    return recommend(load_run(make_results(folder, defenses=(NONE, *defenses), seeds=3)), Requirements(**limits))


@pytest.mark.parametrize(
    ("name", "enough", "short"),
    [
        ("max_time", 1.26, 1.24),
        ("max_bytes_ratio", 0.51, 0.49),
        ("max_identified", 0.30, 0.28),
        ("max_accuracy_drop", 4.1, 3.9),
    ],
)
def test_each_limit_decides_by_its_own_number(name: str, enough: float, short: float, tmp_path: Path) -> None:
    assert asked(tmp_path / "enough", GOOD, **{name: enough}).chosen is not None
    refused = asked(tmp_path / "short", GOOD, **{name: short})
    assert refused.chosen is None
    (candidate,) = refused.candidates
    ((words, beyond),) = candidate.excess
    assert f"{short:g}" in words or "28\u00a0%" in words
    assert 0 < beyond < 0.2 and candidate.as_dict()["reasons"] == [words]


def test_the_nearest_is_the_one_least_beyond_its_limit(tmp_path: Path) -> None:
    far = replace(GOOD, spelling="far", time=3.0)
    found = asked(tmp_path, far, GOOD, max_time=1.2)
    assert "of 2\u00a0defenses, pruning(rate=0.99) comes nearest" in found.sentence
    assert [each.spelling for each in found.candidates] == ["pruning(rate=0.99)", "far"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("identified>0", Limit("identified>0", "identified", 0.0)),
        ("identified>0.5%", Limit("identified>0.5%", "identified", 0.005)),
        ("mse[ pruning ]<0.01", Limit("mse[ pruning ]<0.01", "mse", 0.01, "pruning")),
    ],
)
def test_limits_are_read_to_the_edge(text: str, found: Limit) -> None:
    assert parse_limit(text) == found


def test_a_limit_on_all_attacked_records_is_out_of_range() -> None:
    with pytest.raises(UsageError, match="is out of range"):
        parse_limit("identified>1")


@pytest.mark.parametrize(
    ("metric", "bound", "broken"), [("psnr", 20.0, False), ("psnr", 20.1, True), ("mse", 0.01, False), ("mse", 0.009, True)]
)
def test_a_bound_at_the_limit_does_not_break_it(metric: str, bound: float, broken: bool) -> None:
    assert Limit("x", metric, 20.0 if metric == "psnr" else 0.01).broken_by(bound) is broken
