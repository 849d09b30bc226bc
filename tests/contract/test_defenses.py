"""Every registered defense keeps the defense contract, and the contract rejects defenses that do not."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradveil.defenses import DEFENSES, Defense, build_defense
from gradveil.defenses.base import HOOKS
from gradveil.testing.contract import CheckResult, ContractFailure, NotApplicable, require, run_checks
from gradveil.testing.defenses import DEFENSE_CHECKS, Check, check_defense
from gradveil.testing.defenses_scene import Scene, at, spared
from gradveil.testing.faults import FAULTS, ClipsInPlace, WrongSign

STRONGEST = [
    (name, DEFENSES.card(name).ladder[-1])
    for name in DEFENSES.names()
    if DEFENSES.card(name).ladder[-1] and DEFENSES.build({"name": name, **DEFENSES.card(name).ladder[-1]}) != DEFENSES.build(name)
]


DEAR = {"invl_dnp", "precode", "refiner", "shadow"}
"""A strongest rung of theirs takes three to six seconds, and each of these checks two to five; the rest is quick."""
DEAR_CHECKS = {"adversary_prefers_the_truth", "adversary_undoes_something", "more_strength_distorts_more"}
PROMISES = [
    pytest.param(name, check, marks=[pytest.mark.slow] * (name in DEAR and check.__name__ in DEAR_CHECKS))
    for name in DEFENSES.names()
    for check in DEFENSE_CHECKS
]


@pytest.mark.parametrize(("name", "check"), PROMISES, ids=lambda value: getattr(value, "__name__", value))
def test_registered_defense_keeps_its_promise(name: str, check: Check) -> None:
    defense = spared(DEFENSES.build(name))
    try:
        check(defense, Scene.of(defense))
    except NotApplicable as reason:
        pytest.skip(str(reason))


def failed(defense: Defense) -> list[CheckResult]:
    return [result for result in check_defense(defense) if not result.passed]


CLASS_ALONE = {"builds_with_defaults", "ladder_builds", "more_strength_distorts_more"}
"""Checks that look at a class and the rungs of its card, which are the same whatever setting is handed in."""


def failed_beside_the_defaults(defense: Defense, checks: Sequence[Check] = DEFENSE_CHECKS) -> list[CheckResult]:
    """Run what is not said already by a defense of the same class at its defaults."""
    said = set(CLASS_ALONE)
    weakest = at(defense, type(defense).card.ladder[0])
    if weakest.random or defense.random:
        said.add("adversary_prefers_the_truth")  # it then looks at the weakest rung alone
    assert said <= {check.__name__ for check in DEFENSE_CHECKS}
    left = [check for check in checks if check.__name__ not in said]
    return [result for result in run_checks(left, defense, Scene.of(defense)) if not result.passed]


HALF = len(DEFENSE_CHECKS) // 2
RUNGS = [pytest.param(name, setting, marks=[pytest.mark.slow] * (name in DEAR)) for name, setting in STRONGEST]


@pytest.mark.parametrize("checks", [DEFENSE_CHECKS[:HALF], DEFENSE_CHECKS[HALF:]], ids=["first half", "second half"])
@pytest.mark.parametrize(("name", "setting"), RUNGS, ids=lambda value: str(value))
def test_the_strongest_rung_keeps_the_contract(name: str, setting: dict[str, object], checks: Sequence[Check]) -> None:
    assert failed_beside_the_defaults(spared(DEFENSES.build({"name": name, **setting})), checks) == []


def test_a_fault_shows_beside_the_defaults_too() -> None:
    found = {result.check for result in failed_beside_the_defaults(ClipsInPlace(bound=0.1))}
    assert found >= {"inputs_are_untouched", "scalar_is_one_entry"}
    assert "adversary_prefers_the_truth" in {result.check for result in failed_beside_the_defaults(WrongSign())}


TWINS = [name for name in DEFENSES.names() if spared(DEFENSES.build(name)) != DEFENSES.build(name).quick()]
FORM = ("names_and_shapes_are_kept", "inputs_are_untouched", "global_generators_are_untouched", "adversary_gives_finite_numbers")


@pytest.mark.parametrize("name", TWINS)
def test_a_quick_twin_that_is_slower_here_keeps_the_form(name: str) -> None:
    twin = DEFENSES.build(name).quick()
    checks = [check for check in DEFENSE_CHECKS if check.__name__ in FORM]
    assert [result.status for result in run_checks(checks, twin, Scene.of(twin))] == ["passed"] * len(FORM)


@pytest.mark.parametrize(
    "spelling",
    [
        "clipping(bound=0.5, scope='layer')",
        "example_clipping(bound=0.5, scope='layer')",
        "data_noise(std=0.1, law='laplace')",
        "entry_dropout(rate=0.5, rescale=True)",
    ],
)
def test_other_settings_keep_the_contract(spelling: str) -> None:
    assert failed_beside_the_defaults(build_defense(spelling)) == []


@pytest.mark.parametrize(("kind", "check"), FAULTS, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_wrong_defense_is_rejected(kind: type[Defense], check: str) -> None:
    (named,) = [each for each in DEFENSE_CHECKS if each.__name__ == check]
    (result,) = run_checks([named], kind(), Scene.of(kind()))
    assert result.status == "failed", f"{check} does not notice {kind.__name__}"


def test_a_defense_whose_attacker_cannot_tell_the_truth_fails_the_whole_check() -> None:
    assert [result.check for result in failed(WrongSign())] == ["adversary_prefers_the_truth"]


def test_one_call_reports_every_check_and_goes_on_after_a_failure() -> None:
    results = check_defense(DEFENSES.build("none"))
    assert [result.check for result in results] == [check.__name__ for check in DEFENSE_CHECKS]
    assert {result.status for result in results} == {"passed", "skipped"}


def breaks(_: object) -> None:
    raise ContractFailure("the promise is broken")


def explodes(_: object) -> None:
    raise ZeroDivisionError("surprise")


def does_not_apply(_: object) -> None:
    raise NotApplicable("no reason to ask")


def holds(_: object) -> None:
    require(True, "never said")


def test_results_say_what_happened() -> None:
    results = run_checks((breaks, explodes, does_not_apply, holds), None)
    assert [result.status for result in results] == ["failed", "failed", "skipped", "passed"]
    assert [result.passed for result in results] == [False, False, True, True]
    assert results[1].message == "raised ZeroDivisionError: surprise"
    with pytest.raises(ContractFailure, match="broken"):
        require(False, "broken")


def test_the_examples_in_the_docs_run_and_their_defense_keeps_the_contract() -> None:
    page = (Path(__file__).parents[2] / "docs" / "defenses.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    module = types.ModuleType("defense_from_the_docs")
    sys.modules[module.__name__] = module
    try:
        for block in blocks:
            exec(compile(block, "docs/defenses.md", "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]


def test_hooks_in_the_docs_are_the_hooks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "defenses.md").read_text(encoding="utf-8").partition("## Adding one")[2]
    rows = re.findall(r"^\| (`.*?`) \|", page, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {*HOOKS, "decode", "adversary"}
