"""Put small faults into the package, one at a time, and see whether the tests that reach them notice.

python -m scripts.mutants --sample practice
python -m scripts.mutants --sample third --workers 2

A fault lives in one forked process, in memory; no file is touched. Killed means that a test that runs the faulty line fails, and
passes without the fault; tests that compare with golden numbers do not count, and a time-out does. Results are kept in the output
folder and a run that was stopped goes on there. Exits with 1 where fewer than nine in ten are killed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gradveil
from scripts.mutants.cover import Covering, build_map, digest_of, ordered
from scripts.mutants.forks import Ended, in_children
from scripts.mutants.results import WANTED, Kept, Result, equivalents, table, tally
from scripts.mutants.running import run_test
from scripts.mutants.sample import SEEDS, draw
from scripts.mutants.sites import ROOMS, Mutant, find_mutants
from scripts.mutants.trial import BUDGET, Functions, first_failure, import_rooms, live_functions, put_in

PACKAGE = Path(gradveil.__file__).parent
ROOT = Path(__file__).parents[2]
# Rooms below the five in which faults are made, tests of files rather than of code, and whatever runs in other processes.
LEFT_OUT = ("architecture", "browser", *(f"unit/{name}" for name in ("benchmarks", "examples", "scripts", "storage", "wire")))
STUCK = 600.0


class Session:
    """A plugin that takes the collected tests from pytest and runs faults against them instead."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Hold what was asked."""
        self._options = options
        self.status = 2

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Work, in place of running the tests."""
        from tests import time_limit

        time_limit.LIMIT = 1e9  # a traced test, or one of many at once, takes longer than alone
        import_rooms(PACKAGE, ROOMS)
        self.status = run(self._options, session.items)
        return True


def run(options: argparse.Namespace, items: Sequence[pytest.Item]) -> int:
    """Try the sample, print what came out and return the exit code."""
    mutants = draw(find_mutants(PACKAGE), options.sample, options.size)
    mutants = [each for each in mutants if each.room in options.rooms]
    by_file = build_map(items, PACKAGE, ROOMS, options.out / "map.json", options.workers)
    if options.map_only:
        return 0
    results = try_all(mutants, items, [each for tests in by_file.values() for each in tests], options)
    harmless = equivalents()
    print("\n".join(table(mutants, results, harmless, PACKAGE)))
    return 0 if tally(mutants, results, harmless).share >= WANTED else 1


def try_all(
    mutants: Sequence[Mutant], items: Sequence[pytest.Item], tests: Sequence[Covering], options: argparse.Namespace
) -> dict[str, Result]:
    """Try each fault that has no result yet."""
    kept = Kept(options.out / "results.json")
    suite = digest_of({item.path for item in items})
    sources = {each.path: digest_of([PACKAGE / each.path]) for each in mutants}
    found = {each.key: kept.get(each, sources[each.path], suite) for each in mutants}
    left = [each for each in mutants if found[each.key] is None]
    print(f"{len(mutants)} faults of the {options.sample} sample, {len(left)} to try", flush=True)
    named = {item.nodeid: item for item in items}
    work = partial(try_one, items=named, tests=tests, functions=live_functions(PACKAGE), budget=options.budget)
    sound: dict[str, bool] = {}
    begun = time.monotonic()
    for number, (mutant, ended) in enumerate(in_children(left, work, workers=options.workers, seconds=STUCK), start=1):
        result = judge(mutant, ended, named, sound, sources[mutant.path], suite)
        found[mutant.key] = result
        kept.put(mutant, result)
        minutes = (time.monotonic() - begun) / 60
        word = "killed" if result.killed else "SURVIVED"
        print(f"{number}/{len(left)} {minutes:.1f} min {word} {mutant.path}:{mutant.line} {mutant.kind} {result.by}", flush=True)
    return {key: each for key, each in found.items() if each is not None}


def try_one(
    mutant: Mutant, *, items: dict[str, pytest.Item], tests: Sequence[Covering], functions: Functions, budget: float
) -> dict[str, Any]:
    """Try one fault, in a process of its own."""
    if not put_in(mutant, PACKAGE, functions):
        raise LookupError(f"{mutant.function} of {mutant.path} is not loaded")
    return first_failure(ordered(tests, mutant), items, budget)


def judge(mutant: Mutant, ended: Ended, items: dict[str, pytest.Item], sound: dict[str, bool], source: str, suite: str) -> Result:
    """Read how a trial ended; a test that fails without the fault as well has noticed nothing."""
    if ended.said is None:
        stopped = ended.reason.startswith("SIG")
        if not stopped:
            print(ended.reason, flush=True)
        return Result(stopped, ended.reason.strip().splitlines()[-1], BUDGET, 0, False, source, suite)
    killer = ended.said["killer"]
    if killer and killer not in sound:
        ((_, alone),) = in_children([killer], lambda name: run_test(items[name], None), workers=1, seconds=STUCK)
        sound[killer] = alone.said == "passed"
    if killer and not sound[killer]:
        killer, ended.said["cut"] = None, True
        print(f"a test that fails without any fault, too: {ended.said['killer']}", flush=True)
    said = ended.said
    return Result(killer is not None, killer or "", round(said["seconds"], 2), said["tests"], said["cut"], source, suite)


def main() -> int:
    """Read the options, let pytest collect, and work."""
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sample", choices=sorted(SEEDS), default="first", help="which published sample")
    parser.add_argument("--size", type=int, help="how many faults")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=ROOMS, help="only the faults of these rooms")
    parser.add_argument("--budget", type=float, default=BUDGET, help="processor seconds that the tests of one fault may take")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at once")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants", help="where results and the map are kept")
    parser.add_argument("--map-only", action="store_true", help="find out which tests reach what, and stop")
    options = parser.parse_args()
    session = Session(options)
    quiet = ["-qq", "--capture=no", "-p", "no:cacheprovider", "--no-header", "--no-summary"]
    left_out = [f"--ignore={ROOT / 'tests' / name}" for name in LEFT_OUT]
    folders = [str(PACKAGE), str(ROOT / "tests")]
    collected = pytest.main([*quiet, *left_out, f"--rootdir={ROOT}", *folders], plugins=[session])
    return session.status if collected in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED} else 2


if __name__ == "__main__":
    sys.exit(main())
