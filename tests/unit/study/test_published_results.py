"""Everything published in results/ is read by the present classes, and what is written today is read back without a change."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gradveil.audit.candidate_checks import check_lists
from gradveil.errors import UsageError
from gradveil.storage.study_file import as_folder, read_study
from gradveil.study.cell import Cell
from gradveil.study.codec import decode, encode
from gradveil.study.kept import LATER
from gradveil.study.load import load_run
from gradveil.study.measures import Share
from gradveil.study.results import CellResult, Timing

RESULTS = Path(__file__).resolve().parents[3] / "results"
FILES = sorted(RESULTS.glob("*.json.xz"))
OLD = ("measured", "region", "sees", "iip_1")
"""Parts that cells of older versions lack."""
GONE = ("band", "bands")
"""Readings of InvRE that older versions have: no value of it separates anything, so they are read past."""


@cache
def study(path: Path) -> dict[str, Any]:
    return read_study(path)


def cells_in(value: Any) -> list[dict[str, Any]]:
    """Return every cell that stands somewhere in a published file, be it as a document."""
    if isinstance(value, dict):
        if value.get("format") == "gradveil-cell-1":
            return [value]
        return [cell for each in value.values() for cell in cells_in(each)]
    return [cell for each in value for cell in cells_in(each)] if isinstance(value, list) else []


def without_gone(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_gone(each) for name, each in value.items() if name not in GONE}
    return [without_gone(each) for each in value] if isinstance(value, list) else value


def test_there_is_something_to_read() -> None:
    assert len(FILES) >= 20
    assert sum(len(cells_in(study(path))) for path in FILES) >= 104


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.xz"))
def test_published_cells_are_read_and_written_again(path: Path) -> None:
    content = study(path)
    for raw in cells_in(content):
        raw = {name: without_gone(value) for name, value in raw.items() if name != "seconds"}  # added by a benchmark
        found = decode(CellResult, raw, path.name)
        again = encode(found)
        # What a file does not say of later settings is written as what it meant.
        unsaid = {name for name in LATER if name not in raw["cell"]}
        again["cell"] = {name: value for name, value in again["cell"].items() if name not in unsaid}
        assert decode(CellResult, encode(found)) == found
        assert all(getattr(found.settings, name) == Cell.__dataclass_fields__[name].default for name in unsaid)
        text = json.dumps(raw)
        if all(f'"{part}"' in text for part in OLD):
            assert json.dumps(again, sort_keys=True) == json.dumps(raw, sort_keys=True), "every key and every digit"
        else:
            assert again["selected"]["identified"] == raw["selected"]["identified"] and again["records"] == raw["records"]
    for timing in (content.get("timings") or {}).values():
        assert decode(Timing, timing).seconds


def test_a_cell_is_found_by_its_settings() -> None:
    with as_folder(RESULTS / "first_light_audit.json.xz") as folder:
        run = load_run(folder)
    cell = run.cell(defense="none")
    assert cell.identified.count == cell.selected.identified.count == 16
    with pytest.raises(UsageError, match="no cells of this run have defense='nothing'; there are "):
        run.cell(defense="nothing")
    with pytest.raises(UsageError, match="name more settings"):
        run.cell()


def lists_tested() -> dict[tuple[str, str], Share]:
    """Return what lists named of a LeNet, by kind of data and defense."""
    found = study(RESULTS / "list_attack.json.xz")
    spellings = {name: spelling for spelling, name in found["settings"]["defenses"].items()}
    rows = [each for each in found["documents"].values() if "list" in each]
    return {
        (row["data"].split("_")[0], spellings[row["name"]]): decode(Share, row["list"]["lists"]["random"]["share"])
        for row in rows
    }


def test_lists_name_no_fewer_than_pictures_identify_in_any_published_cell() -> None:
    """List >= picture within noise: in cells that measured both, and where one study tested lists and another pictures."""
    listed, compared = lists_tested(), 0
    for path in FILES:
        for raw in cells_in(study(path)):
            cell = decode(CellResult, raw, path.name)
            assert check_lists(cell).level == "ok", (path.name, cell.defense.spelling)
            share = listed.get((cell.settings.data.split("_")[0], cell.defense.spelling))
            if share is not None and cell.settings.model == "lenet" and cell.settings.batch_size == cell.settings.rounds == 1:
                compared += 1
                assert share.high >= cell.identified.low, (path.name, cell.defense.spelling)
    assert compared >= 40
