"""The command line in a process of its own, to be killed or told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gradveil
from gradveil.cli import main

SOURCE = Path(gradveil.__file__).resolve().parents[1]


def wait_for(happened: Callable[[], object], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)


@dataclass
class Forked:
    """The command in a fork of this process: a new interpreter takes seconds to import what is here already."""

    pid: int
    said: Path
    returncode: int | None = None

    @classmethod
    def start(cls, asked: Sequence[str], said: Path) -> Forked:
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
            code = main([*asked])
            sys.stderr.flush()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end, as a `subprocess.Popen` does."""
        wait_for(lambda: self.poll() is not None, timeout)
        return "", self.said.read_text()


Started = Forked | subprocess.Popen[str]


def start(asked: Sequence[str]) -> subprocess.Popen[str]:
    """Start the command as a user does, in a process group of its own."""
    places = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    # What a shell starts in the background ignores Ctrl-C, and so does all that it starts: a user's terminal does not.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return subprocess.Popen([sys.executable, "-m", "gradveil", *asked], env=environment, text=True, **pipes)
    finally:
        signal.signal(signal.SIGINT, before)


def start_quickly(asked: Sequence[str], said: Path) -> Started:
    """Start a command that differentiates: in a fork, which torch refuses where there is a GPU."""
    return start(asked) if torch.cuda.is_available() else Forked.start(asked, said)


def finish(process: Started, code: int) -> str:
    """Wait for the end; return what was said about errors."""
    try:
        _, errors = process.communicate(timeout=120)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # it must not outlive the test
        process.communicate(timeout=30)
        raise
    assert process.returncode == code, errors
    return errors


def kill(process: Started) -> None:
    """End a process that has no time to say anything."""
    os.kill(process.pid, signal.SIGKILL)
    finish(process, -signal.SIGKILL)


def children(pid: int) -> list[Path]:
    """Return the places of a process's children, where the system shows them."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [Path("/proc", child) for child in listed.read_text().split()] if listed.exists() else []


def gone(place: Path) -> bool:
    try:
        return (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
