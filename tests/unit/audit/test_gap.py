"""Search is told from information: by whether the truth explains the update better than what was found."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.attacks.referee import Referee
from gradveil.audit.cell import run_cell
from gradveil.audit.gap import Explained, explain, gap_of, tolerance_at
from gradveil.audit.judge import select
from gradveil.audit.scene import Subject
from gradveil.records import Reconstruction
from gradveil.study.cell import Cell
from gradveil.study.evidence import Gap
from tests.unit.audit.small import make_subject

SMALL = Cell(data="digits", model="mlp(hidden=16)", records=4, device="cpu", risk="off", lists="off")


def measured(**changes: Any) -> Gap:
    found = run_cell(SMALL.replace(**changes)).result.gap
    assert found is not None
    assert found.search_failed.count + found.information_gone.count + found.found.count == found.found.n == SMALL.records
    return found


def explained(subject: Subject, inputs: list[Tensor], referee: Referee | None = None) -> tuple[Explained, ...]:
    """Explain updates by one candidate each, with the right labels."""
    many = [[Reconstruction(x, t.batch.targets, "some")] for x, t in zip(inputs, subject.targets, strict=True)]
    referee = referee or Referee()
    chosen = select(subject, many, referee)
    assert chosen is not None
    return explain(subject, *chosen, referee, torch.full((len(subject.positions),), 2))


@pytest.mark.parametrize(("defense", "objective"), [("none", "residual"), ("gaussian_noise(std=1e-6)", "likelihood")])
def test_a_search_that_was_stopped_early_failed(defense: str, objective: str) -> None:
    stopped = measured(ensemble="inverting_gradients(steps=2)", defense=defense)
    assert (stopped.search_failed.count, stopped.objective) == (4, objective)


LONG = "inverting_gradients(steps=100, objective='relative_l2', signed=False, tv=0.0, schedule='cosine', learning_rate=0.05)"


def test_a_long_search_that_fits_what_is_left_of_an_update_shows_that_the_information_is_gone() -> None:
    # Two entries of 1,210 arrive; a search under the referee's own objective fits them with another picture.
    assert measured(defense="top_k(keep=0.001)", ensemble=LONG).information_gone.count == 4


def test_without_the_last_touch_such_a_search_would_seem_to_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.audit.gap.NEAR", 0.0)
    assert measured(defense="top_k(keep=0.001)", ensemble=LONG).search_failed.count >= 3


def test_a_picture_next_to_the_record_is_a_failed_search_though_the_last_touch_would_find_it() -> None:
    subject = make_subject()
    near = [(t.batch.inputs + 0.01 * torch.sin(torch.arange(64.0)).reshape(1, 1, 8, 8)).clamp(0, 1) for t in subject.targets]
    rows = explained(subject, near)
    assert all(row.search_failed and row.found < 0.01 for row in rows)


def test_what_is_found_is_neither_failed_nor_gone() -> None:
    found = measured(ensemble="linear_layer")
    assert found.found.count == 4 and found.search_failed.count == found.information_gone.count == 0


def test_the_records_say_what_the_shares_are_of() -> None:
    result = run_cell(SMALL.replace(ensemble="inverting_gradients(steps=2)", batch_size=2)).result
    gaps = [record.gap for record in result.records]
    assert gaps[0] == gaps[1] != gaps[2] == gaps[3]  # one score an update
    assert all(gap is not None and gap > 0 for gap in gaps)


@pytest.mark.parametrize("changes", [{}, {"cut": "cut1"}, {"clients": 2}, {"local_steps": 2}])
def test_the_truth_explains_itself_and_nothing_else_does(changes: dict[str, Any]) -> None:
    subject = make_subject(**({"model": "mlp(hidden=16)"} | changes))
    truths = [t.batch.inputs for t in subject.targets]
    assert not any(row.search_failed for row in explained(subject, truths))
    if len(truths) > 1:
        others = [*truths[1:], truths[0]]
        assert all(row.search_failed and row.gap > 0 for row in explained(subject, others))


def test_drowned_in_noise_any_picture_explains_as_well_as_the_truth() -> None:
    loud = make_subject(defense="gaussian_noise(std=30.0)", records=16)
    others = [t.batch.inputs.flip(-1) for t in loud.targets]
    rows = explained(loud, others)
    assert all(row.likelihood and abs(row.truth - 0.5) < 0.2 for row in rows)
    assert sum(row.search_failed for row in rows) <= 1
    # Beside noise that hides little the same pictures are told apart, however small the gap beside the score.
    faint = make_subject(defense="gaussian_noise(std=0.003)", records=16)
    rows = explained(faint, [t.batch.inputs.flip(-1) for t in faint.targets])
    assert all(row.search_failed for row in rows)


def test_the_tolerance_is_that_of_a_likelihood_ratio() -> None:
    # n log-likelihoods that differ by ln 20 in all; the score is their mean, 1/2 at the truth.
    assert tolerance_at(0.5, 1000) == pytest.approx(math.log(20) / 1000)
    assert tolerance_at(1e-14, 1000) == 1e-9  # nothing drawn, nothing to excuse
    assert tolerance_at(math.inf, 1000) == 1e-9


def test_scores_that_scatter_among_truths_are_worth_fewer_entries() -> None:
    subject = make_subject(defense="graddefense(std=0.01)")
    others = [t.batch.inputs.flip(-1) for t in subject.targets]
    calm = explained(subject, others, Referee(truths=(0.1, 0.1 + 1e-6)))
    scattered = explained(subject, others, Referee(truths=(0.1, 0.3)))
    # s² = 0.5 for (0.1, 0.3), so such a score is worth four entries.
    assert [row.tolerance for row in scattered] == pytest.approx([2 * math.log(20) * row.truth / 4 for row in scattered])
    assert all(a.tolerance < b.tolerance / 10 for a, b in zip(calm, scattered, strict=True))


def test_unknowns_of_the_truth_are_fitted_from_what_was_found_too() -> None:
    subject = make_subject(defense="lrp(spread=0.5)", ensemble="inverting_gradients(steps=2)")
    observation = subject.targets[0].observation
    drawn = observation.adversary.variables(observation, torch.Generator().manual_seed(3))
    assert drawn
    truth = subject.targets[0].replayed_inputs
    referee = Referee()
    candidate = Reconstruction(truth, subject.targets[0].batch.targets, "some", variables=drawn)
    verdict = referee.select(observation, [candidate])
    one = Subject(**{**subject.__dict__, "targets": subject.targets[:1]})
    (row,) = explain(one, [candidate], [verdict], referee, torch.tensor([1]))
    assert row.truth <= verdict.scores[0] + 1e-12


def test_a_score_that_is_no_number_is_a_failed_search() -> None:
    rows = [Explained(math.inf, 1.0), Explained(math.nan, 1.0), Explained(math.inf, math.inf), Explained(0.5, 1.0)]
    gap = gap_of(rows, torch.tensor([2, 2, 2, 2]))
    assert (gap.search_failed.count, gap.information_gone.count) == (3, 1)
    assert gap.median is None


def test_shares_count_records_and_the_median_is_in_units_of_the_truth() -> None:
    rows = [Explained(3.0, 1.0, likelihood=True), Explained(0.5, 1.0, likelihood=True)]
    gap = gap_of(rows, torch.tensor([1, 2, 3, 1]))
    assert (gap.found.count, gap.search_failed.count, gap.information_gone.count) == (2, 1, 1)
    assert gap.median == pytest.approx(0.75) and gap.objective == "likelihood"
    assert gap_of([Explained(1e-3, 1e-15)], torch.tensor([2])).median is None
