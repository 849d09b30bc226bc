"""A script without a guard is run to its end in one process, and told; one with a guard uses all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradveil.run import pool
from gradveil.study.plan import Plan

SNIPPET = """
import gradveil
from pathlib import Path
{guard}
{indent}plan = gradveil.Plan.default(records=2, defense=["none", "pruning(rate=0.9)"], data=["digits"], model=["mlp(hidden=16)"],
{indent}                             ensemble=["linear_layer"], risk="off", device="cpu")
{indent}run = gradveil.run_audit(plan, Path("results"), workers=2)
{indent}print(run.cell(defense="none").identified.count)
"""
ASKED = """
import warnings
from gradveil.run.guard import starts_again_in_workers

def look():
    return starts_again_in_workers()

{guard}
{indent}print(look())
"""
GUARDS = {
    "if __name__ == '__main__':": False,
    "if '__main__' == __name__:": False,
    "try:\n  if __name__ == '__main__':": False,
    "if True:": True,
    "for _ in range(1):": True,
    "with warnings.catch_warnings():": True,
    "if __name__ != '__mp_main__':": True,
}


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    return subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(("guard", "again"), GUARDS.items())
def test_what_would_run_again_is_read_off_the_script(tmp_path: Path, guard: str, again: bool) -> None:
    end = "\nfinally:\n  pass\n" if guard.startswith("try") else ""
    said = run(tmp_path, ASKED.format(guard=guard, indent="    ") + end)
    assert (said.stdout.strip(), said.stderr) == (str(again), "")


def test_without_a_guard_no_process_is_started_and_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(pool, "_in_processes", lambda todo, *_: done.append(f"{len(todo)} in processes"))
    monkeypatch.setattr(pool, "_one_by_one", lambda todo, *_: done.append(f"{len(todo)} here"))
    monkeypatch.setattr(pool, "load_run", lambda out: None)
    plan = Plan.default(records=2, defense=["none", "dgp"], data="digits", model="mlp(hidden=8)", device="cpu")
    monkeypatch.setattr(pool, "starts_again_in_workers", lambda: True)
    with pytest.warns(UserWarning, match="put the call under that line to use all cores"):
        pool.run_audit(plan, tmp_path, workers=2)
    monkeypatch.setattr(pool, "starts_again_in_workers", lambda: False)
    pool.run_audit(plan, tmp_path, workers=2)
    assert done == ["2 here", "2 in processes"]


@pytest.mark.slow
def test_a_script_without_a_guard_ends_as_its_reader_expects(tmp_path: Path) -> None:
    said = run(tmp_path, SNIPPET.format(guard="", indent=""))
    assert said.returncode == 0 and said.stdout in ("1\n", "2\n")
    assert "Traceback" not in said.stderr and said.stderr.count("outside `if __name__ == '__main__':`") == 1


@pytest.mark.slow
def test_a_script_with_a_guard_uses_processes_and_says_nothing(tmp_path: Path) -> None:
    said = run(tmp_path, SNIPPET.format(guard="if __name__ == '__main__':", indent="    "))
    assert (said.returncode, said.stdout, said.stderr) == (0, "2\n", "")


def test_without_a_script_nothing_runs_again(tmp_path: Path) -> None:
    text = "from gradveil.run.guard import starts_again_in_workers as look; print(look())"
    for command in ([sys.executable, "-c", text], [sys.executable, "-"]):
        said = subprocess.run(command, input=text, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (said.stdout, said.stderr) == ("False\n", "")


README = Path(__file__).parents[3] / "README.md"


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def test_the_readmes_example_has_its_guard(tmp_path: Path) -> None:
    """Its `run_audit` is a look at whether workers would run the script again."""
    asks = "gradveil = types.SimpleNamespace(Plan=types.SimpleNamespace(default=lambda **_: None), run_audit=lambda *_: look())\n"
    head = f"import types\nfrom gradveil.run.guard import starts_again_in_workers as look\n{asks}"
    lines = example().replace("import gradveil\n", head).splitlines()
    (call,) = [place for place, line in enumerate(lines) if "run_audit(plan" in line]
    said = run(tmp_path, "\n".join([*lines[: call + 1], "    print(run)"]))
    assert (said.stdout, said.stderr) == ("False\n", "")


@pytest.mark.slow
def test_the_readmes_example_runs_as_a_script_with_all_processes(tmp_path: Path) -> None:
    few = 'records=2, data=["digits"], model=["mlp(hidden=16)"], ensemble=["linear_layer"], risk="off", lists="16", device="cpu"'
    said = run(tmp_path, example().replace("records=16", few))
    assert (said.returncode, said.stderr) == (0, ""), "no warning that it has no guard, and no traceback"
    assert "count=2" in said.stdout and (tmp_path / "results" / "report.html").exists()
