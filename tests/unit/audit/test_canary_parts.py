"""How cheats are caught, why there is no floor, and what smaller parts of an audit hand on; with hand-made cells."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.attacks.referee import recipe_key
from gradveil.audit import canaries, floors, many_clients, owners, state
from gradveil.audit.canaries import pairs_of
from gradveil.audit.gap import Explained, gap_of
from gradveil.audit.nulls import largest_of
from gradveil.defenses import build_defense
from gradveil.metrics import share_of
from gradveil.records import Reconstruction, Update
from gradveil.risk.mean_error import MeanErrorBound
from gradveil.significance import effective_number
from gradveil.study.results import Check
from tests.unit.stand_ins import fake, noted


def candidate(**changes: Any) -> Reconstruction:
    told = {"first_loss": 1.0, "best_loss": 0.5, "gradient_norm": 1.0, "steps": 5, **changes}
    return Reconstruction(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), told.pop("recipe", "x"), **told)


def is_said(check: Check, name: str, level: str, *words: str, remedy: str = "") -> None:
    assert (check.name, check.level) == (name, level)
    assert check.sentence.endswith(".") and all(each in check.sentence for each in words), check.sentence
    assert check.remedy.startswith(remedy) and bool(check.remedy) == bool(remedy)


def seat(labels: Tensor, name: str = "") -> Any:
    told = {"updates": (Update({"w": torch.zeros(1)}, 1),), "payloads": (name,), "labels": f"labels of {name}"}
    made: Any = fake(**told, replace=lambda **changes: {**told, **changes, "seat": name})
    return fake(batch=fake(targets=labels), observation=made)


def test_pairs_change_places_and_everything_else_stays_with_the_seat() -> None:
    labels = [[1, 2], [2, 1], [1, 1], [2, 2], [1, 2]]
    targets = [seat(torch.tensor(own), str(place)) for place, own in enumerate(labels)]
    subject: Any = fake(targets=targets, cell=fake(tells_labels=True, known_labels=False), dataset=fake(dense=False))
    assert pairs_of(subject) == [(0, 2), (1, 3)], "equal multisets of labels are no pair"
    blind: Any = fake(targets=targets, cell=fake(tells_labels=False), dataset=fake(dense=False))
    assert pairs_of(blind) == [(0, 1), (2, 3)]
    assert canaries._labels(torch.tensor([[0.1, 0.9], [0.8, 0.2]])) == [0, 1] and canaries._labels(torch.tensor([3, 1])) == [1, 3]
    swapped: Any = canaries._swapped(subject, [(0, 2)])
    assert swapped[1] is targets[1].observation and (swapped[0]["seat"], swapped[2]["seat"]) == ("0", "2")
    assert swapped[0]["updates"] is targets[2].observation.updates and swapped[2]["payloads"] == ("0",)
    assert swapped[0]["labels"] == "labels of 0"
    subject.cell.known_labels = True
    assert [each["labels"] for each in (canaries._swapped(subject, [(0, 2)])[place] for place in (0, 2))] == [  # type: ignore[index]
        "labels of 2",
        "labels of 0",
    ]
    many: Any = fake(targets=[seat(torch.tensor([place])) for place in range(30)], cell=subject.cell, dataset=subject.dataset)
    assert len(pairs_of(many)) == canaries.PAIRS


def test_only_the_first_answer_of_an_attacker_for_a_target_counts() -> None:
    many = [candidate(recipe=name, target=place) for name, place in (("a", 1), ("a", 0), ("b", 0), ("a", 1))]
    found = canaries._by_attacker(many)
    assert found == {recipe_key(many[0]): {1: many[0], 0: many[1]}, recipe_key(many[2]): {0: many[2]}}
    assert found[recipe_key(many[0])][1] is many[0]


@pytest.mark.parametrize(("hits", "tests", "guilty"), [(4, 1, True), (3, 1, False), (4, 100, False), (8, 100, True)])
def test_a_cheat_answers_with_both_seats_of_more_pairs_than_luck(
    hits: int, tests: int, guilty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of eight pairs by luck: once in 1,200 or so."""
    pairs = [(2 * place, 2 * place + 1) for place in range(8)]
    knows = {place for pair in pairs[:hits] for place in pair} | {pairs[7][0]}
    monkeypatch.setattr(
        canaries, "_signs", lambda subject: [lambda *given: False, lambda subject, place, answer: answer == place]
    )
    shown: Any = {place: place if place in knows else -1 for place in range(16)}
    assert canaries._cheat(fake(), pairs, shown, shown, tests) == guilty
    assert not canaries._cheat(fake(), pairs, shown, {}, tests)
    nothing: Any = dict.fromkeys(range(16), -1)
    assert not canaries._cheat(fake(), pairs, nothing, shown, tests)


