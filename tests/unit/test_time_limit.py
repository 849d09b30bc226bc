"""Tests that take too long fail, unless they are marked slow; a busy machine makes none fail."""

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


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long")
    config.pluginmanager.register(time_limit)
"""
TESTS = """
import subprocess, sys, time
import pytest

BUSY = "import time\\nwhile time.process_time() < 0.3: pass"


def work():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass


@pytest.fixture
def laborious():
    work()


def test_quick(): ...
def test_waits(): time.sleep(0.3)
def test_works(): work()
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


def test_a_test_that_takes_too_long_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_some.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    said = dict(reversed(each) for each in re.findall(r"^(PASSED|FAILED|ERROR) test_some\.py::(\w+)", done.stdout, re.MULTILINE))
    assert said == {
        "test_quick": "PASSED",
        "test_waits": "PASSED",
        "test_works": "FAILED",
        "test_lets_another_work": "FAILED",
        "test_is_set_up": "ERROR",
        "test_is_wrong_too": "FAILED",
        "test_imports_torch_s_late_part": "PASSED",
        "test_comes_after_that": "FAILED",
        "test_is_marked": "PASSED",
    }, done.stdout
    assert len(re.findall(r"^the test took 0\.\d s of processor time, more than 0\.1 s: make it quicker", done.stdout, re.M)) == 3
    assert "setting up the test took 0." in done.stdout and "assert 1 == 2" in done.stdout


def test_the_limit_is_kept_here(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.is_registered(time_limit)
    assert time_limit.LIMIT == 5.0
