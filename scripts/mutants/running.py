"""Run single collected tests inside one process, and see which lines they reach."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

Lines = dict[str, set[int]]


class Failures:
    """A plugin that notes what failed; a test that is skipped shows nothing, so it counts as such."""

    def __init__(self) -> None:
        """Start with none."""
        self.outcomes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a phase of a test ended."""
        self.outcomes.append(report.outcome)


def run_test(item: pytest.Item, following: pytest.Item | None) -> str:
    """Run one test and return ``passed``, ``failed`` or ``skipped``."""
    noted = Failures()
    item.config.pluginmanager.register(noted)
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    finally:
        item.config.pluginmanager.unregister(noted)
    return next((each for each in ("failed", "skipped") if each in noted.outcomes), "passed")


class Reach:
    """A tracer, and a plugin: the lines of some folders that run in a test.

    Frames of other files are asked about once, when they begin, so that the rest runs nearly as fast as without. What a fixture
    shared by several tests runs is run once and counted for all of them.
    """

    def __init__(self, package: Path, rooms: Sequence[str]) -> None:
        """Watch files in the rooms of a package."""
        self._root = str(package) + "/"
        self._wanted = tuple(f"{self._root}{room}/" for room in rooms)
        self.lines: Lines = {}
        self._shared: dict[str, Lines] = {}

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self._wanted):
            return None
        seen = self.lines.setdefault(name[len(self._root) :], set())

        def note(inner: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                seen.add(inner.f_lineno)
            return note

        return note

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Keep apart what a shared fixture runs, and count it again for later users of it."""
        if fixturedef.scope == "function":
            return (yield)
        before, self.lines = self.lines, {}
        try:
            return (yield)
        finally:
            _add(self._shared.setdefault(f"{fixturedef.baseid}|{fixturedef.argname}", {}), self.lines)
            self.lines = before

    def of_test(self, item: pytest.Item, following: pytest.Item | None) -> tuple[str, float, Lines]:
        """Run one test; return how it ended, how long it took and the lines it needs."""
        self.lines = {}
        begun = time.process_time()
        sys.settrace(self._enter)
        try:
            outcome = run_test(item, following)
        finally:
            sys.settrace(None)
        found: Lines = {}
        _add(found, self.lines)
        used: Any = getattr(item, "_fixtureinfo", None)
        for definitions in used.name2fixturedefs.values() if used else ():
            for each in definitions:
                _add(found, self._shared.get(f"{each.baseid}|{each.argname}", {}))
        return outcome, time.process_time() - begun, {name: lines for name, lines in found.items() if lines}


def _add(to: Lines, more: Lines) -> None:
    for name, lines in more.items():
        to.setdefault(name, set()).update(lines)
