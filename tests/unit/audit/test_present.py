"""Whether everybody attacked who is named."""

from __future__ import annotations

from typing import Any

from gradveil.audit import candidate_checks
from tests.unit.stand_ins import fake


def test_an_attacker_that_is_named_and_did_not_run_is_told_of() -> None:
    def member(name: str, applies: str | None, lacks: str | None) -> Any:
        return fake(attack=fake(card=fake(name=name), applies=lambda _: applies, lacks=lambda *_: lacks))

    def told(*members: Any) -> Any:
        return candidate_checks.check_present(fake(name="quick-5", members=members), None, None)  # type: ignore[arg-type]

    here, elsewhere, dear = member("a", None, None), member("b", "no such layer", "x"), member("c", None, "too dear")
    assert (told(here, elsewhere).level, told(here, elsewhere).name) == ("ok", "attackers_present")
    found = told(here, elsewhere, dear)
    assert found.level == "warn" and found.sentence == "Of quick-5 did not run c: too dear." and found.remedy
