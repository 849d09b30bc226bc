"""The benchmark of audits counts every candidate-step, and its clocks leave nothing large out."""

from __future__ import annotations

import pytest

from benchmarks import audit_throughput
from gradveil.study.cell import Cell


def test_steps_and_seconds_of_a_small_cell_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[str, int]] = []

    def engine(model: str, targets: int, *rest: object) -> dict[str, dict[str, float]]:
        sizes.append((model, targets))
        return {"steps_per_second": {"batched": 1000.0}}

    monkeypatch.setattr(audit_throughput, "measure", engine)
    cell = Cell(data="digits", model="mlp(hidden=16)", records=3, ensemble="quick-4", steps=6, lists="off", risk="off")
    row = audit_throughput.run(cell, 1)
    names = [each["attack"] for each in row["attacks"]]
    assert names == ["smooth_to_sharp plain", "stay_smooth plain", "feature_inversion plain", "linear_layer plain"]
    # Three records and two rehearsals, six steps each; who solves takes none.
    assert [each["steps"] for each in row["attacks"]] == [30, 30, 30, 0]
    assert row["candidate_steps"] == 90 and sizes == [("mlp(hidden=16)", 5)]
    assert row["share_of_engine"] == pytest.approx(row["steps_per_second"] / 1000, abs=1e-3)
    spent = sum(each["seconds"] for each in row["attacks"])
    assert row["search_seconds"] <= spent + 0.1 and row["phases"]["attacks"] == pytest.approx(spent, abs=0.1)
    assert row["whole_seconds"] >= sum(row["phases"].values()) - 0.2
    assert "referee" in row["phases"]
    searched = audit_throughput.run(cell, 1, searches_only=True)
    assert searched["candidate_steps"] == 90 and not {"referee", "nulls", "gap"} & searched["phases"].keys()
