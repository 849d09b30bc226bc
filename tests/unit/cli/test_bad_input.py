"""Bad input on the command line: one clear sentence on stderr, exit code 2, nothing on stdout, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gradveil.cli import entry, main
from gradveil.run import pool as audit_run

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in; running an audit there is a fault."""

    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError("the audit was started")

    monkeypatch.setattr(audit_run, "run_audit", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(capsys: Captured, *arguments: str, code: int = 2) -> str:
    """Run a command that must fail, and return what it says."""
    assert main(list(arguments)) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("adit", "Did you mean 'audit'?"),
        ("audit --recods 3", "Did you mean "),
        ("audit --records few", "'few' is not a valid integer"),
        ("audit --records 0", "records is 0; give a whole number of at least 1"),
        ("audit --records 9999", "the audit needs 9999 records and 'photos' has 501"),
        ("audit --lists 9999", "lists is 9999, and 'photos' has 501 records to put on a list; lower it"),
        ("audit --seed -3", "seed is -3"),
        ("audit --seed 99999999999999999999", "give a whole number below 9007199254740992"),
        ("audit --workers 0", "--workers is 0"),
        ("audit --out ", "--out is empty"),
        ("train --out ", "--out is empty"),
        ("audit --parts left_rigth", "did you mean 'left_right'?"),
        ("audit --batch-size 0", "batch_size is 0"),
        ("audit --data photo", "did you mean 'photos'?"),
        ("audit --data nowhere.npz", "neither built-in data nor a file or folder"),
        ("audit --data photos --scale minmx", "did you mean 'minmax'?"),
        ("audit --data photos --scale foo", "known: auto, minmax, none"),
        ("audit --data photos --scale minmax", "takes no setting but limit"),
        ("audit --data photos --read size=8", "takes no setting but limit"),
        ("audit --data photos --read sise=8", "did you mean 'size'?"),
        ("train --data photos --read size", "write name=value"),
        ("risk --data photos --read colour=blue", "write true or false"),
        ("audit --labels nope.csv", "there is no label file 'nope.csv'"),
        ("audit --model lenett", "did you mean 'lenet'?"),
        ("audit --model net.py:make", "there is no file 'net.py'"),
        ("audit --model nowhere.net:make", "cannot import 'nowhere.net'"),
        ("audit --weights nope.safetensors", "there is no weights file 'nope.safetensors'"),
        ("audit --defense gausian_noise", "did you mean 'gaussian_noise'?"),
        ("audit --defense gaussian_noise(sdt=1)", "did you mean 'std'?"),
        ("audit --defense pruning(rate=2)", "rate is 2"),
        ("audit --ensemble quik", "did you mean 'quick"),
        ("audit --device gpu", "device is 'gpu'"),
        ("audit --fail-if identified", "write it as identified>0.05"),
        ("audit --fail-if identified[top_k]>0.05", "fits none of the defenses"),
        ("audit nowhere.toml", "cannot read the plan 'nowhere.toml'"),
        ("audit --dry-run --defense gausian_noise", "did you mean 'gaussian_noise'?"),
        ("audit --update nowhere.safetensors", "there is no file 'nowhere.safetensors'"),
        ("list", "missing argument 'KIND'"),
        ("list defnses", "did you mean 'defenses'?"),
        ("show soteri_", "there is no method called 'soteri_'"),
        ("show gausian_noise", "did you mean 'gaussian_noise'?"),
        ("report nowhere", "there is no results folder 'nowhere'"),
        ("check gausian_noise", "did you mean 'gaussian_noise'?"),
        ("check nowhere:Mine", "cannot import 'nowhere'"),
        ("check gradveil.errors:suggest", "has no card"),
        ("check gradveil.records:Batch", "is none of a defense"),
        ("init --data photo", "did you mean 'photos'?"),
        ("init --modle lenet", "Did you mean "),
    ],
)
def test_a_wrong_request_gets_one_sentence(here: Path, capsys: Captured, arguments: str, says: str) -> None:
    assert says in complaint(capsys, *arguments.split(" "))
    assert list(here.iterdir()) == []


