"""One file a study: packed without loss, the same bytes for the same content, and unpacked for those who read folders."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from gradveil.errors import UsageError
from gradveil.storage.study_file import as_folder, pack_folder, read_study, unpack_study, write_study
from gradveil.study.codec import encode
from gradveil.study.load import load_run
from gradveil.study.published import BEFORE
from tests.unit.report.example_results import make_results


def contents(folder: Path) -> dict[str, object]:
    return {path.relative_to(folder).as_posix(): encode(json.loads(path.read_text())) for path in folder.rglob("*.json")}


def test_a_run_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_results(folder)
    path = write_study(tmp_path / "results" / "mine.json.xz", pack_folder(folder, "mine", {"table": "attacks"}))
    again = unpack_study(read_study(path), tmp_path / "again")
    assert contents(again) == contents(folder)
    assert not list(again.rglob("*.npz"))
    with as_folder(path) as read, as_folder(folder) as same:
        assert same == folder
        assert [cell.key for cell in load_run(read).cells] == [cell.key for cell in load_run(folder).cells]
    assert not read.exists()


def test_cells_without_a_key_are_numbered(tmp_path: Path) -> None:
    make_results(tmp_path / "run")
    packed = pack_folder(tmp_path / "run", "mine")
    packed |= {"cells": [{**cell, "key": ""} for cell in packed["cells"]], "timings": {}, "provenance": BEFORE}
    assert len(load_run(unpack_study(packed, tmp_path / "again")).cells) == len(packed["cells"])


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    first = write_study(tmp_path / "a.json.xz", {"format": "gradveil-study-1", "b": 1, "a": [float("nan"), 0.1]})
    second = write_study(tmp_path / "b.json.xz", {"a": [None, 0.1], "format": "gradveil-study-1", "b": 1})
    assert first.read_bytes() == second.read_bytes()
    assert lzma.decompress(first.read_bytes()) == b'{"a":[null,0.1],"b":1,"format":"gradveil-study-1"}'


def test_files_of_older_studies_are_documents(tmp_path: Path) -> None:
    (tmp_path / "old" / "part").mkdir(parents=True)
    (tmp_path / "old" / "part" / "rows.json").write_text("[1, 2]")
    packed = pack_folder(tmp_path / "old", "old")
    assert packed["documents"] == {"part/rows.json": [1, 2]}
    assert packed["provenance"] == BEFORE
    with pytest.raises(UsageError, match="no attacked cell"):
        unpack_study(packed, tmp_path / "new")


def test_what_is_not_done_is_not_packed(tmp_path: Path) -> None:
    make_results(tmp_path, missing=1)
    with pytest.raises(UsageError, match=r"1 of .* are not done"):
        pack_folder(tmp_path, "mine")


def test_what_another_plan_left_is_no_part_of_the_study(tmp_path: Path) -> None:
    make_results(tmp_path)
    (tmp_path / "cells" / "0123456789abcdef.json").write_text("{}")
    (tmp_path / "utility").mkdir(exist_ok=True)
    (tmp_path / "utility" / "0123456789abcdef.json").write_text("{}")
    packed = pack_folder(tmp_path, "mine", trainings=())
    assert packed["documents"] == {}
    assert packed["trainings"] == []
    with pytest.raises(UsageError, match="are not done"):
        pack_folder(tmp_path, "mine", trainings=("fedcba9876543210",))


@pytest.mark.parametrize("content", [b"no archive", lzma.compress(b"[1]"), lzma.compress(b'{"format": "else"}')])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json.xz"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        read_study(path)
    with pytest.raises(UsageError, match="no such file"):
        read_study(tmp_path / "missing.json.xz")
    with pytest.raises(UsageError, match="cannot write"):
        write_study(path / "below.json.xz", {})
