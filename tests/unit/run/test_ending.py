"""A run that is told to end takes its processes with it and says one sentence."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.run.processes import Forked, children, gone, wait_for
from tests.unit.run.test_pool import COMMAND


# Ctrl-C goes to all processes of a terminal; a scheduler or a container tells the first one alone to end.
@pytest.mark.parametrize(("end", "code"), [(lambda pid: os.killpg(pid, signal.SIGINT), 130), (lambda pid: os.kill(pid, 15), 143)])
def test_all_processes_end_with_one_sentence(end: Callable[[int], None], code: int, tmp_path: Path) -> None:
    endless = [word.replace("steps=5,", "steps=1000000,") for word in COMMAND]  # it must not end before it is stopped
    process = Forked.start([*endless, "--out", str(tmp_path / "out"), "--workers", "2"], tmp_path / "said")
    try:
        wait_for(lambda: len(children(process.pid)) > 1 or not Path("/proc/self").exists())
        helpers = children(process.pid)
        end(process.pid)
        wait_for(lambda: process.poll() is not None)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # it must not outlive the test
        raise
    assert (process.returncode, process.said.read_text()) == (
        code,
        "stopped; what is finished is kept, and the same command continues\n",
    )
    wait_for(lambda: all(gone(helper) for helper in helpers), 30)
