"""The examples run as a reader runs them, and say what they promise."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradveil.cli import main

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LONGEST = 40

Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script as ``python examples/NAME FOLDER`` does, from another folder; return what it prints."""

    def script(name: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    return script


def lines_of_code(path: Path) -> int:
    """Count lines that hold code: neither empty nor part of the docstring at the top."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = ast.parse("\n".join(lines)).body[0].end_lineno or 0
    return sum(bool(line.strip()) for line in lines[head:])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_and_have_a_test(path: Path) -> None:
    assert lines_of_code(path) < LONGEST
    assert f'run("{path.name}"' in Path(__file__).read_text(encoding="utf-8")


def test_audit_builtin(run: Run, tmp_path: Path) -> None:
    said = run("audit_builtin.py")
    assert re.search(r"^none: \d of 8 records identified \(95 %: ", said, flags=re.MULTILINE)
    assert "gaussian_noise(std=0.3): " in said
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "First steps" in page and "data:image" in page


def test_bring_your_own_model(run: Run, tmp_path: Path) -> None:
    said = run("bring_your_own_model.py")
    assert "of 4 records identified among 150" in said
    assert "data:image" not in (tmp_path / "results" / "report.html").read_text(encoding="utf-8")
    assert "data:image" in (tmp_path / "results" / "report-private.html").read_text(encoding="utf-8")


def test_write_a_defense(run: Run) -> None:
    lines = run("write_a_defense.py").splitlines()
    assert len(lines) > 15
    assert {line.split()[0] for line in lines} == {"passed", "skipped"}
    assert main(["check", f"{EXAMPLES}/write_a_defense.py:Rounding(step=0.1)"]) == 0


def test_capture_an_update(run: Run, tmp_path: Path) -> None:
    said = run("capture_an_update.py")
    assert "of 1797 records, the nearest is row 42 (" in said
    assert json.loads((tmp_path / "results" / "captured.json").read_text())["nearest"][0]["row"] == 42


def test_train_federated(run: Run, tmp_path: Path) -> None:
    lines = run("train_federated.py").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["undefended", "pruned", "pruned, scaffold"]
    sent = [float(re.findall(r"([\d.]+) kB up", line)[0]) for line in lines]
    assert sent[1] == sent[2] < 0.25 * sent[0]
    assert all(float(re.findall(r"accuracy ([\d.]+)%", line)[0]) > 60 for line in lines)
    assert json.loads((tmp_path / "pruned-scaffold" / "training.json").read_text())["finished"] is True