def test_wrong_data_gets_one_sentence(here: Path, capsys: Captured) -> None:
    good = np.random.default_rng(0).random((20, 8, 8, 3), dtype=np.float32)
    labels = np.arange(20) % 2
    cases = {
        "nan": ({"x": np.where(good > 0.9, np.nan, good).astype(np.float32), "y": labels}, "are NaN or infinite"),
        "range": ({"x": good * 300, "y": labels}, "must lie in [0, 1]"),
        "empty": ({"x": good[:0], "y": labels[:0]}, "is empty"),
        "few": ({"x": good[:4], "y": labels[:4]}, "needs 16 records"),
        "labels": ({"x": good, "y": labels[:7]}, "20 inputs but 7 labels"),
        "none": ({"x": good}, "has no labels"),
        "shape": ({"x": good[0, 0, 0], "y": labels}, ""),
    }
    for name, (arrays, says) in cases.items():
        np.savez(here / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        assert says in complaint(capsys, "audit", "--data", f"{name}.npz")
    Path("torn.npz").write_bytes(Path("nan.npz").read_bytes()[:200])
    assert "damaged" in complaint(capsys, "audit", "--data", "torn.npz")
    assert not [path for path in here.iterdir() if path.suffix != ".npz"]


def test_a_model_that_does_not_fit_gets_one_sentence(here: Path, capsys: Captured) -> None:
    Path("net.py").write_text(
        "from torch import nn\n"
        "def wrong(classes): return nn.Sequential(nn.Flatten(1), nn.Linear(7, classes))\n"
        "def broken(): return 1 / 0\n"
        "def leaving(): raise SystemExit(0)\n"
        "def other(): return 3\n"
    )
    Path("syntax.py").write_text("def make(:\n")
    for name, says in {
        "net.py:wrong": "fails on inputs of shape",
        "net.py:broken": "ZeroDivisionError",
        "net.py:leaving": "SystemExit",
        "net.py:other": "not a torch.nn.Module",
        "net.py:mak": "has no 'mak'",
        "syntax.py:make": "SyntaxError",
    }.items():
        assert says in complaint(capsys, "audit", "--model", name)
    assert "SyntaxError" in complaint(capsys, "audit", "--defense", "syntax.py:make")
    assert "SyntaxError" in complaint(capsys, "check", "syntax.py:make")


def test_a_plan_with_a_typo_gets_one_sentence_with_its_place(here: Path, capsys: Captured) -> None:
    Path("plan.toml").write_text("[grid]\nbatchsize = 4\n")
    said = complaint(capsys, "audit", "plan.toml")
    assert said == "error: plan.toml: [grid] has no key 'batchsize'; did you mean 'batch_size'?\n"
    assert [path.name for path in here.iterdir()] == ["plan.toml"]


def test_a_captured_update_needs_one_setting(here: Path, capsys: Captured) -> None:
    Path("update.safetensors").write_bytes(b"")
    said = complaint(capsys, "audit", "--update", "update.safetensors", "--batch-size", "1", "--batch-size", "2")
    assert "the plan has 2 cells" in said


def test_a_fault_of_ours_is_one_sentence_and_4(capsys: Captured, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    def fail(**settings: object) -> None:
        raise KeyError("something\nodd")

    monkeypatch.setattr(entry, "app", fail)
    monkeypatch.delenv("GRADVEIL_TRACEBACK", raising=False)
    assert "GRADVEIL_TRACEBACK=1" in complaint(capsys, "audit", code=4)
    monkeypatch.setenv("GRADVEIL_TRACEBACK", "1")
    assert main(["audit"]) == 4
    assert "Traceback" in capsys.readouterr().err


def test_too_little_memory_is_said_so(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 3 GiB")):

        def fail(error: Exception = error, **settings: object) -> None:
            raise error

        monkeypatch.setattr(entry, "app", fail)
        assert "lower records or batch sizes" in complaint(capsys, "audit")


def test_ctrl_c_says_that_nothing_is_lost(capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(audit_run, "run_audit", stop)
    assert main(["audit", "--defense", "none", "--out", str(tmp_path), "--quiet"]) == 130
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "stopped; what is finished is kept, and the same command continues\n")


def test_json_does_not_hide_errors(here: Path, capsys: Captured) -> None:
    assert "did you mean" in complaint(capsys, "list", "defnses", "--json")
    assert main(["list", "losses", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