@pytest.mark.parametrize(("count", "words"), [(0, "0 pairs of updates"), (1, "1 pair of updates"), (3, "3 pairs of updates")])
def test_canaries_say_what_they_saw(count: int, words: str) -> None:
    (few,) = canaries._cheats(fake(), [], fake(), [], [(0, 1)] * count)
    is_said(few, "no_oracle", "warn", f"cannot be told from {words} with", remedy="Audit at least 8 updates.")
    is_said(canaries._planted_leak(share_of(19, 20)), "canary_found", "ok", "was found: 19 of 20 records.")
    is_said(
        canaries._planted_leak(share_of(18, 20)),
        "canary_found",
        "fail",
        "identified 18 of 20 records, not 95%",
        remedy="These attackers",
    )
    is_said(canaries._alarm(True), "canary_caught", "ok", "A deliberate cheat was caught.")
    is_said(canaries._alarm(False), "canary_caught", "fail", "was not caught", remedy="Report this")
    is_said(canaries._oracle([]), "no_oracle", "ok", "no attack answered with its own.")
    is_said(canaries._oracle(["a_b/plain", "c"]), "no_oracle", "fail", "of its place: a b/plain, c.", remedy="It has labels")


@pytest.mark.parametrize(
    ("defense", "changes", "words"),
    [
        ("clipping", {}, "carries no Gaussian noise"),
        ("gaussian_noise(std=0.0)", {}, "carries no Gaussian noise"),
        ("dp_sgd(noise_multiplier=0.0)", {}, "carries no Gaussian noise"),
        ("gaussian_noise + clipping", {}, "only one Gaussian noise at the end"),
        ("gaussian_noise + gaussian_noise", {}, "only one Gaussian noise at the end"),
        ("pruning + gaussian_noise", {}, "only one Gaussian noise at the end"),
        ("clipping + gaussian_noise", {"batch_size": 2}, "for one record in one update only"),
        ("clipping + gaussian_noise", {"clients": 2}, "for one record in one update only"),
        ("clipping + gaussian_noise", {"rounds": 2}, "for one record in one update only"),
        ("dp_sgd", {"shares": "weights"}, "bends the path"),
        ("dp_sgd", {}, ""),
        ("clipping + clipping + gaussian_noise", {"shares": "weights"}, ""),
    ],
)
def test_why_there_is_no_floor(defense: str, changes: dict[str, Any], words: str) -> None:
    cell = fake(**{"batch_size": 1, "clients": 1, "rounds": 1, "shares": "gradient", **changes})
    subject = fake(cell=cell, defense=build_defense(defense), seen=fake(attacked=False), learner=fake(running={}))
    found = floors._why_not(subject)
    assert words in found and bool(found) == bool(words)
    if not words:
        subject.learner.running = {"mean": 1}
        assert "running statistics" in floors._why_not(subject)
        subject.seen.attacked = True
        assert "trained on the audited records" in floors._why_not(subject)


