"""What is chosen of several: by the referee, by a canary, and which picture is whose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradveil.attacks.referee import Referee
from gradveil.audit import canaries
from gradveil.audit.gap import _anybody
from gradveil.audit.power import plant
from gradveil.records import Reconstruction
from tests.unit.audit.small import make_subject


@pytest.mark.parametrize(
    ("scores", "rehearsed", "chosen"),
    [
        ([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 1),
        ([1.0, 1.0, 1.0], [10.0, 30.0, 20.0], 1),
        ([1.0, 1.0, 1.0, 1.0], [20.0, 10.0, 30.0, 40.0], 3),
        ([2.0, 1.0, 1.0], [40.0, 20.0, 30.0], 2),
        ([5.0, 4.0], [9.0, 1.0], 1),
    ],
)
def test_of_those_that_explain_an_update_as_well_the_best_rehearsed_is_kept(
    scores: list[float], rehearsed: list[float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_subject(records=1).targets[0]
    candidates = [Reconstruction(target.batch.inputs, target.batch.targets, f"r{place}") for place in range(len(scores))]
    referee = Referee(rehearsal={f"r{place}/plain": value for place, value in enumerate(rehearsed)})
    monkeypatch.setattr(Referee, "scores", lambda *given: list(scores))
    monkeypatch.setattr(Referee, "_as_rehearsed", lambda *given: min(scores))
    found = referee.select(target.observation, candidates)
    assert found.chosen == chosen and list(found.scores) == scores


@pytest.mark.parametrize(
    ("scores", "limits", "rehearsed", "chosen"),
    [
        # The first alone went as rehearsed; two others explain the update better and were rehearsed better: the best of them.
        ([3.0, 2.0, 1.0], [3.0, 0.0, 0.0], [10.0, 20.0, 30.0], 2),
        ([3.0, 1.0, 2.0], [3.0, 0.0, 0.0], [10.0, 30.0, 20.0], 1),
        ([3.0, 4.0, 2.0], [3.0, 0.0, 0.0], [10.0, 30.0, 5.0], 0),
        ([3.0, 3.0, 4.0], [3.0, 0.0, 0.0], [10.0, 30.0, 50.0], 1),
    ],
)
def test_who_explains_an_update_better_than_one_that_went_as_rehearsed_is_kept(
    scores: list[float], limits: list[float], rehearsed: list[float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_subject(records=1).targets[0]
    candidates = [Reconstruction(target.batch.inputs, target.batch.targets, f"r{place}") for place in range(len(scores))]
    referee = Referee(rehearsal={f"r{place}/plain": value for place, value in enumerate(rehearsed)})
    monkeypatch.setattr(Referee, "scores", lambda *given: list(scores))
    monkeypatch.setattr(Referee, "_as_rehearsed", lambda self, candidate: limits[int(candidate.recipe[1:])])
    assert referee.select(target.observation, candidates).chosen == chosen


def test_a_record_of_a_batch_is_found_in_whichever_picture_is_its_own() -> None:
    """One good picture, in an order that is not its own inverse; the others are grey."""
    subject = make_subject(records=3, batch_size=3)
    truth = subject.targets[0].batch.inputs
    for good in range(3):
        pictures = torch.full_like(truth, 0.5)
        pictures[good] = truth[good]
        assert _anybody(subject, 0, pictures.roll(1, 0)) and _anybody(subject, 0, pictures)
    assert not _anybody(subject, 0, subject.candidates[-3:])


def test_a_cheat_must_know_the_record_before_and_after_the_swap() -> None:
    subject = plant(make_subject(records=16), 1.0)
    pairs = canaries.pairs_of(subject)

    def answers(labels: Any) -> dict[int, Reconstruction]:
        return {
            seat: Reconstruction(torch.full_like(target.batch.inputs, 0.5), labels(seat), "x", target=seat)
            for seat, target in enumerate(subject.targets)
        }

    right, wrong = (
        answers(lambda seat: subject.targets[seat].batch.targets),
        answers(lambda seat: (subject.targets[seat].batch.targets + 1) % 10),
    )
    given = (subject, pairs)
    assert canaries._cheat(*given, right, right, 2)
    assert not canaries._cheat(*given, wrong, right, 2) and not canaries._cheat(*given, right, wrong, 2)
    assert not canaries._cheat(*given, {}, right, 2) and not canaries._cheat(*given, right, right, 10**30)


def test_canaries_are_shown_what_was_found_before_and_then_after(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str]] = []

    def noting(subject: Any, pairs: Any, before: Any, after: Any, tests: int) -> bool:
        shown.append((before[0].status, after[0].status))
        return False

    monkeypatch.setattr(canaries, "_cheat", noting)
    subject = plant(make_subject(records=8), 1.0)

    def answers(status: str) -> list[Reconstruction]:
        return [
            Reconstruction(target.batch.inputs, target.batch.targets, "x", target=seat, status=status)
            for seat, target in enumerate(subject.targets)
        ]

    monkeypatch.setattr(canaries, "launch", lambda attack, seen, context: answers("after"))
    found = [[each] for each in answers("before")]
    canaries._cheats(subject, [object()], subject.context(5), found, canaries.pairs_of(subject))  # type: ignore[list-item]
    assert shown == [("before", "after")] * len(shown) and len(shown) >= 2
