"""The map of tests to the lines they run: made once, kept, and made again for what changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.mutants.forks import in_children
from scripts.mutants.golden import golden_tests
from scripts.mutants.running import Lines, Reach
from scripts.mutants.sites import Mutant

FILE_SECONDS = 1800.0
BETWEEN = 3
"""Faults are looked for by this many tests of a function before the next function has its turn."""


@dataclass(frozen=True)
class Covering:
    """What is known of one test."""

    name: str
    seconds: float
    lines: Lines

    def covers(self, mutant: Mutant) -> bool:
        """Say whether it runs the statement with the fault."""
        first, last = mutant.lines
        return any(first <= line <= last for line in self.lines.get(mutant.path, ()))

    @property
    def effort(self) -> float:
        """Return what orders tests: the quick and specific first."""
        return (0.05 + self.seconds) * (100 + sum(len(each) for each in self.lines.values()))


def digest_of(paths: Iterable[Path]) -> str:
    """Return a digest of the contents of files."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(f"{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def ordered(tests: Sequence[Covering], mutant: Mutant) -> list[Covering]:
    """Return the tests that run the fault: quick and specific ones first, and the functions of tests take turns."""
    turns: dict[str, int] = {}
    ranked = []
    for test in sorted((each for each in tests if each.covers(mutant)), key=lambda each: each.effort):
        function = test.name.split("[")[0]
        turns[function] = turns.get(function, 0) + 1
        ranked.append(((turns[function] - 1) // BETWEEN, test.effort, test))
    return [test for _, _, test in sorted(ranked, key=lambda each: each[:2])]


def build_map(
    items: Sequence[pytest.Item], package: Path, rooms: Sequence[str], kept: Path, workers: int
) -> dict[str, list[Covering]]:
    """Return what is known of the tests of each file; files are run again when they, or the code they reach, changed.

    Golden tests, and those that fail or are skipped as the code stands, are left out.
    """
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    sources = {str(path.relative_to(package)): digest_of([path]) for room in rooms for path in (package / room).rglob("*.py")}
    known: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}

    def is_fresh(path: Path) -> bool:
        """New code is reached only from tests or code that changed, so it is enough to look at what was reached."""
        found = known.get(str(path), {"digest": "", "reached": {}})
        return bool(found["digest"] == digest_of([path]) and found["reached"].items() <= sources.items())

    def trace(path: Path) -> dict[str, Any]:
        return trace_file(by_file[path], Reach(package, rooms))

    stale = [path for path in by_file if not is_fresh(path)]
    print(f"tracing {len(stale)} of {len(by_file)} files of tests", flush=True)
    for path, ended in in_children(stale, trace, workers=workers, seconds=FILE_SECONDS):
        if ended.said is None:
            print(f"  {path.name} could not be traced: {ended.reason}", flush=True)
        tests = ended.said or {}
        reached = {name: sources[name] for each in tests.values() for name in each["lines"]}
        known[str(path)] = {"digest": digest_of([path]), "reached": reached, "tests": tests}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(known), encoding="utf-8")
    return {str(path): _read(known[str(path)]["tests"]) for path in by_file}


def trace_file(items: Sequence[pytest.Item], reach: Reach) -> dict[str, Any]:
    """Run the tests of one file under the tracer; return those that count."""
    left_out = golden_tests(items[0].path)
    items[0].config.pluginmanager.register(reach)
    found: dict[str, Any] = {}
    for item, following in zip(items, [*items[1:], None], strict=True):
        outcome, seconds, lines = reach.of_test(item, following)
        if outcome == "passed" and lines and getattr(item, "originalname", item.name) not in left_out:
            found[item.nodeid] = {"seconds": round(seconds, 3), "lines": {name: sorted(each) for name, each in lines.items()}}
    return found


def _read(tests: Mapping[str, Any]) -> list[Covering]:
    return [
        Covering(name, each["seconds"], {path: set(lines) for path, lines in each["lines"].items()})
        for name, each in tests.items()
    ]