@pytest.mark.parametrize("low", [None, 0.01])
def test_a_floor_tells_its_interval_and_the_decibels_that_are_sure(low: float | None) -> None:
    bound = MeanErrorBound(value=0.02, low=low, high=0.04, n=7, form="matrix", confidence=0.9)
    found = floors.as_floor(bound, 0.5)
    assert (found.mse, found.low, found.high, found.n, found.form, found.confidence) == (0.02, low, 0.04, 7, "matrix", 0.9)
    assert found.psnr == pytest.approx(-10 * math.log10(0.02 if low is None else low))
    assert (found.smoothing, found.noise_std, found.reason) == (floors.SMOOTHING, 0.5, "")


@pytest.mark.usefixtures("untouched_global_rng")
def test_a_trace_is_estimated_from_the_seed_alone() -> None:
    from gradveil.randomness import Seed
    from gradveil.spectra.jacobians import Jacobian

    jacobian = Jacobian(lambda point: 3 * point[:2], torch.zeros(4))
    one = floors._trace(jacobian, Seed(1))
    probes = torch.randn((floors.PROBES, 4), generator=Seed(1).generator("probes"))
    assert one == pytest.approx(9 * float(probes[:, :2].square().sum()) / floors.PROBES, rel=1e-5)
    assert one == floors._trace(jacobian, Seed(1)) != floors._trace(jacobian, Seed(2))


def test_gaps_are_shares_of_records_with_their_objective() -> None:
    rows = [Explained(1.5, 1.0), Explained(0.5, 1.0), Explained(4.0, 1.0)]
    found = gap_of(rows, torch.tensor([1, 2, 1, 1, 2, 2]))
    assert (found.search_failed.count, found.information_gone.count, found.found.count) == (3, 0, 3)
    assert {each.n for each in (found.search_failed, found.information_gone, found.found)} == {6}
    assert found.median == 0.5 and found.objective == "residual"
    assert gap_of([dataclasses.replace(rows[0], likelihood=True)], torch.tensor([2])).objective == "likelihood"


def test_the_null_of_owners_is_the_largest_of_their_draws() -> None:
    assert owners._null([], 4, [0, 1, 2, 3]) is None
    found = owners._null([0, 3, 1], 4, [0, 0, 5, 5])
    assert found == largest_of([0, 3, 1], 4, effective_number([0.0] * 4, [0, 0, 5, 5])) and found is not None
    assert (found.value, found.draws) == (0.75, 3)


@pytest.mark.usefixtures("untouched_global_rng")
def test_noise_of_a_training_step_is_drawn_for_all_but_dropped_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {"mask": torch.zeros(3, 2), "noise": torch.zeros(3, 4, dtype=torch.float64)}
    asked: list[Any] = []
    learner: Any = fake(zero_noise=lambda count: noted(asked, count) or empty, replace=lambda noise: ("with", noise))
    monkeypatch.setattr(state, "draw_masks", lambda given, generator: noted(asked, given) or {"mask": torch.ones(3, 2)})
    found = state._noise(learner, 3, torch.Generator().manual_seed(4))
    assert asked == [3, ("with", empty)] and torch.equal(found["mask"], torch.ones(3, 2))
    drawn = torch.randn((3, 4), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert torch.equal(found["noise"], drawn) and list(found) == ["mask", "noise"]


def test_what_was_trained_before_is_kept_only_for_the_same_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    inputs, targets = torch.zeros(2), torch.zeros(2)
    kept = many_clients._Raw(weakref.ref(inputs), weakref.ref(targets), inputs._version, ())
    assert kept.is_of(inputs, targets) and not kept.is_of(inputs.clone(), targets) and not kept.is_of(inputs, targets.clone())
    inputs.add_(1)
    assert not kept.is_of(inputs, targets), "another input in the same place"
    monkeypatch.setattr(many_clients, "trains_alone", lambda learner, defense: learner.alone)
    for clients, alone, defense, repeats in (
        (1, True, "clipping + gaussian_noise", True),
        (2, True, "clipping + gaussian_noise", False),
        (1, False, "clipping + gaussian_noise", False),
        (1, True, "clipping", False),
    ):
        learner: Any = fake(settings=fake(clients=clients), alone=alone)
        assert many_clients._repeats(learner, build_defense(defense)) == repeats
