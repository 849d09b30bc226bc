"""Small faults: they are where they should be, they are drawn by a published seed, and a test that notices one is found."""

from __future__ import annotations

import ast
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradveil
from scripts.mutants.cover import Covering, ordered
from scripts.mutants.forks import in_children
from scripts.mutants.golden import golden_tests
from scripts.mutants.results import Kept, Result, equivalents, table, tally
from scripts.mutants.running import Reach
from scripts.mutants.sample import SIZE, draw
from scripts.mutants.signatures import read_signatures
from scripts.mutants.sites import ROOMS, Mutant, find_mutants, mutants_of, outermost_functions
from scripts.mutants.trial import live_functions, put_in

PACKAGE = Path(gradveil.__file__).parent
SOURCE = '''
def target(left: float, right: float, *, steps: int = 3, flip: bool = False) -> float:
    """Say nothing."""
    return left - right if flip else left + right + steps


def caller(first: float, second: float, count: int) -> float:
    """Say nothing, either."""
    total = 0.0
    for index in range(count):
        total += target(first, second, steps=count, flip=index > 1)
    return total
'''
CHANGES = {
    ("drop", "target(first, second, flip=index > 1)"),
    ("drop", "target(first, second, steps=count)"),
    ("swap", "target(second, first, steps=count, flip=index > 1)"),
    ("freeze", "target(1.0, second, steps=count, flip=index > 1)"),
    ("negate", "target(first, second, steps=count, flip=(not (index > 1)))"),
    ("count", "range((count) - 1)"),
    ("count", "target(first, second, steps=(count) + 1, flip=index > 1)"),
    ("other", "target(second, second, steps=count, flip=index > 1)"),
    ("early", "return first"),
}


@pytest.fixture
def made(tmp_path: Path) -> list[Mutant]:
    path = tmp_path / "room.py"
    path.write_text(SOURCE)
    return mutants_of(SOURCE.encode(), "attacks/room.py", read_signatures([path]))


@pytest.mark.parametrize(("kind", "text"), sorted(CHANGES))
def test_each_kind_of_fault_is_made(kind: str, text: str, made: list[Mutant]) -> None:
    changed = {each.apply(SOURCE.encode()).decode() for each in made if each.kind == kind and each.function == "caller"}
    assert any(text in each for each in changed)


def test_a_fault_is_named_once_and_compiles_to_something_else(made: list[Mutant]) -> None:
    assert len({each.key for each in made}) == len(made)
    for each in made:
        assert ast.dump(ast.parse(each.apply(SOURCE.encode()))) != ast.dump(ast.parse(SOURCE))
        assert each.lines[0] <= each.line <= each.lines[1]
    assert not [each for each in made if "Say nothing" in each.before]


def test_other_code_around_it_changes_no_name(made: list[Mutant]) -> None:
    moved = b"import math\n\n\n" + SOURCE.encode()
    path = "attacks/room.py"
    signatures = read_signatures([])
    assert {each.key for each in mutants_of(moved, path, signatures)} == {
        each.key for each in mutants_of(SOURCE.encode(), path, signatures)
    }
    assert {each.rank("a") for each in made} != {each.rank("b") for each in made}


@pytest.fixture(scope="module")
def everywhere() -> list[Mutant]:
    return find_mutants(PACKAGE, ("proofs", "verdict"))


def test_samples_are_layered_by_room_and_kind_and_share_nothing(everywhere: list[Mutant]) -> None:
    first, second = draw(everywhere, "first", 100), draw(everywhere, "second", 100)
    assert len(first) == len(second) == 100
    assert first == draw(list(reversed(everywhere)), "first", 100)
    assert not {each.key for each in first} & {each.key for each in second}
    there, drawn = (Counter((each.room, each.kind) for each in some) for some in (everywhere, first))
    assert drawn.keys() == there.keys()
    assert all(count >= min(there[layer], max(drawn.values()) - 1) for layer, count in drawn.items())


def test_every_equivalent_fault_has_a_reason_and_a_place() -> None:
    signatures = read_signatures(sorted(PACKAGE.rglob("*.py")))
    named = {fault.split("::")[0] for fault in equivalents()}
    keys = {each.key for path in named for each in mutants_of((PACKAGE / path).read_bytes(), path, signatures)}
    assert equivalents().keys() <= keys and all(path.split("/")[0] in ROOMS for path in named)
    assert all(len(why) > 20 for why in equivalents().values())
    assert len(equivalents()) <= 2 * SIZE / 10


GOLDEN_TESTS = """
import json
from pathlib import Path
NUMBERS = json.loads((Path(__file__).parents[2] / "golden" / "some.json").read_text())

def wanted(name): return NUMBERS[name]
def test_by_table(): assert 1 == NUMBERS["one"]
def test_by_helper(): assert 1 == wanted("one")
def test_by_thought(): assert 1 + 1 == 2
"""


