"""The other commands, and how quickly all of them answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradveil
from gradveil.attacks.ensembles import resolve
from gradveil.cli import main
from gradveil.cli.catalogue import KINDS, entries
from tests.unit.report.example_results import make_results

Captured = pytest.CaptureFixture[str]
COMMANDS = ("", "audit", "risk", "train", "init", "list", "show", "report", "recommend", "check", "version")
SOURCE = str(Path(gradveil.__file__).parents[1])
DOCS = Path(__file__).resolve().parents[3] / "docs" / "cli.md"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, "-m", "gradveil", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_within_half_a_second(command: str) -> None:
    # Processor time: on a busy machine the clock on the wall says nothing about the command.
    times = []
    for _ in range(5):
        begun = os.times()
        done = run(*command.split(), "--help")
        ended = os.times()
        times.append(ended.children_user - begun.children_user + ended.children_system - begun.children_system)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: gradveil {command}".rstrip())
        assert "\\[" not in done.stdout, "brackets are escaped"
        if times[-1] < 0.5:
            break
    assert min(times) < 0.5, f"--help took {min(times):.2f} s of a processor at best"


def test_help_shows_every_command_and_option_the_documentation_has(capsys: Captured) -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert main(["audit", "--help"]) == 0
    said = capsys.readouterr().out
    options = {word.strip(",") for word in said.split() if word.startswith("--") and len(word) > 2} - {"--help", "--dry-run,"}
    assert [option for option in sorted(options) if f"`{option}`" not in text] == []
    assert [command for command in COMMANDS[1:] if f"`gradveil {command}" not in text] == []


def test_without_a_command_it_shows_help(capsys: Captured) -> None:
    assert main([]) == 0
    assert "audit" in capsys.readouterr().out


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert main(["version"]) == 0
    assert main(["version", "--json"]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith(f"gradveil {gradveil.__version__} · python 3.")
    assert json.loads("".join(rest))["gradveil"] == gradveil.__version__


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_listed_and_every_method_shown(kind: str, capsys: Captured) -> None:
    assert main(["list", kind]) == 0
    listed = capsys.readouterr().out
    assert main(["list", kind, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found
    for entry in found:
        assert f"{entry['name']} " in listed
        assert main(["show", entry["name"]]) == 0
        shown = capsys.readouterr().out
        assert entry["name"] in shown
        assert entry["summary"] in shown


def test_a_kind_may_be_named_in_the_singular() -> None:
    assert entries("loss") == entries("losses")
    assert entries("defense") == entries("defenses")


def test_show_tells_what_a_user_must_know(capsys: Captured) -> None:
    assert main(["show", "gaussian_noise(std=0.1)"]) == 0
    said = capsys.readouterr().out
    for words in (
        "settings: sharers=1, std=0.01",
        "gaussian_noise(std=0.0001) < ",
        "weakness: ",
        "acts on: update",
        "https://arxiv.org",
    ):
        assert words in said
    assert "differential privacy: no guarantee by itself\n" in said
    assert main(["show", "dp_sgd"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("differential privacy:") + 1
    assert (
        lines[first + 4] == "  noise_multiplier=1.0: ε = 4.38 at δ = 1e-05 per record after 1 release (exact)"
    )  # one line per rung
    assert main(["show", "quick"]) == 0
    shown = capsys.readouterr().out
    assert "member: inverting_gradients(" in shown
    assert shown.startswith(f"{resolve('quick').name} (ensembles)"), "the version that the short name means comes first"


def test_init_writes_a_plan_and_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--data", "digits", "--model", "mlp"]) == 0
    assert "1797 records of shape 1×8×8 in 10 classes" in capsys.readouterr().out
    assert main(["init"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["init", "--force", "--json", "-o", "other.toml"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == "other.toml"


def test_report_writes_the_file_asked_for(tmp_path: Path, capsys: Captured) -> None:
    folder = make_results(tmp_path / "r", builtin=False)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert main(["report", str(folder), "-o", str(tmp_path / "x.html"), "--private", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "x.html"), "private": True}
    (folder / "run.json").write_text("{")
    assert main(["report", str(folder)]) == 2
    assert "damaged" in capsys.readouterr().err


def test_check_passes_what_is_right_and_fails_what_is_wrong(tmp_path: Path, capsys: Captured) -> None:
    assert main(["check", "gaussian_noise(std=0.1)"]) == 0
    assert "ok       card_is_complete" in capsys.readouterr().out
    assert main(["check", "psnr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "metric"
    assert main(["check", "linear_layer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "attack"
    code = (
        "from dataclasses import dataclass\nfrom gradveil.defenses import Defense, DefenseCard\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Defense):\n"
        "    '''Does nothing, and says nothing about it.'''\n    card = DefenseCard(name='mine', summary='Mine')\n"
    )
    (tmp_path / "mine.py").write_text(code)
    assert main(["check", f"{tmp_path}/mine.py:Mine"]) == 3
    said = capsys.readouterr()
    assert "FAILED   card_is_complete" in said.out
    assert "promises of a defense" in said.err
    assert main(["check", "lpips"]) in (0, 3)


def test_a_reader_that_leaves_is_neither_a_leak_nor_a_pass() -> None:
    command = f"{sys.executable} -m gradveil show lenet | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_show_gives_measurements_with_four_digits(capsys: Captured) -> None:
    assert main(["show", "evaluation-32"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("measured: ")]
    assert "held_out_by_tiles=(mean=[0.0139, " in line and "{" not in line
    assert not re.search(r"\d\.\d{7}", line)
