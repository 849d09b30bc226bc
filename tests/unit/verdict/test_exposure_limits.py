"""Limits on decibels without an attack."""

from __future__ import annotations

from dataclasses import replace

from gradveil.study.cell_exposure import CellExposure, ExposedRecord
from gradveil.study.limits import parse_limit
from gradveil.study.results import CellResult
from gradveil.verdict.limits import compare
from tests.unit.verdict.test_limits import cell, outcome


def exposed(defense: str, *decibels: float | None, fail: bool = False, reason: str = "") -> CellResult:
    records = [ExposedRecord(pseudonym=f"r-{i}", exposure=value, null=0.05) for i, value in enumerate(decibels)]
    return replace(cell(defense, fail=fail), exposure=CellExposure(records=tuple(records), reason=reason))


def test_exposure_is_gated_by_the_worst_record() -> None:
    assert outcome("exposure>3", exposed("none", 9.0), exposed("pruning", 2.0, 2.9)) == ([], 0)
    assert outcome("exposure>3", exposed("none", 9.0)) == (["none"], 1)
    assert outcome("exposure[pruning]>3", exposed("none", 1.0), exposed("pruning", 1.0, 3.5)) == (["pruning"], 1)
    assert outcome("exposure>3", exposed("pruning", 3.5, fail=True)) == (["pruning"], 1), "no attack is behind it"
    found = compare([parse_limit("exposure>3")], [exposed("pruning", 4.0, 5.25, 0.1)])
    assert "r-1 is exposed by 5.2 dB; 2 of 3 records" in found.violations[0].sentence
    without = (cell("pruning"), exposed("pruning", reason="unknown law"), exposed("pruning", None, reason="unknown law"))
    for each in (*without, exposed("pruning", 1.0, None)):
        assert outcome("exposure>3", each) == ([], 3)
    assert outcome("exposure>3", exposed("pruning", 4.0, None)) == (["pruning"], 1), "one that is beyond is enough"
    assert "unknown law" in compare([parse_limit("exposure>3")], [without[1]]).doubts[0]


def learned(attained: float, by_label: float, exposure: float | None = None, reason: str = "") -> CellResult:
    record = ExposedRecord(pseudonym="r-0", null=0.05, exposure=exposure, attained=attained, by_label=by_label)
    return replace(cell("pruning"), exposure=CellExposure(records=(record,), reason=reason))


def test_what_a_regression_got_beyond_the_label_counts_too() -> None:
    assert outcome("exposure>3", learned(6.0, 1.0, exposure=2.0)) == (["pruning"], 1)
    assert outcome("exposure>3", learned(6.0, 4.0, exposure=2.0)) == ([], 0), "the label told most of it"
    assert outcome("exposure>3", learned(2.0, -5.0, exposure=2.0)) == ([], 0), "an odd record of its class is no leak"
    assert outcome("exposure>3", learned(6.0, 1.0, reason="unknown law")) == (["pruning"], 1)
    assert outcome("exposure>3", learned(2.0, 1.0, reason="unknown law")) == ([], 3), "an attacker who got little shows nothing"
    found = compare([parse_limit("exposure>3")], [learned(6.0, 1.0, exposure=2.0)])
    assert "r-0 gave a regression 5.0 dB; 1 of 1 records" in found.violations[0].sentence
