"""Work in forked children of one warm process: what they change is gone with them, and what they cost is a fork."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Task = TypeVar("Task")


@dataclass
class _Child:
    process: int
    pipe: int
    task: Any
    until: float
    said: bytes = b""


@dataclass(frozen=True)
class Ended:
    """How a child ended: with what it said, or None where it was stopped or broke, for the reason given."""

    said: Any
    reason: str = ""


def in_children(
    tasks: Iterable[Task], work: Callable[[Task], Any], *, workers: int, seconds: float
) -> Iterator[tuple[Task, Ended]]:
    """Do each task in a forked child of its own, some at a time; what ``work`` returns must be plain JSON."""
    waiting, running = iter(tasks), dict[int, _Child]()
    while True:
        while len(running) < workers and (task := next(waiting, None)) is not None:
            child = _start(task, work, seconds)
            running[child.pipe] = child
        if not running:
            return
        ready, _, _ = select.select(list(running), [], [], 0.5)
        for pipe in ready:
            more = os.read(pipe, 1 << 16)
            running[pipe].said += more
            if not more:
                child = running.pop(pipe)
                yield child.task, _end(child)
        for child in list(running.values()):
            if time.monotonic() > child.until:
                os.killpg(child.process, signal.SIGKILL)


def _start(task: Any, work: Callable[[Any], Any], seconds: float) -> _Child:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        os.close(reader)
        _be_child(writer, task, work)
    os.close(writer)
    return _Child(process, reader, task, time.monotonic() + seconds)


def _be_child(writer: int, task: Any, work: Callable[[Any], Any]) -> None:
    """Work, say what came out, and leave without anything that the parent registered for its end."""
    status = 1
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        said = json.dumps({"said": work(task)})
        status = 0
    except BaseException:
        said = json.dumps({"broke": traceback.format_exc()})
    with os.fdopen(writer, "w") as pipe:
        pipe.write(said)
    os._exit(status)


def _end(child: _Child) -> Ended:
    os.close(child.pipe)
    _, status = os.waitpid(child.process, 0)
    if os.WIFSIGNALED(status):
        return Ended(None, signal.Signals(os.WTERMSIG(status)).name)
    answer = json.loads(child.said)
    return Ended(None, answer["broke"]) if "broke" in answer else Ended(answer["said"])
