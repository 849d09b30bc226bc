"""The script that guards refactors finds what changed, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.equivalence import compare, main, runs

Change = Callable[[dict[str, Any], "np.ndarray[Any, Any]"], None]


def write(
    folder: Path, change: Change | None = None, *, key: str = "a" * 16, cells: int = 2, weight: float = 1.0, seconds: float = 1.0
) -> Path:
    """Write a recording of one audit and one training; the change is made to the first cell and its picture."""
    audit, training = folder / "horizontal/pruning", folder / "training/dgp"
    for own in (audit, training):
        (own / "results/cells").mkdir(parents=True)
        (own / "outcome.json").write_text(json.dumps({"code": 0, "message": "", "seconds": seconds}))
    keys = [f"{key[:-1]}{index}" for index in range(cells)]
    provenance = {"started": seconds}
    run = {"plan": {"records": 4}, "cells": keys, "provenance": provenance, "cards": {"text": seconds}}
    (audit / "results/run.json").write_text(json.dumps(run))
    for index, name in enumerate(keys):
        psnr = {"median": 12.25, "low": 10.5, "high": 13.5, "n": 4}
        cell: dict[str, Any] = {"key": name, "cell": {"defense": "pruning", "seed": index}, "selected": {"psnr": psnr}}
        cell["risk"] = {"bands": {"high": 4}, "correlation": {"pearson": {"value": 0.5, "p": 0.25}}}
        picture = np.full((4, 1, 2, 2), 0.5, dtype=np.float32)
        if change and not index:
            change(cell, picture)
        (audit / f"results/cells/{name}.json").write_text(json.dumps(cell))
        np.savez(audit / f"results/cells/{name}.npz", selected=picture)
    done = {"settings": {"defense": "dgp"}, "rounds": [{"loss": 2.5, "seconds": seconds}], "provenance": provenance}
    (training / "results/training.json").write_text(json.dumps(done))
    save_file({"w": np.array([weight, 0.0], dtype=np.float32)}, training / "results/model.safetensors")
    return folder


def pixel(cell: dict[str, Any], picture: np.ndarray[Any, Any]) -> None:
    picture[1, 0, 1, 0] = np.nextafter(picture[1, 0, 1, 0], np.float32(1))


def metric(cell: dict[str, Any], picture: np.ndarray[Any, Any]) -> None:
    cell["selected"]["psnr"]["median"] += 1e-14


def interval(by: float) -> Change:
    def change(cell: dict[str, Any], picture: np.ndarray[Any, Any]) -> None:
        cell["selected"]["psnr"]["low"] += by
        cell["risk"]["correlation"]["pearson"]["p"] += by

    return change


def band(cell: dict[str, Any], picture: np.ndarray[Any, Any]) -> None:
    cell["risk"]["bands"]["high"] = 5


def lost(cell: dict[str, Any], picture: np.ndarray[Any, Any]) -> None:
    del cell["selected"]["psnr"]["n"]


@pytest.mark.parametrize(
    ("change", "lines", "told"),
    [
        (pixel, 1, "horizontal/pruning: cell pruning [selected]: 1 of 16 entries differ, the first at (1, 0, 1, 0)"),
        (metric, 1, "cell pruning.selected.psnr.median: 12.25 and 12.25000000000001"),
        (interval(1e-9), 2, "correlation.pearson.p: 0.25 and 0.250000001"),
        (band, 1, "bands.high: 4 and 5"),
        (lost, 1, "psnr.n: only in BEFORE"),
    ],
)
def test_what_changed_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, lines: int, told: str) -> None:
    assert compare(write(tmp_path / "before"), write(tmp_path / "after", change)) == 1
    said = capsys.readouterr().out
    assert told in said
    assert len(said.splitlines()) == lines + 1
    assert said.rstrip().endswith(f"{lines} differences")


def test_a_missing_cell_is_found_on_either_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, less = write(tmp_path / "whole"), write(tmp_path / "less", cells=1)
    assert compare(whole, less) == 1
    assert 'cell {"defense": "pruning", "seed": 1}: only in BEFORE' in capsys.readouterr().out
    assert compare(less, whole) == 1
    assert "only in AFTER" in capsys.readouterr().out


def test_a_changed_weight_and_a_missing_run_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = write(tmp_path / "before"), write(tmp_path / "after", weight=1.0000001)
    assert compare(before, after) == 1
    assert "training/dgp: training dgp [w]: 1 of 2 entries differ" in capsys.readouterr().out
    (after / "training/dgp/outcome.json").unlink()
    assert compare(before, after) == 1
    assert "training/dgp: only in BEFORE" in capsys.readouterr().out
    assert compare(before, after, "horizontal") == 0


def test_rounding_of_intervals_keys_and_times_are_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "before")
    assert compare(before, write(tmp_path / "after", interval(1e-14), key="b" * 16, seconds=2.0)) == 0
    assert "no differences" in capsys.readouterr().out


def test_two_empty_folders_are_not_taken_for_equal(tmp_path: Path) -> None:
    assert compare(tmp_path, tmp_path) == 1


def test_a_part_or_a_single_run_can_be_asked_for(tmp_path: Path) -> None:
    assert [run.name for run in runs("horizontal/shadow")] == ["horizontal/shadow"]
    assert {run.name.split("/")[0] for run in runs()} == {"audit", "horizontal", "vertical", "training"}
    assert all(run.name.startswith("training/") for run in runs("training"))
    with pytest.raises(SystemExit):
        main(["record", str(tmp_path), "--only", "nothing"])
