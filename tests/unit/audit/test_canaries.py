"""Each canary dies where it should: attackers that find no planted leak, attackers that cheat, and an alarm that is dead."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from gradveil.attacks import Attack, AttackContext, launch
from gradveil.attacks.base import AttackCard
from gradveil.attacks.engine.labels import recover_labels
from gradveil.attacks.linear_layer import LinearLayer
from gradveil.audit import canaries
from gradveil.audit.canaries import check_canaries, pairs_of
from gradveil.audit.power import measure_rung, plant
from gradveil.audit.scene import Subject
from gradveil.metrics import share_of
from gradveil.records import Observation, Reconstruction
from gradveil.study.cell import Cell
from gradveil.study.results import Check
from gradveil.study.rung import RungTask
from gradveil.testing.attack_faults import LabelOracle
from tests.unit.audit.small import make_subject

CARD = AttackCard(name="wrong", summary="An attack for tests.")


@functools.cache
def leaking() -> Subject:
    return plant(make_subject(records=16), 1.0)


def answer(observations: Sequence[Observation], labels: Any, pictures: Any = None) -> list[Reconstruction]:
    return [
        Reconstruction(
            torch.full((seen.examples, *seen.input_shape), 0.5) if pictures is None else pictures(place, seen),
            labels(place, seen),
            "wrong",
            target=place,
        )
        for place, seen in enumerate(observations)
    ]


@dataclass(frozen=True, kw_only=True)
class Wrong(Attack):
    card: ClassVar[AttackCard] = CARD


@dataclass(frozen=True, kw_only=True)
class KnowsPlaces(Wrong):
    """Has the true labels in the order of the list."""

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        return answer(observations, lambda place, seen: leaking().targets[place].batch.targets)


@dataclass(frozen=True, kw_only=True)
class HasPictures(Wrong):
    """Reads labels honestly and blends in the true pictures."""

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        truth = [target.batch.inputs for target in leaking().targets]
        return answer(observations, lambda place, seen: recover_labels(seen), lambda place, seen: 0.25 + 0.5 * truth[place])


@dataclass(frozen=True, kw_only=True)
class ShowsPictures(Wrong):
    """Has the true pictures in the order of the list."""

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        truth = [target.batch.inputs for target in leaking().targets]
        return answer(observations, lambda place, seen: torch.zeros(1, dtype=torch.long), lambda place, seen: truth[place])


@dataclass(frozen=True, kw_only=True)
class Honest(Wrong):
    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        return answer(observations, lambda place, seen: recover_labels(seen))


@dataclass(frozen=True, kw_only=True)
class Constant(Wrong):
    """Says the same whatever it is shown."""

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        return answer(observations, lambda place, seen: torch.tensor([3]))


@dataclass(frozen=True, kw_only=True)
class Inverted(Wrong):
    """Of two labels, always the one it is not."""

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        partner = {left: right for pair in pairs_of(leaking()) for left, right in (pair, pair[::-1])}
        truths = {seen.content: place for place, seen in enumerate(t.observation for t in leaking().targets)}

        def other(place: int, seen: Observation) -> torch.Tensor:
            owner = truths[seen.content]
            return leaking().targets[partner.get(owner, owner)].batch.targets

        return answer(observations, other)


@dataclass(frozen=True, kw_only=True)
class Guesses(Wrong):
    """Draws one of two labels, as one who knows nothing of two classes does."""

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        partner = {left: right for pair in pairs_of(leaking()) for left, right in (pair, pair[::-1])}
        draws = torch.rand(len(observations), generator=context.seed.generator("guess", round=context.budget))

        def draw(place: int, seen: Observation) -> torch.Tensor:
            own = place if draws[place] < 0.5 else partner.get(place, place)
            return leaking().targets[own].batch.targets

        return answer(observations, draw)


def judged(*attacks: Attack, subject: Subject | None = None, found: int = 16) -> dict[str, Check]:
    subject = subject or leaking()
    context = subject.context(100)
    seen = [target.observation for target in subject.targets]
    candidates: list[list[Reconstruction]] = [[] for _ in seen]
    for attack in attacks:
        for candidate in launch(attack, seen, context):
            candidates[candidate.target].append(candidate)
    checks = check_canaries(subject, attacks, context, candidates, share_of(found, 16))
    return {check.name: check for check in checks}


def test_honest_attacks_pass_all() -> None:
    found = judged(LinearLayer(), Honest())
    assert {name: check.level for name, check in found.items()} == {
        "canary_found": "ok",
        "canary_caught": "ok",
        "no_oracle": "ok",
    }


@pytest.mark.parametrize("cheat", [KnowsPlaces(), HasPictures()])
def test_who_answers_with_the_record_of_the_place_is_caught(cheat: Attack) -> None:
    found = judged(LinearLayer(), replace(cheat))
    assert found["no_oracle"].level == "fail" and "wrong/plain" in found["no_oracle"].sentence
    assert "linear" not in found["no_oracle"].sentence
    assert found["canary_caught"].level == "ok"


@pytest.mark.parametrize("honest", [Constant(), Inverted(), Guesses()])
def test_who_knows_nothing_or_is_wrong_throughout_is_not_accused(honest: Attack) -> None:
    assert judged(honest)["no_oracle"].level == "ok"


def test_labels_that_lie_in_an_observation_ungranted_are_noticed() -> None:
    # The attack that grants itself the labels finds them only where the audit left them lying about.
    oracle = LabelOracle(steps=2)
    assert judged(oracle)["no_oracle"].level == "ok"
    careless = replace(
        leaking(),
        targets=tuple(replace(t, observation=t.observation.replace(labels=t.batch.targets)) for t in leaking().targets),
    )
    assert judged(oracle, subject=careless)["no_oracle"].level == "fail"


def test_granted_labels_are_no_cheat() -> None:
    granted = plant(make_subject(records=16, known_labels=True), 1.0)
    assert judged(Honest(), subject=granted)["no_oracle"].level == "ok"


@pytest.mark.parametrize(("found", "level"), [(16, "ok"), (15, "fail"), (0, "fail")])
def test_a_planted_leak_must_be_found(found: int, level: str) -> None:
    assert judged(LinearLayer(), found=found)["canary_found"].level == level


def test_a_dead_alarm_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries, "ALARM", 10**30)
    found = judged(KnowsPlaces())
    assert found["canary_caught"].level == "fail" and found["no_oracle"].level == "ok"


def test_too_few_pairs_are_said_and_not_judged() -> None:
    few = plant(make_subject(records=4), 1.0)
    found = judged(LinearLayer(), subject=few)
    assert found["no_oracle"].level == "warn" and "canary_caught" not in found


def test_pairs_have_different_labels_and_each_update_one_place() -> None:
    pairs = pairs_of(leaking())
    places = [place for pair in pairs for place in pair]
    assert len(places) == len(set(places)) >= 12
    labels = [int(target.batch.targets[0]) for target in leaking().targets]
    assert all(labels[left] != labels[right] for left, right in pairs)


def test_an_ensemble_that_never_moves_finds_no_planted_leak() -> None:
    idle = Cell(data="digits", model="mlp(hidden=16)", records=8, device="cpu", risk="off", lists="off").replace(
        ensemble="inverting_gradients(steps=3, learning_rate=1e-9)"
    )
    record = measure_rung(RungTask(cell=idle, leak=1.0))
    levels = {check.name: check.level for check in record.checks}
    assert levels["canary_found"] == "fail" and not record.rung.broken


def test_an_embedding_has_no_labels_to_steal_but_pictures() -> None:
    party = plant(make_subject(records=16, cut="cut1"), 1.0)
    assert len(pairs_of(party)) == 8
    thief = judged(ShowsPictures(), subject=party)
    assert thief["no_oracle"].level == "fail" and thief["canary_caught"].level == "ok"
    # Labels of the places are no theft where nothing depends on them.
    assert judged(KnowsPlaces(), subject=party)["no_oracle"].level == "ok"
