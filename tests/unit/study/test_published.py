"""Everything published in results/ is read by the present classes, and what is written today is read back without a change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradveil.errors import UsageError
from gradveil.study.codec import decode, encode
from gradveil.study.load import load_run
from gradveil.study.results import CellResult, Run, Timing

RESULTS = Path(__file__).resolve().parents[3] / "results"
RUNS = sorted(path.parent for path in RESULTS.rglob("run.json"))
CELLS = sorted(path for path in RESULTS.rglob("*.json") if '"format": "gradveil-cell-1"' in path.read_text(encoding="utf-8")[:60])
OLD = ("measured", "region", "sees", "iip_1")
"""Parts that cells of older versions lack."""


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.name)
def test_a_published_run_is_read_whole(folder: Path) -> None:
    raw = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    run = load_run(folder)
    assert [cell.key for cell in run.cells] == raw["cells"] and run.missing == ()
    assert encode(decode(Run, raw)) == raw
    assert all(cell.timing.seconds and cell.n == len(cell.records) and cell.n == cell.selected.identified.n for cell in run.cells)


def test_there_is_something_to_read() -> None:
    assert len(RUNS) >= 12 and len(CELLS) >= 104


@pytest.mark.parametrize("path", CELLS, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_a_published_cell_is_read_and_written_again(path: Path) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw.pop("seconds", None)  # added by a benchmark
    found = decode(CellResult, raw, path.name)
    again = encode(found)
    assert decode(CellResult, again) == found
    if all(f'"{part}"' in path.read_text(encoding="utf-8") for part in OLD):
        assert json.dumps(again) == json.dumps(raw), "keys, their order and every digit"
    else:
        assert again["selected"]["identified"] == raw["selected"]["identified"] and again["records"] == raw["records"]
    timing = path.with_suffix(".timing.json")
    if timing.is_file():
        assert decode(Timing, json.loads(timing.read_text(encoding="utf-8"))).seconds


def test_a_cell_is_found_by_its_settings() -> None:
    run = load_run(RESULTS / "first_light_audit")
    cell = run.cell(defense="none")
    assert cell.identified.count == cell.selected.identified.count == 16
    with pytest.raises(UsageError, match="no cells of this run have defense='nothing'; there are "):
        run.cell(defense="nothing")
    with pytest.raises(UsageError, match="name more settings"):
        run.cell()
