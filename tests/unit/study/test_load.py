"""Reading a results folder: clear errors for what cannot be read, notes for what can be done without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradveil.errors import UsageError
from gradveil.study.load import load_run
from tests.unit.report.example_results import DEFENSES, make_results


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def first_cell(folder: Path) -> Path:
    key = json.loads((folder / "run.json").read_text())["cells"][0]
    return folder / "cells" / f"{key}.json"


def test_a_whole_folder_is_read_in_plan_order(tmp_path: Path) -> None:
    results = load_run(make_results(tmp_path))
    assert [cell.defense.spelling for cell in results.cells] == [example.spelling for example in DEFENSES]
    assert results.notes == () and results.missing == ()
    assert results.cells[0].informed is None
    assert results.cells[1].timing.ratio == pytest.approx(3.0 / 2.9)


def test_a_missing_folder_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no results folder .*nowhere"):
        load_run(tmp_path / "nowhere")


def test_a_folder_without_run_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run\.json"):
        load_run(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "gradveil-run-1"', "\x00\xff"])
def test_a_damaged_run_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError, match="damaged"):
        load_run(tmp_path)


@pytest.mark.parametrize("found", ["gradveil-run-2", None, 1])
def test_an_unknown_run_format_is_refused(tmp_path: Path, found: object) -> None:
    make_results(tmp_path)
    change(tmp_path / "run.json", format=found)
    with pytest.raises(UsageError, match="reads 'gradveil-run-1'"):
        load_run(tmp_path)


def test_an_unknown_cell_format_is_refused(tmp_path: Path) -> None:
    make_results(tmp_path)
    change(first_cell(tmp_path), format="gradveil-cell-9")
    with pytest.raises(UsageError, match="'gradveil-cell-9' and this gradveil reads 'gradveil-cell-1'"):
        load_run(tmp_path)


def test_a_run_without_a_finished_cell_is_refused(tmp_path: Path) -> None:
    make_results(tmp_path, missing=len(DEFENSES))
    with pytest.raises(UsageError, match=r"no cell .* is finished"):
        load_run(tmp_path)


@pytest.mark.parametrize("text", ['{"format": "gradveil-cell-1", "key', "[]", '{"format": "gradveil-cell-1"}', ""])
def test_a_half_written_cell_counts_as_not_done(tmp_path: Path, text: str) -> None:
    make_results(tmp_path)
    path = first_cell(tmp_path)
    path.write_text(text)
    results = load_run(tmp_path)
    assert len(results.missing) == 1
    assert path.name in results.notes[0] and "counts as not done" in results.notes[0]


def test_strange_files_are_noted_without_their_names(tmp_path: Path) -> None:
    make_results(tmp_path)
    (tmp_path / "cells" / "patient-4711.json.tmp").write_text("x")
    (note,) = load_run(tmp_path).notes
    assert "1 file" in note and "4711" not in note


def test_a_key_cannot_leave_the_folder(tmp_path: Path) -> None:
    make_results(tmp_path / "in")
    run = tmp_path / "in" / "run.json"
    change(run, cells=["../../etc/passwd", *json.loads(run.read_text())["cells"]])
    results = load_run(tmp_path / "in")
    assert len(results.cells) == len(DEFENSES)
    assert "no key" in results.notes[0]


def test_numbers_that_are_not_finite_read_as_missing(tmp_path: Path) -> None:
    make_results(tmp_path)
    path = first_cell(tmp_path)
    raw = json.loads(path.read_text())
    raw["selected"]["psnr"]["low"] = float("nan")
    raw["regret_db"]["worst"] = float("inf")
    raw["records"][0]["psnr"] = float("nan")
    raw["bar"]["psnr"]["value"] = 10**400
    path.write_text(json.dumps(raw))
    cell = load_run(tmp_path).cells[0]
    assert cell.selected.psnr is not None and cell.selected.psnr.low is None
    assert cell.regret.worst is None and cell.records[0].psnr is None and cell.bar.psnr is None


def test_an_unknown_level_of_a_check_is_a_warning(tmp_path: Path) -> None:
    make_results(tmp_path)
    change(first_cell(tmp_path), checks=[{"name": "n", "level": "panic", "sentence": "s", "remedy": ""}])
    assert len(load_run(tmp_path).cells[0].warnings) == 1


def test_a_missing_or_damaged_timing_file_costs_only_the_times(tmp_path: Path) -> None:
    make_results(tmp_path)
    first_cell(tmp_path).with_suffix(".timing.json").write_text("{")
    assert load_run(tmp_path).cells[0].timing.ratio is None


def test_builtin_data_must_be_said_to_count(tmp_path: Path) -> None:
    make_results(tmp_path)
    change(tmp_path / "run.json", builtin_data="yes")
    assert not load_run(tmp_path).builtin_data


@pytest.mark.parametrize(
    ("written", "shared"),
    [
        ("--data /home/ada/ward-7/scans.npz --seed 0", "--data …/scans.npz --seed 0"),
        ("--data '/home/ada/my ward/scans.npz'", "--data '…/scans.npz'"),
        ("--data ~/ward/scans.npz", "--data …/scans.npz"),
        (r"--data C:\Users\ada\scans.npz", "--data …/scans.npz"),
        ("--weights=/srv/x/w.safetensors", "--weights=…/w.safetensors"),
        ("relative/scans.npz and https://arxiv.org/abs/1906.08935", "relative/scans.npz and https://arxiv.org/abs/1906.08935"),
        ("bytes / time, 3/4", "bytes / time, 3/4"),
    ],
)
def test_a_shared_report_of_user_data_shows_no_folders(tmp_path: Path, written: str, shared: str) -> None:
    make_results(tmp_path, builtin=False)
    change(tmp_path / "run.json", command=written)
    assert load_run(tmp_path, share=True).command == shared
    assert load_run(tmp_path, share=False).command == written


def test_a_shared_report_of_user_data_has_no_labels(tmp_path: Path) -> None:
    make_results(tmp_path, builtin=False)
    assert {record.label for record in load_run(tmp_path, share=True).cells[0].records} == {None}
    assert len({record.label for record in load_run(tmp_path).cells[0].records}) == 10
