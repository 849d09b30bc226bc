"""Results that no plan says: a folder packed into one file, and the file unpacked for the scripts that read folders."""

from __future__ import annotations

import json
from pathlib import Path

from gradveil.storage.study_file import read_study
from scripts.pack_results import main
from tests.unit.report.example_results import make_results


def contents(folder: Path) -> dict[str, object]:
    return {path.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in folder.rglob("*.json")}


def test_a_folder_and_back(tmp_path: Path) -> None:
    folder, packed, again = tmp_path / "mine", tmp_path / "mine.json.xz", tmp_path / "again"
    (folder / "part").mkdir(parents=True)
    (folder / "rows.json").write_text('{"rows": [1, 2.5, null]}')
    (folder / "part" / "list.json").write_text("[1]")
    assert main([str(folder), str(packed)]) == 0
    assert read_study(packed)["name"] == "mine"
    assert main([str(packed), str(again)]) == 0
    assert contents(again) == contents(folder)


def test_a_run_with_documents(tmp_path: Path) -> None:
    folder, packed, again = tmp_path / "run", tmp_path / "run.json.xz", tmp_path / "again"
    make_results(folder)
    (folder / "machine.json").write_text("{}")
    main([str(folder), str(packed)])
    main([str(packed), str(again)])
    assert set(contents(again)) == set(contents(folder))
