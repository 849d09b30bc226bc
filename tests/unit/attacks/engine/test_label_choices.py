"""Which labels are tried: all likely counts, the hands they are dealt in, and how near a release is to those of a class."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gradveil.attacks.engine import label_belief
from gradveil.attacks.engine.label_belief import _Simulated
from gradveil.attacks.engine.label_counts import plausible_counts
from gradveil.attacks.engine.label_rows import standardised
from gradveil.attacks.engine.labels import _dealt, as_labels
from gradveil.records import Observation
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe, simulator


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_the_likeliest_counts_are_those_of_all_there_are(count: int, most: int) -> None:
    expected, spread, sure = torch.tensor([0.9, 0.7, 0.35, 0.05]) * count / 2, 0.6, 0.95
    everything = [list(each) for each in itertools.product(range(count + 1), repeat=4) if sum(each) == count]
    energy = (torch.tensor(everything).double() - expected.double()).square().sum(1) / (2 * spread**2)
    order = energy.argsort(stable=True)
    found, probabilities = plausible_counts(expected, spread, count, sure, most)
    shares = (-energy).softmax(0)[order]
    needed = int((shares.cumsum(0) < sure).sum()) + 1
    assert len(found) == len(probabilities) <= most and abs(len(found) - min(needed, most)) <= 1
    assert torch.allclose(probabilities, probabilities.sort(descending=True).values)
    best = [everything[place] for place in order.tolist()]
    if most == 9:  # with a cap fewer are tried
        assert [each.tolist() for each in found] == best[: len(found)]
        assert probabilities.tolist() == pytest.approx(shares[: len(found)].tolist(), rel=0.05)
    assert found[0].tolist() == best[0]


def training(examples: int, minibatch: int, clients: int = 1) -> Observation:
    learner = make_learner(shares="weights", epochs=1, minibatch=minibatch, clients=clients)
    return observe(learner, make_batch(examples))


@pytest.mark.parametrize(
    ("examples", "minibatch", "clients", "places"),
    [
        (6, 3, 1, [0, 2, 4, 1, 3, 5]),
        (5, 4, 1, [0, 2, 3, 4, 1]),
        (7, 3, 1, [0, 3, 5, 1, 4, 6, 2]),
        (6, 6, 1, [0, 1, 2, 3, 4, 5]),
        (8, 2, 2, [0, 4, 1, 5, 2, 6, 3, 7]),
        (6, 2, 2, [0, 4, 1, 2, 5, 3]),
    ],
)
def test_labels_are_dealt_to_minibatches_that_hold_no_more_than_they_do(
    examples: int, minibatch: int, clients: int, places: list[int]
) -> None:
    seen = training(examples, minibatch, clients)
    assert _dealt(seen) == places
    counts = torch.tensor([2, 1, examples - 3, 0, 0])
    assert as_labels(counts, seen).tolist() == [sorted([0, 0, 1, *[2] * (examples - 3)])[place] for place in places]


def test_the_nearest_releases_are_told_by_those_of_the_other_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that teach the same lie at no distance from one another: a held-out one is the mean of the rest."""
    asked: list[tuple[Any, ...]] = []

    def noting(*given: Any) -> None:
        asked.append(given)

    monkeypatch.setattr(label_belief, "fit_rows", noting)
    learner = make_learner()
    seen = observe(learner, make_batch(), "gaussian_noise(std=0.1)")
    lessons = _Simulated(seen, make_context(simulate=simulator((learner,), "gaussian_noise(std=0.1)")))
    pictures, classes = 3, 5
    one = torch.rand((classes, 7), generator=torch.Generator().manual_seed(0)).double()
    rows = [lessons._row(seen)] * (pictures * classes)
    lessons._known["bank"] = (one.expand(pictures, classes, 7), rows)
    lessons._fit_both(ask_author=False)
    ((features, labels, folds),) = asked
    near = standardised(-torch.cdist(one, one))
    assert torch.allclose(features[..., -1].reshape(pictures, classes, classes), near.expand(pictures, classes, classes))
    assert labels.tolist() == [*range(classes)] * pictures
    assert list(folds) == [picture for picture in range(pictures) for _ in range(classes)]


def test_every_release_of_its_own_making_has_a_draw_that_nothing_else_has() -> None:
    draws: list[int] = []
    learner = make_learner()
    inner = simulator((learner,), "gaussian_noise(std=0.1)")

    def noting(inputs: Any, targets: Any, draw: int) -> Any:
        draws.append(draw)
        return inner(inputs, targets, draw)

    lessons = _Simulated(observe(learner, make_batch(), "gaussian_noise(std=0.1)"), make_context(simulate=noting))
    lessons._releases()
    assert draws == [label_belief.FIRST_DRAW + place for place in range(label_belief.RELEASES)]
    draws.clear()
    bank, rows = lessons._bank()
    assert draws == [label_belief.FIRST_DRAW + label_belief.RELEASES + place for place in range(len(rows))]
    assert bank.shape[:2] == (label_belief.MOST_PICTURES, 5) and len(rows) == 5 * label_belief.MOST_PICTURES
    lessons._bank(), lessons._releases()
    assert len(draws) == len(rows), "made once"
