"""What certificates, floors, regions, gaps and curves are handed, with hand-made cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradveil.attacks.referee import ROUNDING
from gradveil.audit import certified, gap, regions, risks
from gradveil.audit.gap import Explained
from gradveil.audit.sensitivity import LOWEST, first_among, fit_sensitivity, rank_probabilities
from gradveil.client.releases import RANGE_OF_DATA
from gradveil.metrics.regions import SHARE
from gradveil.randomness import Seed
from gradveil.records import Batch, Reconstruction
from gradveil.study.proved import Certificate
from gradveil.study.results import Region
from tests.unit.audit.small import CELL
from tests.unit.stand_ins import fake, noted

HERE = CELL.replace(records=6, batch_size=2, rounds=3, seed=5, local_steps=2)


def cell(**changes: Any) -> Any:
    learner = fake(running={}, weights="weights", device=torch.device("cpu"))
    return fake(
        cell=HERE.replace(**changes),
        learner=learner,
        seen=fake(attacked=False),
        defense="defense",
        candidates=torch.zeros(9, 4),
        candidate_labels="labels",
        indices=range(6),
    )


def test_the_guarantee_is_that_of_the_cell_s_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "privacy_of_updates", lambda *given, **more: (given, more))
    made: Any = cell()
    found: Any = certified.guarantee_of(made)
    assert found[0] == ("defense", HERE.training())
    assert found[1] == {"examples": 2, "rounds": 3, "weights": "weights", "fault": "", "summed": 1}
    made.cell = HERE.replace(scale="minmax")
    assert certified.guarantee_of(made)[1]["fault"] == RANGE_OF_DATA  # type: ignore[index]
    made.seen.attacked = True
    assert certified.guarantee_of(made)[1]["fault"] == certified.TRAINED  # type: ignore[index]
    made.learner.running = {"mean": 0}
    assert certified.guarantee_of(made)[1]["fault"] == certified.STATISTICS  # type: ignore[index]
    made = cell(cut="cut1")
    assert certified.guarantee_of(made)[1]["fault"] == certified.EMBEDDED  # type: ignore[index]


@pytest.mark.parametrize(
    ("unit", "changes", "known"),
    [("record", {}, 5), ("client", {}, 4), ("record", {"rounds": 1}, 1), ("client", {"rounds": 1, "clients": 3}, 4)],
)
@pytest.mark.parametrize("labels", [True, False])
def test_a_certificate_counts_candidates_guesses_and_those_ruled_out(
    unit: str, changes: dict[str, Any], known: int, labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certified, "guarantee_of", lambda given: fake(unit=unit))
    monkeypatch.setattr(certified, "certificate_from", lambda proved, **more: (proved.unit, more))
    made = cell(known_labels=labels, **changes)
    found: Any = certified.certificate_of_cell(made)
    assert found[0] == unit and found[1].pop("candidates") is made.candidates
    guesses = 2 * made.cell.clients
    assert found[1] == {
        "labels": "labels" if labels else None,
        "guesses": guesses,
        "known": known,
        "seed": Seed(5).child("certificate"),
    }


@pytest.mark.parametrize("identified", [None, 0.25])
def test_beside_a_certificate_stand_the_attack_with_the_list_and_the_mean_error(
    identified: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = "the cell"
    monkeypatch.setattr(certified, "certificate_of_cell", lambda given: Certificate(identified=identified, unit=given))
    monkeypatch.setattr(certified, "matching_attack", lambda given: ("matching", given))
    monkeypatch.setattr(certified, "mean_error_of_cell", lambda given: ("error", given))
    found: Any = certified.certify(made)
    assert found.unit == made and found.mean_error == ("error", made)
    assert found.matching == (None if identified is None else ("matching", made))


@pytest.mark.parametrize(
    ("changes", "candidates", "tried"),
    [
        ({"batch_size": 1}, 9, True),
        ({"batch_size": 2}, 9, False),
        ({"batch_size": 1, "clients": 2}, 9, False),
        ({"batch_size": 1, "rounds": 4, "local_steps": 5}, 250, True),
        ({"batch_size": 1, "rounds": 4, "local_steps": 5}, 251, False),
    ],
)
def test_the_attack_with_the_list_replays_no_more_than_an_audit_has_time_for(
    changes: dict[str, Any], candidates: int, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certified, "matching_share", lambda given: given)
    made = cell(**changes)
    made.candidates = range(candidates)
    assert certified.matching_attack(made) == (made if tried else None)


def test_a_region_is_measured_for_everybody_inside_boxes_of_the_true_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = torch.rand(2, 1, 4, 4)
    targets = [fake(batch=Batch(truth[i : i + 1], torch.tensor([i + 3]))) for i in range(2)]
    asked: list[Any] = []
    noise: Callable[[int], Any] = lambda count: f"noise of {count}"  # noqa: E731
    learner = fake(
        device=torch.device("cpu"),
        model="model",
        weights="weights",
        zero_noise=noise,
        logits=lambda *given: given,
    )
    made: Any = fake(targets=targets, learner=learner, cell=fake(cut=""))

    def salient(forward: Any, model: Any, images: Any, labels: Any) -> torch.Tensor:
        asked.append((forward(torch.zeros(5, 1)), model, images, labels.tolist()))
        return torch.ones(3)

    boxes = torch.tensor([[0, 0, 2, 2], [1, 1, 4, 2]])
    monkeypatch.setattr(regions, "grad_cam_pp", salient)
    monkeypatch.setattr(regions, "bounding_boxes", lambda found: boxes if found.tolist() == [1.0, 1.0, 1.0] else None)
    monkeypatch.setattr(regions, "measure_region", lambda *given: noted(asked, given) or {"region_psnr": "a", "region_mse": "b"})
    monkeypatch.setattr(regions, "REGION", "region_")
    monkeypatch.setattr(regions, "summarise", lambda values, seed, kind: (values, seed, kind.__name__))
    rows: Any = {"selected": fake(images="rebuilt"), "plain": None, "data_mean": fake(images="mean")}
    found: Any = regions.region_of_cell(made, rows, Seed(4))
    given, model, images, labels = asked[0]
    assert given[0] == "weights" and given[1].shape == (5, 1) and given[2] == "noise of 5" and model == "model"
    assert torch.equal(images, truth) and labels == [3, 4]
    assert [(each[0], torch.equal(each[1], truth), each[2] is boxes, each[3]) for each in asked[1:]] == [
        ("rebuilt", True, True, regions.NAMES),
        ("mean", True, True, regions.NAMES),
    ]
    assert isinstance(found, Region) and found.area == (4 + 3) / 2 / 16 and found.share == SHARE and found.plain is None
    values = {"psnr": "a", "mse": "b"}
    assert found.selected == (values, Seed(4).child("selected"), "Quality")  # type: ignore[comparison-overlap]
    assert found.data_mean == (values, Seed(4).child("data_mean"), "Quality")  # type: ignore[comparison-overlap]
    monkeypatch.setattr(regions, "bounding_boxes", lambda found: torch.tensor([[0, 0, 4, 4]] * 2))
    assert regions.region_of_cell(made, rows, Seed(4)) == "the model singles out no part of these pictures"
    made.cell.cut = "cut1"
    assert "whole model" in str(regions.region_of_cell(made, rows, Seed(4)))


class Scores:
    """A referee whose scores are told, and who notes what it is asked."""

    def __init__(self, *scores: list[float], truths: tuple[float, ...] = ()) -> None:
        self.left, self.truths, self.asked = list(scores), truths, []  # type: ignore[var-annotated]
        self.entries = {"update": 1000}

    def scores(self, observation: Any, candidates: list[Reconstruction]) -> list[float]:
        self.asked.append((observation, candidates))
        return self.left.pop(0)


def update(place: int, noise: float | None = None) -> Any:
    weights = {"w": torch.zeros(1)}
    told = fake(arrives=lambda seen: fake(noise_std=noise))
    observation = fake(update=fake(weights=weights), adversary=told, content="update")
    inputs = torch.full((2, 1), float(place))
    return fake(observation=observation, replayed_inputs=inputs, batch=Batch(inputs, torch.tensor([place, 7])))


def chosen(scores: list[float], place: int) -> Any:
    return fake(scores=scores, chosen=place)


def test_the_truth_of_every_update_stands_beside_what_was_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [update(0), update(1, 0.5), update(2)]
    kept = [Reconstruction(torch.zeros(2, 1), torch.zeros(2), "x", variables=own) for own in ({}, {"u": torch.ones(1)}, {})]
    verdicts = [chosen([9.0, 0.75], 1), chosen([0.25, 9.0], 0), chosen([1e-3], 0)]
    referee: Any = Scores([0.5], [0.5, 0.125], [0.0])
    finished: list[Any] = []
    monkeypatch.setattr(gap, "_finished", lambda *given: noted(finished, given) or Explained(7.0, 7.0))
    rank = torch.tensor([1, 2, 2, 2, 1, 1])
    made: Any = fake(targets=targets)
    rows = gap.explain(made, kept, verdicts, referee, rank)
    assert rows == (
        Explained(0.75, 0.5, gap.tolerance_at(0.5, 1000.0), False),
        Explained(0.25, 0.125, gap.tolerance_at(0.125, 1000.0), True),
        Explained(1e-3, 0.0, ROUNDING, False),
    )
    assert not finished, "who found the records of an update needs no finishing"
    for place, (seen, starts) in enumerate(referee.asked):
        assert seen is targets[place].observation and len(starts) == 1 + (place == 1)
        assert all(torch.equal(each.inputs, targets[place].replayed_inputs) for each in starts)
        assert all(each.targets.tolist() == [place, 7] and each.recipe == "truth" for each in starts)
    assert referee.asked[1][1][0].variables == {} and referee.asked[1][1][1].variables is kept[1].variables
    referee = Scores([0.5], [0.5, 0.125], [0.0])
    rows = gap.explain(made, kept, verdicts, referee, torch.tensor([1, 2, 2, 2, 1, 2]))
    assert rows[2] == Explained(7.0, 7.0) and len(finished) == 1
    assert finished[0][:3] == (made, 2, kept[2]) and finished[0][3] is referee and finished[0][4] == Explained(1e-3, 0.0)


@pytest.mark.parametrize(
    ("found", "truth", "noise", "finishes"),
    [
        (0.01, 0.0, None, True),
        (0.0101, 0.0, None, False),
        (0.005, 1e-6, None, False),
        (0.005, 0.0, 0.5, False),
        (0.0, 0.0, None, False),
    ],
)
def test_only_what_is_nearly_there_is_finished(
    found: float, truth: float, noise: float | None, finishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(gap, "_finished", lambda *given: noted(done, given) or given[4])
    made: Any = fake(targets=[update(0, noise)])
    kept = [Reconstruction(torch.zeros(2, 1), torch.zeros(2), "x")]
    gap.explain(made, kept, [chosen([found], 0)], Scores([truth]), torch.tensor([2, 2]))  # type: ignore[arg-type]
    assert bool(done) == finishes


@pytest.mark.parametrize(
    ("truths", "noise", "worth"),
    [
        ((), None, 1000.0),
        ((0.1,), None, 1000.0),
        ((0.1, 0.3), None, 4.0),
        ((0.1, 0.3), 0.5, 1000.0),
        ((0.0, 0.3), None, 1000.0),
        ((0.2, 0.2), None, 1000.0),
        ((0.1, 0.3, 0.2), None, 8.0),
    ],
)
def test_a_score_is_worth_as_many_entries_as_truths_scatter(truths: tuple[float, ...], noise: float | None, worth: float) -> None:
    assert gap._independent(Scores(truths=truths), update(0, noise).observation) == pytest.approx(worth)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 3])
def test_a_lower_end_below_one_is_found(count: int) -> None:
    found = fit_sensitivity([1] * count, [2] * count)
    assert found.low is not None and LOWEST < found.low < 1.0
    assert first_among(2, found.low) ** count == pytest.approx(math.exp(-3.841459 / 2), rel=1e-3)
    narrow = fit_sensitivity([1] * count, [2] * count, 0.5)
    assert narrow.low is not None and narrow.low > found.low
    worth = fit_sensitivity([1] * 6, [2] * 6, worth=count)
    assert worth.low == pytest.approx(found.low, abs=1e-3) and found.at["2"] == pytest.approx(first_among(2, found.low))


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        ([1, 2, 1, 3, 1], [4, 4, 9, 9, 9]),
        ([1, 1, 1, 2], [9] * 4),
        ([1, 2, 2, 1, 5], [8] * 5),
        ([3, 4, 6], [9] * 3),
        ([2, 1], [6, 60]),
    ],
)
def test_a_fit_is_the_likeliest_and_its_ends_are_as_likely_as_the_confidence_asks_for(ranks: list[int], sizes: list[int]) -> None:
    found, half = fit_sensitivity(ranks, sizes), fit_sensitivity(ranks, sizes, worth=len(ranks) / 2)

    def loss(d: float | None) -> float:
        assert d is not None
        return -sum(math.log(each) for each in rank_probabilities(ranks, sizes, d))

    for each, worth in ((found, 1.0), (half, 0.5)):
        assert (
            each.d == pytest.approx(found.d, abs=1e-3) and each.low is not None and each.high is not None and each.d is not None
        )
        assert loss(each.d) < min(loss(each.d - 0.02), loss(each.d + 0.02))
        for end in (each.low, each.high):
            assert worth * (loss(end) - loss(each.d)) == pytest.approx(3.841459 / 2, rel=1e-3)
        assert each.low < each.d < each.high and each.at["10"] == pytest.approx(first_among(10, each.d))


def test_a_partial_correlation_needs_four_records() -> None:
    z = [1.0, 3.0, 2.0, 4.0]
    assert risks.correlate([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0], "", z).partial is not None
    assert risks.correlate([1.0, 2.0, 3.0], [2.0, 1.0, 3.0], "", z[:3]).partial is None
    assert risks.correlate([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0], "", [1.0, 2.0, 3.0, 4.0]).partial is None
