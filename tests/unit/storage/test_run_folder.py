"""The results folder: whole files or none, damage put aside, one run at a time."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradveil.errors import GradveilError, UsageError
from gradveil.storage.run_folder import Store, npz_bytes
from gradveil.study.cell import CELL_FORMAT
from gradveil.study.codec import decode, encode
from gradveil.study.kept import KeptCell, KeptTraining, KeptUtility
from gradveil.study.load import load_run
from gradveil.study.measures import Estimate, Share, Summary
from gradveil.study.results import CellResult, Defense, Timing, Utility
from gradveil.study.run_result import Run
from gradveil.study.training_result import TrainingRecord

KEY = "0123456789abcdef"
ALL = Share(value=1.0, low=0.2, high=1.0, count=1, n=1)
CELL = CellResult(
    key=KEY,
    settings=decode(KeptCell, {"defense": "none"}),
    defense=Defense(spelling="none"),
    n=1,
    selected=Summary(n=1, identified=ALL),
    timing=Timing(key=KEY, seconds=1.5),
)
RECORD: dict[str, Any] = encode(CELL)
RUN = Run(keys=(KEY,))
PICTURES = {"original": np.zeros((2, 3, 4, 4), np.float32), "ids": np.array(["a", "bc"])}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert store.read_cell(KEY) is None
    store.write_cell(CELL, PICTURES)
    assert store.read_cell(KEY) == replace(CELL, timing=Timing())
    assert json.loads((store.out / "cells" / f"{KEY}.timing.json").read_text())["seconds"] == 1.5
    with np.load(store.out / "cells" / f"{KEY}.npz", allow_pickle=False) as arrays:
        assert arrays["ids"].tolist() == ["a", "bc"]
        assert arrays["original"].shape == (2, 3, 4, 4)
    store.write_run(RUN)
    assert not [path for path in store.out.rglob("*") if path.name.startswith(".")]
    assert store.notes == []


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    store = Store(tmp_path)
    odd = {"a": [float("nan"), np.float32(0.5), np.int64(3)], "learning_rate": float("inf")}
    store.write_cell(replace(CELL, settings=decode(KeptCell, odd)), {})
    cell = store.read_cell(KEY)
    assert cell is not None and cell.settings.unread["a"] == [None, 0.5, 3]
    assert cell.settings.said("learning_rate") is None


def test_the_same_pictures_give_the_same_bytes() -> None:
    turned = dict(reversed(PICTURES.items()))
    assert npz_bytes(PICTURES) == npz_bytes(turned)
    with zipfile.ZipFile(io.BytesIO(npz_bytes(PICTURES))) as archive:
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_python_objects_are_never_written() -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        npz_bytes({"x": np.array([object()])})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"format": "gradveil-ce',
        b"[]",
        b"\xff\x00",
        b'{"format": "other-1"}',
        b"[" * 100_000,
        json.dumps({**RECORD, "key": "f" * 16}).encode(),
        json.dumps({"format": CELL_FORMAT, "key": KEY}).encode(),
    ],
    ids=["empty", "half", "list", "bytes", "format", "deep", "key", "without numbers"],
)
def test_a_damaged_cell_is_put_aside_and_measured_again(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    path = tmp_path / "cells" / f"{KEY}.json"
    for attempt in range(2):
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING, logger="gradveil"):
            assert store.read_cell(KEY) is None
        assert not path.exists()
        assert len(list(path.parent.glob("*.corrupt*"))) == attempt + 1
    assert next(path.parent.glob("*.corrupt")).read_bytes() == content
    assert all("measured again" in text for text in (store.notes[0], caplog.messages[0]))
    store.write_cell(CELL, {})
    assert store.read_cell(KEY) is not None


def test_a_training_without_its_accuracy_is_put_aside(tmp_path: Path) -> None:
    store, path = Store(tmp_path), tmp_path / "utility" / f"{KEY}.json"
    record = TrainingRecord(key=KEY, settings=decode(KeptTraining, {"seed": 0}), final_accuracy=None)
    store.write_training(record)
    assert store.read_training(KEY) == record
    path.write_text(json.dumps({"format": TrainingRecord.format, "key": KEY}))
    assert store.read_training(KEY) is None and not path.exists()


def test_a_cell_without_its_json_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, written = Store(tmp_path), []
    monkeypatch.setattr(Store, "_write", lambda self, path, content: written.append(path.name))
    store.write_cell(CELL, PICTURES)
    assert written == [f"{KEY}.npz", f"{KEY}.timing.json", f"{KEY}.json"]


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write_cell(CELL, {})
    before = (tmp_path / "cells" / f"{KEY}.json").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        store.write_cell(replace(CELL, n=2), {})
    assert (tmp_path / "cells" / f"{KEY}.json").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "cells").iterdir()) == [f"{KEY}.json", f"{KEY}.timing.json"]


def test_a_folder_that_cannot_be_written_gets_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UsageError, match=r"cannot write to .*choose another folder"):
        Store(tmp_path / "file")
    with pytest.raises(UsageError, match="cannot write to"):
        Store(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "precious"

    def denied(self: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", denied)
    with pytest.raises(UsageError, match="Permission denied"):
        Store(tmp_path / "read-only")


@pytest.mark.parametrize("before", ["", "{", "[]", '{"cells": []}', '{"format": "gradveil-run-1"}'])
def test_a_run_replaces_the_one_before(before: str, tmp_path: Path) -> None:
    store, run = Store(tmp_path), tmp_path / "run.json"
    run.write_text(before)
    store.write_run(RUN)
    assert json.loads(run.read_text())["cells"] == [KEY]


def test_results_of_another_version_are_not_written_over(tmp_path: Path) -> None:
    store, run = Store(tmp_path), tmp_path / "run.json"
    run.write_text('{"format": "gradveil-run-9"}')
    with pytest.raises(UsageError, match=r"another format \(gradveil-run-9\); choose another folder"):
        store.write_run(RUN)
    assert run.read_text() == '{"format": "gradveil-run-9"}'


@pytest.mark.parametrize("key", ["../../etc/x", "", "A" * 16, "0" * 15])
def test_only_keys_name_files(key: str, tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="no key"):
        Store(tmp_path).read_cell(key)


def test_the_folder_of_another_run_is_no_obstacle(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_cell(replace(CELL, key="f" * 16), {})
    store.write_run(Run(keys=("f" * 16,)))
    again = Store(tmp_path)
    again.write_cell(CELL, {})
    assert again.read_cell("f" * 16) is not None


HOLD = """
import sys, time
from pathlib import Path
from gradveil.storage.run_folder import Store
with Store(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_runs_do_not_share_a_folder_and_a_killed_one_is_no_obstacle(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        who = rf"another run \(process {other.pid}\) is at work"
        with pytest.raises(UsageError, match=who) as caught, Store(tmp_path).lock():
            pass
        assert "--out" in str(caught.value)
        other.kill()
        other.wait()
    assert (tmp_path / ".lock").exists()
    with Store(tmp_path).lock():
        assert (tmp_path / ".lock").read_text().strip() == str(os.getpid())
        with pytest.raises(UsageError, match="another run"), Store(tmp_path).lock():
            pass
    assert not (tmp_path / ".lock").exists()


def test_the_report_reads_what_the_store_writes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_cell(CELL, PICTURES)
    store.write_run(Run(keys=(KEY, "f" * 16)))
    run = load_run(tmp_path)
    assert (len(run.cells), run.missing, run.notes) == (1, ("f" * 16,), ())
    assert run.cells[0].timing == CELL.timing and run.cell(defense="none").identified.count == 1


def test_utility_is_written_into_a_cell_and_changes_nothing_else(tmp_path: Path) -> None:
    store, path = Store(tmp_path), tmp_path / "cells" / f"{KEY}.json"
    utility = Utility(settings=decode(KeptUtility, {"rounds": 2}), seeds=(0,), accuracy=Estimate(value=0.5, n=1, per_seed=(0.5,)))
    store.give_utility(KEY, utility)
    assert not path.exists(), "the cell is not done"
    store.write_cell(CELL, {})
    before = json.loads(path.read_text())
    store.give_utility(KEY, utility)
    written = path.stat().st_mtime_ns
    assert json.loads(path.read_text()) == {**before, "utility": encode(utility)}
    store.give_utility(KEY, utility)
    assert path.stat().st_mtime_ns == written, "it has it already"
