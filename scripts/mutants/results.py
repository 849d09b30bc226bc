"""What became of the faults of a sample, kept in one file, and the table of it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.mutants.sites import ROOMS, Mutant

WANTED = 0.9
EQUIVALENT = Path(__file__).parent / "equivalent.toml"


@dataclass(frozen=True)
class Result:
    """How one fault fared.

    Attributes:
        killed: Whether a test noticed.
        by: The test, or how the process ended.
        seconds: What its tests took.
        tests: How many ran.
        cut: Whether the budget ended before the tests did.
        source: Digest of the file it was put into.
        suite: Digest of the tests that were there; a survivor is tried again when they change.
    """

    killed: bool
    by: str
    seconds: float
    tests: int
    cut: bool
    source: str
    suite: str


class Kept:
    """Results on disk, written after each fault, so that a run that was stopped goes on."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self._path = path
        self._found: dict[str, Result] = {}
        if path.is_file():
            self._found = {key: Result(**each) for key, each in json.loads(path.read_text(encoding="utf-8")).items()}

    def get(self, mutant: Mutant, source: str, suite: str) -> Result | None:
        """Return what still holds: of the same source, and for a survivor, of the same tests."""
        found = self._found.get(mutant.key)
        if found is None or found.source != source or not (found.killed or found.suite == suite):
            return None
        return found

    def put(self, mutant: Mutant, result: Result) -> None:
        """Keep a result."""
        self._found[mutant.key] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({key: asdict(each) for key, each in self._found.items()}, indent=1), encoding="utf-8")
        part.replace(self._path)


def equivalents(path: Path = EQUIVALENT) -> dict[str, str]:
    """Read the faults that change nothing, with the reason."""
    return {each["fault"]: each["why"] for each in tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])}


@dataclass(frozen=True)
class Tally:
    """Counts of one room, or of all."""

    killed: int
    survived: int
    equivalent: int

    @property
    def share(self) -> float:
        """Return the share that was killed of those that change something."""
        tried = self.killed + self.survived
        return self.killed / tried if tried else 1.0


def tally(mutants: Sequence[Mutant], results: Mapping[str, Result], harmless: Mapping[str, str]) -> Tally:
    """Count; a fault that a test notices is not equivalent, whatever the list says."""
    killed = sum(results[each.key].killed for each in mutants)
    equivalent = sum(not results[each.key].killed and each.key in harmless for each in mutants)
    return Tally(killed, len(mutants) - killed - equivalent, equivalent)


def table(mutants: Sequence[Mutant], results: Mapping[str, Result], harmless: Mapping[str, str], package: Path) -> Iterator[str]:
    """Say what survived, line by line, and the counts by room and in all."""
    for one in sorted(mutants, key=lambda each: (each.path, each.line)):
        result = results[one.key]
        if not result.killed and one.key not in harmless:
            old, new = one.diff((package / one.path).read_bytes())
            yield f"{one.path}:{one.line}  {one.kind}, {result.tests} tests ran{', cut short' if result.cut else ''}"
            yield f"  key {one.key}"
            yield f"  - {old}"
            yield f"  + {new}"
    yield f"{'room':<10} {'killed':>7} {'survived':>9} {'equivalent':>11} {'share':>7}"
    for room in (*ROOMS, ""):
        of_room = [each for each in mutants if not room or each.room == room]
        if of_room:
            counts = tally(of_room, results, harmless)
            yield f"{room or 'all':<10} {counts.killed:>7} {counts.survived:>9} {counts.equivalent:>11} {counts.share:>7.1%}"
