"""Every registered attack keeps the attack contract, and the contract rejects attacks that do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest

from gradveil.attacks import ATTACKS, Attack, AttackCard, AttackContext
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.testing.attack_faults import ATTACK_FAULTS, SignFlip
from gradveil.testing.attacks import ATTACK_CHECKS, Check, check_attack
from gradveil.testing.attacks_scene import Scene
from gradveil.testing.contract import NotApplicable, run_checks

SPARED = {"kernel_regression": {"records": 128}}
"""Settings with which an attack does the same in less time; those of its card's home."""


@pytest.mark.parametrize("check", ATTACK_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ATTACKS.names())
def test_registered_attack_keeps_its_promise(name: str, check: Check) -> None:
    attack = ATTACKS.build({"name": name, **SPARED.get(name, {})})
    try:
        check(attack, Scene.of(attack))
    except NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(("kind", "check"), ATTACK_FAULTS, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_wrong_attack_is_rejected(kind: type[Attack], check: str) -> None:
    attack = InvertingGradients() if check == "builds_with_defaults" else kind()
    (named,) = [each for each in ATTACK_CHECKS if each.__name__ == check]
    scene = Scene.of(attack)
    attack = object.__new__(kind) if check == "builds_with_defaults" else attack
    (result,) = run_checks([named], attack, scene)
    assert result.status == "failed", f"{check} does not notice {kind.__name__}"


def test_every_check_has_a_fault_that_it_rejects() -> None:
    # `launch` itself refuses to run without what a card asks for, so no attack can break that promise.
    assert {check.__name__ for check in ATTACK_CHECKS} - {check for _, check in ATTACK_FAULTS} == {"missing_knowledge_is_named"}


def test_no_fault_is_registered() -> None:
    assert not {ATTACKS.get(name) for name in ATTACKS.names()} & {kind for kind, _ in ATTACK_FAULTS}


def test_an_attack_that_misreads_the_sign_still_keeps_its_form() -> None:
    quick = [check for check in ATTACK_CHECKS if check.__name__ in {"answers_are_well_formed", "same_seed_same_bits"}]
    assert all(result.passed for result in run_checks(quick, SignFlip(), Scene.of(SignFlip())))


@dataclass(frozen=True, kw_only=True)
class Homeless(Attack):
    card: ClassVar[AttackCard] = AttackCard(
        name="homeless", summary="Applies nowhere.", needs=frozenset({Knowledge.ARCHITECTURE})
    )

    def applies(self, observation: Observation) -> str | None:
        return "it never does"

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        raise AssertionError("never called")


def test_an_attack_that_applies_nowhere_fails_with_the_reason() -> None:
    (result,) = check_attack(Homeless())
    assert not result.passed and "it never does" in result.message


def test_one_call_reports_every_check() -> None:
    results = check_attack(ATTACKS.build("linear_layer"))
    assert [result.check for result in results] == [check.__name__ for check in ATTACK_CHECKS]
    assert {result.status for result in results} == {"passed", "skipped"}
