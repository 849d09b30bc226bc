"""What is counted in an audit: tests, draws of nulls, guesses without an update, rehearsals; and whose picture is whose."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import Referee
from gradveil.attacks.linear_layer import LinearLayer
from gradveil.audit import canaries, floors, many_clients, owners, power
from gradveil.audit.judge import originals, scored_images
from gradveil.audit.label_level import label_null
from gradveil.audit.list_counts import Try, best_guess, counted
from gradveil.audit.list_level import _Lists
from gradveil.audit.lists import Pool
from gradveil.audit.nulls import _labels
from gradveil.audit.owners import owners_level
from gradveil.audit.risks import risk_of_cell
from gradveil.audit.sensitivity import fit_sensitivity
from gradveil.audit.state import _noise
from gradveil.learning import Learner, loss_by_name
from gradveil.learning.dropout import with_dropout
from gradveil.metrics import share_of
from gradveil.metrics.summary import wilson
from gradveil.randomness import Seed
from gradveil.records import Reconstruction
from gradveil.risk.mean_error import MeanErrorBound
from gradveil.study.levels import Listed, Reach
from gradveil.study.local_training import TrainingSettings
from gradveil.study.rung import RungTask
from tests.unit.audit.small import CELL, make_subject
from tests.unit.audit.test_owners import EACH, PEOPLE, means, people


def best_multiset(shares: list[float], batch: int) -> float:
    """Return the largest share of labels that any fixed answer hits, by trying all of them on all batches."""
    classes = range(len(shares))
    best = 0.0
    for answer in itertools.combinations_with_replacement(classes, batch):
        hits = 0.0
        for drawn in itertools.product(classes, repeat=batch):
            probability = math.prod(shares[label] for label in drawn)
            hits += probability * sum(min(answer.count(label), drawn.count(label)) for label in classes)
        best = max(best, hits / batch)
    return best


def test_the_null_of_labels_is_the_best_of_all_fixed_answers() -> None:
    labels = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    for batch, records in itertools.product((1, 2, 5), (2, 40)):
        found, value = label_null(labels, 4, batch, records), best_multiset([0.5, 0.3, 0.2], batch)
        assert found.value == pytest.approx(value) and found.high == pytest.approx(wilson(round(value * records), records)[1])
        assert found.null == ("commonest class" if batch == 1 else "best fixed labels")
    # Where one class is nearly all there is, the best answer is that class alone, more often than there are classes.
    assert label_null(torch.tensor([0] * 9 + [1]), 2, 5, 40).value == pytest.approx(best_multiset([0.9, 0.1], 5))


def test_a_planted_leak_rehearses_as_often_as_its_ensemble_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    build: Any = vars(power)["build_subject"]

    def noting(*given: Any) -> Any:
        asked.append(given)
        return build(*given)

    monkeypatch.setattr(power, "build_subject", noting)
    for ensemble, rehearsals in (("linear_layer", 2), ("published-recipe-1", 1)):
        cell = CELL.replace(records=1, ensemble=ensemble, steps=1, risk="off", device="cpu")
        power.measure_rung(RungTask(cell=cell, leak=0.5))
        assert asked[-1][0] == cell and asked[-1][2] == rehearsals


def test_pictures_of_a_batch_go_to_their_records_whatever_their_order() -> None:
    subject = make_subject(records=6, batch_size=3)
    mixed = [
        [Reconstruction((t.batch.inputs.roll(1, 0) + 0.01).clamp(0, 1), t.batch.targets.roll(1, 0), "x", target=place)]
        for place, t in enumerate(subject.targets)
    ]
    truth = torch.cat([target.batch.inputs for target in subject.targets])
    assert torch.allclose(power._chosen(subject, mixed, Referee()), (truth + 0.01).clamp(0, 1))


def test_as_many_tests_are_allowed_for_as_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tests: list[int] = []

    def noting(*given: Any) -> bool:
        tests.append(given[-1])
        return False

    monkeypatch.setattr(canaries, "_cheat", noting)
    cases: list[tuple[dict[str, Any], int]] = [({}, 2), ({"cut": "cut1"}, 1)]
    for changes, signs in cases:
        tests.clear()
        subject = power.plant(make_subject(records=8, **changes), 1.0)
        seen = [target.observation for target in subject.targets]
        attacks = [LinearLayer()] if signs == 2 else [canaries_attack()]
        found = [[Reconstruction(t.batch.inputs, t.batch.targets, "x", target=i)] for i, t in enumerate(subject.targets)]
        canaries.check_canaries(subject, attacks, subject.context(5), found, share_of(8, 8))
        assert len(seen) == 8 and tests and set(tests) == {signs}


def canaries_attack() -> Any:
    from gradveil.attacks import ATTACKS

    return ATTACKS.build("inverting_gradients(steps=1)")


def test_owners_are_drawn_anew_for_every_attacker(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    others = owners._others

    def noting(*given: Any) -> Any:
        drawn.append(float(given[-1].random()))
        return others(*given)

    monkeypatch.setattr(owners, "_others", noting)
    subject = people()
    level = owners_level(subject, {name: means(subject) for name in "abc"}, Seed(0))
    assert len(set(drawn)) == 3 and level is not None and level.null is not None and level.null.draws == 3


def test_the_null_of_lists_guesses_once_for_every_attacker() -> None:
    tries = [Try(name, False, [1, 1, 3, 1], [4, 4, 2, 8], 0.5) for name in "abc"]
    chance = (0.25 + 0.25 + 0.5 + 0.125) / 4
    for count in (1, 2, 3):
        found = counted(tries[:count])
        assert found.share is not None and found.null == best_guess("guess", chance, found.share.n, count)
    ranks, sizes = tries[0].ranks, tries[0].sizes
    assert found.share is not None and found.sensitivity == fit_sensitivity(ranks, sizes, worth=found.share.effective)
    assert found.size == round(18 / 4) and [each.attacker for each in found.reached] == ["a", "b", "c"]


def test_scores_of_risk_say_how_they_were_made() -> None:
    scores = risk_of_cell(make_subject(records=2, risk="dense"))
    assert scores is not None
    found = scores.beside(["a", "b"], [0.1, 0.2], "plain")
    assert (found.noise_form, found.reason) == ("inverse", "") and found.meaning and found.alpha is not None and found.beta
    assert found.gap_rule == scores.defended.records[0].gap_rule if scores.defended is not None else False
    assert [row.pseudonym for row in found.records] == ["a", "b"] and [row.error for row in found.records] == [0.1, 0.2]
    for row in found.records:
        assert row.undefended == pytest.approx(row.invre) and row.low <= row.invre <= row.high
    assert found.correlation.attack == "plain"
    assert found.defended is not None and found.undefended is not None and found.defended == found.undefended


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.body(inputs)
        return found


def test_in_a_training_dropout_drops_and_other_noise_is_normal() -> None:
    learner = with_dropout(Learner.of(Dropping(), loss_by_name("cross_entropy"), TrainingSettings(dropout=True)), (1, 4, 4))
    (mask,) = learner.noise
    both = learner.replace(noise={**learner.noise, "other": torch.zeros((1, 1, 50))})
    for count in (1, 5):
        drawn = _noise(both, count, Seed(0).generator("x"))
        assert drawn.keys() == {mask, "other"} and all(len(value) == count for value in drawn.values())
        assert sorted(set(drawn[mask].flatten().tolist())) == [-1.0, 1.0], "an entry is dropped, or doubled"
        assert len(set(drawn["other"].flatten().tolist())) == 50 * count


@pytest.mark.parametrize(("attackers", "n"), [(1, 5), (3, 20)])
def test_a_best_guess_says_whose_it_is(attackers: int, n: int) -> None:
    found = best_guess("coin", 0.5, n, attackers)
    assert found.null == "coin" and found.high is not None and 0.5 <= found.value < found.high <= 1


def test_lists_too_short_to_lose_a_record_say_so() -> None:
    subject = make_subject(records=2)
    few = Pool.of(subject, 3)
    lists = _Lists(subject, subject.context(5), few)
    around = torch.eye(3, dtype=torch.bool)
    assert lists._presence([], around).reason == "lists are too short to take a record off them"
    assert lists._listed([], around).reason == "no list of this kind has a second candidate"


def test_owners_on_lists_are_those_of_every_attacker() -> None:
    subject = people()
    pool = Pool.of(subject, PEOPLE * EACH)
    assert pool.owners is not None
    lists = _Lists(subject, subject.context(5), pool)
    listed = pool.lists(torch.ones(len(pool), len(pool), dtype=torch.bool))
    right = pool.alike().double()
    wrong = right.roll(1, 0)
    half = share_of(1, 2)
    level = Listed(share=half, attacker="a", reached=(Reach(attacker="a", share=half), Reach(attacker="b", share=half)))
    found = lists._with_owners(level, [wrong, right], listed)
    first, second = (reach.owners for reach in found.reached)
    assert first is not None and second is not None and first.count < second.count == PEOPLE
    assert found.owners is not None and (found.owners.count, found.owners.n) == (PEOPLE, PEOPLE)
    assert found.owners_null == best_guess("commonest owner", pool.commonest_owner(listed), PEOPLE, 2)
    assert (found.share, found.attacker) == (level.share, "a")
    bare = dataclasses.replace(pool, owners=None)
    assert _Lists(subject, subject.context(5), bare)._with_owners(level, [wrong, right], listed) is level


@pytest.mark.parametrize("known", [True, False])
def test_a_null_keeps_the_labels_that_the_attacker_has(known: bool) -> None:
    subject = make_subject(records=4, known_labels=known)
    rows, truth = [0, 1, 2, 3, 9], subject.candidate_labels[torch.tensor([0, 1, 2, 3, 9])].tolist()
    image = originals(subject)
    none, some = (scored_images(subject, image, labels) for labels in (None, torch.tensor([1.0, 0.0, 0.5, 1.0])))
    assert _labels(subject, none, rows) == (truth if known else [None] * 5)
    assert _labels(subject, some, rows) == (truth if known else [truth[0], None, None, truth[3], truth[4]])


def test_a_floor_is_taken_at_each_candidate_with_its_own_label(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Tensor, int]] = []
    inner: Any = vars(floors)["defended_release"]

    def noting(learner: Any, record: Tensor, label: Tensor, *more: Any, **keywords: Any) -> Any:
        given.append((record, int(label)))
        return inner(learner, record, label, *more, **keywords)

    monkeypatch.setattr(floors, "defended_release", noting)
    monkeypatch.setattr(floors, "INPUTS", 4)
    subject = make_subject(records=2, model="mlp(hidden=16, activation='sigmoid')", defense="clipping + gaussian_noise")
    floors.mean_error_of_cell(subject)
    assert [label for _, label in given] == subject.candidate_labels[:4].tolist()
    for (record, _), clean in zip(given, subject.candidates, strict=False):
        assert 0 < float((record - clean).square().mean().sqrt()) < 2 * floors.SMOOTHING


@pytest.mark.parametrize("low", [None, 0.01])
def test_a_floor_holds_both_ends_of_its_bound(low: float | None) -> None:
    found = floors.as_floor(MeanErrorBound(0.02, low, 0.04, 7, "matrix", 0.9), 0.25)
    assert (found.mse, found.low, found.high, found.n, found.form) == (0.02, low, 0.04, 7, "matrix")
    assert (found.confidence, found.smoothing, found.noise_std, found.reason) == (0.9, floors.SMOOTHING, 0.25, "")
    assert found.psnr == pytest.approx(-10 * math.log10(low or 0.02))


def test_clients_run_as_many_at_a_time_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def noting(device: torch.device, parameters: int, candidates: int, examples: int) -> int:
        asked.append((parameters, candidates, examples))
        return 2

    monkeypatch.setattr(many_clients, "chunk_size", noting)
    subject = make_subject(defense="gaussian_noise", batch_size=2, records=2)
    simulate = subject.context(5).simulate_many
    assert simulate is not None
    inputs = torch.rand((3, 2, *subject.own.input_shape), generator=torch.Generator().manual_seed(0))
    simulate(inputs, torch.zeros((3, 2), dtype=torch.long), 0)
    assert asked == [(subject.learner.parameters, 3, 2)]
