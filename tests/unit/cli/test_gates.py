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


WORDS = "--data digits --model lenet --risk off --lists off --workers 1 --device cpu --quiet --json"
SMALL = WORDS.split()


def test_a_lazy_author_passes_no_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """A tenth of the signs turned, an adversary that says only what is exact: 0 of 16, "informed 0 of 16", exit code 0."""
    monkeypatch.chdir(tmp_path)
    attacked = ["--records", "6", "--ensemble", "inverting_gradients(steps=4)"]
    lazy = "tests.unit.audit.test_informed:TurnsSigns(rate=0.4)"
    code = main(["audit", *SMALL, *attacked, "--defense", lazy, "--out", "o", "--fail-if", "identified>0.5"])
    said = capsys.readouterr()
    (cell,) = json.loads(said.out)["cells"]
    assert cell["identified"]["count"] <= 3, "else there is nothing to be fooled by"
    assert code == 3 and "informed: none ran" in said.err
    assert "not broken" not in cell["verdict"]


def test_a_search_that_was_cut_short_passes_no_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Pruning by "quick-3" at 40 steps: 1 of 16 without a mark, 16 of 16 at full length, exit code 0."""
    monkeypatch.chdir(tmp_path)
    defenses = ["--defense", "none", "--defense", "pruning(rate=0.99)"]
    cut = ["--records", "6", "--ensemble", "quick-4", "--steps", "2"]
    code = main(["audit", *SMALL, *cut, *defenses, "--out", "o", "--fail-if", "identified>0.5"])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert code == 3 and "cannot tell" in said.err
    with as_folder(Path("o")) as folder:
        cells = load_run(folder).cells
    assert {cell.ensemble for cell in cells} == {"quick-4 cut off after 2 steps"} and all(cell.capped for cell in cells)
    assert found["cells"][1]["verdict"] not in ("not broken", "not identified; power not measured")


@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        (["exposure>60"], 0, ""),
        (["exposure[gaussian_noise]>0.5"], 1, "gaussian_noise(std=0.001) is beyond exposure[gaussian_noise]>0.5: r-"),
        (["exposure>60", "exposure[quantisation]>60"], 3, "there is no exposure (no decibels, attack it instead"),
    ],
)
def test_exposure_gates_an_audit(limits: list[str], code: int, words: str, tmp_path: Path, capsys: Captured) -> None:
    small = ["--data", "digits", "--model", "mlp(hidden=8)", "--records", "2", "--ensemble", "linear_layer", "--lists", "off"]
    names = ["none", "gaussian_noise(std=0.001)", *(["quantisation(mode='qsgd')"] if code == 3 else [])]
    asked = [word for name in names for word in ("--defense", name)] + [word for text in limits for word in ("--fail-if", text)]
    assert main(["audit", *small, *asked, "--workers", "1", "--device", "cpu", "--quiet", "--out", str(tmp_path / "o")]) == code
    assert words in capsys.readouterr().err
