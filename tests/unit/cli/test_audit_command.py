"""``gradveil audit``: what it hands to the audit, what it prints, and how it ends."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gradveil.cli import main
from gradveil.run import pool as audit_run
from gradveil.run.pool import Progress
from gradveil.study.load import load_run
from gradveil.study.plan import Plan
from gradveil.study.run_result import Run
from tests.unit.report.example_results import DEFENSES, FAIL, Example, make_results

Captured = pytest.CaptureFixture[str]
SMALL = (Example("none", 15, None, 31.0), Example("pruning(rate=0.9)", 3, 9, 18.2))


class FakeAudit:
    """Stands in for `run_audit`: remembers what it was asked and writes made-up results."""

    def __init__(self, defenses: tuple[Example, ...] = SMALL, *, builtin: bool = True, missing: int = 0) -> None:
        self.defenses, self.builtin, self.missing = defenses, builtin, missing
        self.plan, self.settings = Plan(), dict[str, Any]()

    def __call__(self, plan: Plan, out: Path, **settings: Any) -> Run:
        self.plan, self.settings = plan, settings
        make_results(out, defenses=self.defenses, builtin=self.builtin, missing=self.missing)
        for count in range(3):
            settings["on_progress"](Progress(count, 2, 0, 0, "pruning(rate=0.9)"))
        return load_run(out)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeAudit:
    monkeypatch.chdir(tmp_path)
    made = FakeAudit()
    monkeypatch.setattr(audit_run, "run_audit", made)
    return made


def test_without_anything_it_runs_the_default_plan(fake: FakeAudit, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/gradveil", "audit", "--out", "a b"])
    assert main(["audit"]) == 0
    assert fake.plan == Plan.default()
    assert fake.settings["command"] == "gradveil audit --out 'a b'"
    said = capsys.readouterr()
    assert Path("audit-results/report.html").is_file()
    assert "Without a defense, the strongest attacker identified 15 of 16\u00a0records" in said.out
    assert "9/16  null" in said.out and "[27–77\u00a0%]" in said.out
    assert "seed 0" in said.out
    assert "report: audit-results/report.html" in said.out
    assert "seed 0 · results go to audit-results" in said.err
    assert "0/2 cells" in said.err and "2/2 cells" in said.err


def test_options_win_over_the_plan(fake: FakeAudit, capsys: Captured) -> None:
    Path("mine.toml").write_text('[audit]\nseed = 3\nrecords = 20\n[grid]\nbatch_size = 4\ndefense = ["none", "pruning"]\n')
    options = "--records 24 --seed 7 --batch-size 1 --batch-size 2 --local-steps 3 --ensemble standard --device cpu --workers 2"
    assert main(["audit", "mine.toml", *options.split(), "--defense", "gaussian_noise:ladder", "--quiet"]) == 0
    plan = fake.plan
    assert (plan.records, plan.seed, plan.batch_size, plan.local_steps, plan.device) == (24, 7, (1, 2), (3,), "cpu")
    assert (plan.ensemble, plan.defense) == (("standard",), ("gaussian_noise:ladder",))
    assert fake.settings["workers"] == 2
    assert Path("audit-mine/report.html").is_file()
    assert capsys.readouterr().err == ""


def test_the_plan_may_name_the_folder(fake: FakeAudit) -> None:
    Path("p.toml").write_text('[audit]\nout = "results/one"\n')
    assert main(["audit", "p.toml", "--quiet"]) == 0
    assert Path("results/one/report.html").is_file()
    assert main(["audit", "p.toml", "--quiet", "--out", "other"]) == 0
    assert Path("other/report.html").is_file()


def test_json_is_all_there_is_on_stdout(fake: FakeAudit, capsys: Captured) -> None:
    assert main(["audit", "--json", "--out", "o", "--fail-if", "identified>0.9"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seed"], found["out"], found["report"], found["missing"]) == (0, "o", "o/report.html", 0)
    assert [cell["verdict"] for cell in found["cells"]] == ["broken", "broken"]
    assert found["cells"][1]["informed"]["count"] == 9
    assert found["limits"] == {"passed": True, "violations": [], "doubts": []}


def test_a_leak_above_the_limit_ends_with_1_after_the_report_is_written(fake: FakeAudit, capsys: Captured) -> None:
    assert main(["audit", "--fail-if", "identified>0.05", "--out", "o"]) == 1
    said = capsys.readouterr()
    assert Path("o/report.html").is_file()
    assert "error: pruning(rate=0.9) is beyond identified>0.05: 9 of 16 records identified" in said.err
    assert "note: 16 records cannot show that identified>0.05 holds, even if attackers only guess; it takes 59" in said.err
    assert "9/16" in said.out


def test_a_failed_trust_check_ends_with_3_where_a_limit_was_asked_for(
    fake: FakeAudit, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    doubtful = (SMALL[0], Example("pruning(rate=0.9)", 0, 0, 9.0, checks=[FAIL]))
    monkeypatch.setattr(audit_run, "run_audit", FakeAudit(doubtful))
    assert main(["audit", "--out", "o", "--quiet"]) == 0
    assert "no verdict" in capsys.readouterr().out
    assert main(["audit", "--out", "o", "--quiet", "--fail-if", "identified>0.5"]) == 3
    assert "a trust check failed" in capsys.readouterr().err


def test_cells_that_are_not_done_are_said_so(fake: FakeAudit, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(audit_run, "run_audit", FakeAudit(missing=1))
    assert main(["audit", "--out", "o", "--quiet"]) == 0
    assert "This run is not finished: 1 of 2\u00a0cells are done" in capsys.readouterr().out
    assert main(["audit", "--out", "o", "--quiet", "--fail-if", "identified[none]>0.999"]) == 3
    assert main(["audit", "--out", "o", "--quiet", "--fail-if", "identified[none]>0.5"]) == 1


def test_pictures_of_users_need_private(fake: FakeAudit, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(audit_run, "run_audit", FakeAudit(builtin=False))
    assert main(["audit", "--out", "o", "--quiet"]) == 0
    assert not Path("o/report-private.html").exists()
    assert "data:image" not in Path("o/report.html").read_text()
    assert main(["audit", "--out", "o", "--quiet", "--private"]) == 0
    assert "data:image" in Path("o/report-private.html").read_text()
    assert "data:image" not in Path("o/report.html").read_text()
    assert "report private: o/report-private.html" in capsys.readouterr().out


def test_names_are_not_read_as_markup(fake: FakeAudit, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    odd = (*SMALL, Example("mine.py:[red]Odd[/red](x=1)", 1, 1, 9.0))
    monkeypatch.setattr(audit_run, "run_audit", FakeAudit(odd))
    assert main(["audit", "--out", "o", "--quiet"]) == 0
    assert "mine.py:[red]Odd[/red](x=1)" in capsys.readouterr().out


def test_a_captured_update_is_handed_over(fake: FakeAudit, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    asked: dict[str, Any] = {}

    def audit_captured(update: Path, cell: Any, out: Path, **settings: Any) -> Any:
        asked.update(update=update, cell=cell, **settings)
        return types.SimpleNamespace(out=out, record={}, explains=True, sentences=lambda: ["The nearest record is row 3."])

    module = types.ModuleType("gradveil.audit.captured")
    module.audit_captured = audit_captured  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gradveil.audit.captured", module)
    Path("u.safetensors").write_bytes(b"x")
    assert main(["audit", "--update", "u.safetensors", "--out", "o", "--model", "mlp", "--quiet"]) == 0
    assert (asked["update"], asked["cell"].defense, asked["cell"].model) == (Path("u.safetensors"), "none", "mlp")
    assert main(["audit", "--update", "u.safetensors", "--out", "o", "--defense", "top_k(keep=0.1)", "--quiet"]) == 0
    assert asked["cell"].defense == "top_k(keep=0.1)"
    assert "The nearest record is row 3." in capsys.readouterr().out
    assert main(["audit", "--update", "u.safetensors", "--fail-if", "identified>0.05"]) == 2
    assert "needs the truth" in capsys.readouterr().err


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--data digits --model mlp --defense none --ensemble dlg(steps=20) --records 4 --dry-run"
    options = words.split()
    assert main(["audit", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cells"], found["steps"], found["seed"], found["estimate"]) == (1, 20 * (4 + 2), 0, True)
    assert main(["audit", *options]) == 0
    said = capsys.readouterr().out
    assert "1\u00a0cell, 120 optimisation steps" in said
    assert "This is an estimate" in said
    assert "seed 0" in said
    assert list(tmp_path.iterdir()) == []


def test_a_real_audit_runs_resumes_and_redoes_a_damaged_cell(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "o"
    options = "--data digits --model mlp --defense none --defense pruning(rate=0.5) --records 3 --device cpu --workers 1"
    searched = ["--ensemble", "inverting_gradients(steps=3, signed=False)", "--lists", "16"]
    command = ["audit", *options.split(), *searched, "--out", str(out)]
    assert main([*command, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    files = {path.name: path.read_bytes() for path in sorted((out / "cells").iterdir())}
    assert len(first["cells"]) == 2
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == first["cells"]
    assert {path.name: path.read_bytes() for path in sorted((out / "cells").iterdir())} == files

    damaged = out / "cells" / f"{first['cells'][0]['key']}.json"
    damaged.write_bytes(files[damaged.name][:100])
    assert main([*command, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == first["cells"]
    again = {path.name: path.read_bytes() for path in sorted((out / "cells").iterdir())}
    assert again.pop(f"{damaged.name}.corrupt") == files[damaged.name][:100]
    same = [name for name in files if not name.endswith("timing.json")]
    assert {name: again[name] for name in same} == {name: files[name] for name in same}


def test_the_made_up_run_has_every_row(fake: FakeAudit, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(audit_run, "run_audit", FakeAudit(DEFENSES))
    assert main(["audit", "--out", "o", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert all(example.spelling in said for example in DEFENSES)
