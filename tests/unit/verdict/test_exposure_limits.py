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
