"""A run that is told to end takes its processes with it and says one sentence."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradveil.cli import main
from tests.unit.run.test_pool import COMMAND, children, gone, wait_for


@dataclass
class Forked:
    """The command in a fork of this process: a new interpreter takes seconds to import what is here already."""

    pid: int
    said: Path
    returncode: int | None = None

    @classmethod
    def start(cls, out: Path, asked: Sequence[str]) -> Forked:
        said = out.with_suffix(".said")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which this process has none of that matter
            pid = os.fork()
        if pid:
            return cls(pid, said)
        code = 99
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.stdout, sys.stderr = open(os.devnull, "w"), said.open("w")  # noqa: SIM115
            code = main([*asked, "--out", str(out), "--workers", "2"])
            sys.stderr.flush()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode


# Ctrl-C goes to all processes of a terminal; a scheduler or a container tells the first one alone to end.
@pytest.mark.parametrize(("end", "code"), [(lambda pid: os.killpg(pid, signal.SIGINT), 130), (lambda pid: os.kill(pid, 15), 143)])
def test_all_processes_end_with_one_sentence(end: Callable[[int], None], code: int, tmp_path: Path) -> None:
    endless = [word.replace("steps=5,", "steps=1000000,") for word in COMMAND]  # it must not end before it is stopped
    process = Forked.start(tmp_path / "out", endless)
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
