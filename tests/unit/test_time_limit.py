"""Tests that take too long warn, then fail, unless they are marked slow; a busy or slow machine makes none fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import time_limit

ROOT = Path(time_limit.__file__).resolve().parents[1]
CONFTEST = """
from tests import time_limit

time_limit.LIMIT = 0.1
time_limit.pace = lambda: {pace}


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long")
    config.pluginmanager.register(time_limit)
"""
TESTS = """
import subprocess, sys, time
import pytest

BUSY = "import time\\nwhile time.process_time() < 0.2: pass"


def work(seconds=0.2):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture
def laborious():
    work()


def test_quick(): ...
def test_waits(): time.sleep(0.2)
def test_works(): work()
def test_is_close(): work(0.12)
def test_lets_another_work(): subprocess.run([sys.executable, "-c", BUSY], check=True)
def test_is_set_up(laborious): ...
def test_is_wrong_too():
    work()
    assert 1 == 2
def test_imports_torch_s_late_part():
    sys.modules["torch._dynamo"] = sys
    work()
def test_comes_after_that(): work()
@pytest.mark.slow
def test_is_marked(laborious): work()
"""


def outcome(folder: Path, pace: float) -> tuple[dict[str, str], str]:
    """Run the tests above under the limit of a machine with a pace; return what became of each and all that was said."""
    (folder / "conftest.py").write_text(CONFTEST.format(pace=pace), encoding="utf-8")
    (folder / "test_some.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder), "test_some.py"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_some\.py::(\w+)", done.stdout, re.MULTILINE)
    return {name: what for what, name in found}, done.stdout


def test_a_test_that_takes_too_long_fails(tmp_path: Path) -> None:
    became, said = outcome(tmp_path, 1.0)
    assert became == {
        "test_quick": "PASSED",
        "test_waits": "PASSED",
        "test_works": "FAILED",
        "test_is_close": "PASSED",
        "test_lets_another_work": "FAILED",
        "test_is_set_up": "ERROR",
        "test_is_wrong_too": "FAILED",
        "test_imports_torch_s_late_part": "PASSED",
        "test_comes_after_that": "FAILED",
        "test_is_marked": "PASSED",
    }, said
    assert len(re.findall(r"^the test took 0\.\d s of processor time, more than 0\.1 s: make it quicker", said, re.M)) == 3
    assert "setting up the test took 0." in said and "assert 1 == 2" in said
    warned = said.partition("warnings summary")[2]
    assert "test_some.py::test_is_close" in warned and "PytestWarning: the test took 0.1 s of processor time" in warned
    assert said.count("PytestWarning") == 1, "who fails or is quick is not warned"


def test_on_a_slow_machine_the_same_tests_have_more_time(tmp_path: Path) -> None:
    became, said = outcome(tmp_path, 10.0)
    assert {name for name, what in became.items() if what != "PASSED"} == {"test_is_wrong_too"}, said


def test_the_pace_is_what_an_errand_takes_beside_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([9.0, 0.06, 0.05, 0.04, 0.05])
    monkeypatch.setattr(time_limit, "errand", lambda: next(took))
    assert time_limit.pace() == pytest.approx(0.05 / time_limit.REFERENCE)
    monkeypatch.setattr(time_limit, "errand", lambda: 0.001)
    assert time_limit.pace() == 1, "a quick machine has no less time"


@pytest.mark.usefixtures("untouched_global_rng")
def test_an_errand_is_work_of_the_order_of_the_reference() -> None:
    assert 0.2 * time_limit.REFERENCE < min(time_limit.errand() for _ in range(5)) < 20 * time_limit.REFERENCE


def test_the_limit_is_kept_here(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.is_registered(time_limit)
    assert (time_limit.LIMIT, time_limit.GRACE) == (5.0, 1.5)
    assert any("of processor time" in each for each in pytestconfig.getini("filterwarnings")), "a warning must not be an error"
