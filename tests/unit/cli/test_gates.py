"""Leaks that once passed a gate: duplicated records, the strongest attacker overlooked, searches that were cut short."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gradveil.cli import main
from gradveil.data import load_data
from gradveil.storage.study_file import as_folder
from gradveil.study.load import load_run

Captured = pytest.CaptureFixture[str]


def test_a_hundred_records_stored_twice_do_not_hide_a_perfect_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Each copy is as near as the original: 0 of 16 at 60 dB, and the gate passed."""
    monkeypatch.chdir(tmp_path)
    digits = load_data("digits")
    once, labels = digits.inputs[:100].numpy(), digits.targets[:100].numpy()
    np.savez("twice.npz", x=np.concatenate([once, once]), y=np.concatenate([labels, labels]))
    words = (
        "--data twice.npz --model mlp(hidden=16) --ensemble linear_layer --records 16 --risk off --workers 1 --device cpu --quiet"
    )
    command = ["audit", *words.split(), "--defense", "none", "--out", "o", "--json"]
    assert main([*command, "--fail-if", "identified>0.25"]) == 1
    found = json.loads(capsys.readouterr().out)
    (cell,) = found["cells"]
    assert (cell["identified"]["count"], cell["identified"]["n"]) == (16, 16)
    assert cell["psnr"]["median"] > 50 and cell["verdict"] == "broken"
    with as_folder(Path("o")) as folder:
        (kept,) = load_run(folder).cells
    assert kept.duplicates == 100 and kept.candidates == 200 and kept.chance == pytest.approx(1 / 100)
    assert [check.level for check in kept.checks if check.name == "duplicates"] == ["warn"]