def test_tests_of_golden_numbers_are_found(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(GOLDEN_TESTS)
    assert golden_tests(path) == {"test_by_table", "test_by_helper"}


def test_no_test_file_with_golden_numbers_escapes() -> None:
    root = Path(__file__).parents[2]
    for path in sorted((root / "unit").rglob("test_*.py")):
        if '"golden"' in path.read_text() and path != Path(__file__):
            assert golden_tests(path), path


def work(task: str) -> object:
    if task == "sleeps":
        time.sleep(60)
    if task == "breaks":
        raise ValueError("surprise")
    return [task, os.getpid()]


def test_children_answer_break_and_are_stopped() -> None:
    ended = dict(in_children(["answers", "breaks", "sleeps"], work, workers=3, seconds=2.0))
    assert ended["answers"].said[0] == "answers" and ended["answers"].said[1] != os.getpid()
    assert ended["breaks"].said is None and "surprise" in ended["breaks"].reason
    assert ended["sleeps"].said is None and ended["sleeps"].reason == "SIGKILL"


def test_a_fault_works_in_running_code_and_only_in_the_child() -> None:
    from gradveil.proofs import bounds

    found = [each for each in find_mutants(PACKAGE, ("proofs",)) if each.function == "_shares" and each.kind == "negate"]
    fault = max(found, key=lambda each: each.line)
    functions = live_functions(PACKAGE)
    before = bounds._shares([1.0, 2.0], [0.5, 0.5])

    def try_it(one: Mutant) -> object:
        return [put_in(one, PACKAGE, functions), bounds._shares([1.0, 2.0], [0.5, 0.5])]

    ((_, ended),) = in_children([fault], try_it, workers=1, seconds=20.0)
    assert ended.said == [1, []]
    assert bounds._shares([1.0, 2.0], [0.5, 0.5]) == before


def test_quick_and_specific_tests_go_first_and_functions_take_turns(made: list[Mutant]) -> None:
    fault = next(each for each in made if each.function == "caller")
    here = {fault.path: {fault.lines[0]}}
    wide = {**here, "attacks/other.py": set(range(1000))}
    tests = [Covering(f"a[{index}]", 0.1, here) for index in range(5)]
    tests += [Covering("slow", 9.0, here), Covering("wide", 0.1, wide), Covering("elsewhere", 0.0, {fault.path: {10**6}})]
    assert [each.name for each in ordered(tests, fault)] == ["a[0]", "a[1]", "a[2]", "wide", "slow", "a[3]", "a[4]"]


def test_results_are_kept_until_the_source_or_for_survivors_the_tests_change(made: list[Mutant], tmp_path: Path) -> None:
    one, two = made[:2]
    kept = Kept(tmp_path / "results.json")
    kept.put(one, Result(True, "a test", 1.0, 1, False, "source", "suite"))
    kept.put(two, Result(False, "", 1.0, 1, False, "source", "suite"))
    again = Kept(tmp_path / "results.json")
    assert again.get(one, "source", "other suite") and again.get(two, "source", "suite")
    assert again.get(two, "source", "other suite") is None
    assert again.get(one, "other source", "suite") is None
    assert json.loads((tmp_path / "results.json").read_text()).keys() == {one.key, two.key}


def test_the_table_counts_by_room_and_shows_what_survived(made: list[Mutant], tmp_path: Path) -> None:
    (tmp_path / "attacks").mkdir()
    (tmp_path / "attacks" / "room.py").write_text(SOURCE)
    found = {each.key: Result(index > 1, "", 1.0, 4, False, "", "") for index, each in enumerate(made)}
    harmless = {made[1].key: "it changes nothing", made[2].key: "a test says otherwise"}
    counts = tally(made, found, harmless)
    assert (counts.killed, counts.survived, counts.equivalent) == (len(made) - 2, 1, 1)
    assert counts.share == (len(made) - 2) / (len(made) - 1)
    lines = list(table(made, found, harmless, tmp_path))
    assert sum(line.startswith("attacks/room.py:") for line in lines) == 1
    assert any(line.startswith("  + ") for line in lines) and lines[-1].startswith("all")


@pytest.fixture
def reach() -> Iterator[Reach]:
    yield Reach(PACKAGE, ("proofs",))


def test_outermost_functions_are_named_as_python_names_them() -> None:
    names = [name for name, _ in outermost_functions(ast.parse("class A:\n    def f(self):\n        def g(): ...\ndef h(): ..."))]
    assert names == ["A.f", "h"]
