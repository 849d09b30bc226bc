"""From candidates to numbers: selection, the best by truth, and the nulls beside them."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradveil.attacks import Referee, launch, resolve
from gradveil.audit.judge import best_by_truth, deranged, null_rows, per_recipe, score, select
from gradveil.audit.scene import Subject
from gradveil.metrics.base import Unavailable
from gradveil.randomness import Seed
from gradveil.records import Reconstruction
from tests.unit.audit.small import make_subject


@given(labels=st.lists(st.integers(0, 3), min_size=2, max_size=30))
def test_derangement_never_keeps_a_record_and_prefers_its_label(labels: list[int]) -> None:
    other = deranged(labels)
    assert len(other) == len(labels)
    for index, (label, chosen) in enumerate(zip(labels, other, strict=True)):
        assert chosen != index and 0 <= chosen < len(labels)
        alike = [j for j, each in enumerate(labels) if each == label and j != index]
        assert (labels[chosen] == label) is bool(alike)


@given(labels=st.lists(st.integers(0, 3), min_size=2, max_size=30))
def test_derangement_spreads_over_all_records_of_a_label(labels: list[int]) -> None:
    other = deranged(labels)
    shared = [i for i, label in enumerate(labels) if labels.count(label) > 1]
    assert sorted(other[i] for i in shared) == shared


def test_a_single_record_has_no_other() -> None:
    assert deranged([4]) == [0]


@functools.cache
def subject() -> Subject:
    return make_subject(records=6, batch_size=2)


def guess(target: int, error: float, recipe: str, *, flipped: bool = False, stance: str = "plain") -> Reconstruction:
    batch = subject().targets[target].batch
    wave = torch.sin(3 * torch.arange(batch.inputs.numel(), dtype=torch.float32)).reshape(batch.inputs.shape)
    inputs = (batch.inputs + error * wave).clamp(0, 1)
    inputs, labels = (inputs.flip(0), batch.targets.flip(0)) if flipped else (inputs, batch.targets)
    return Reconstruction(inputs, labels, recipe, target=target, stance=stance)


def candidates() -> list[list[Reconstruction]]:
    """Return a coarse plain and a fine informed candidate per target."""
    return [[guess(t, 0.4, "coarse"), guess(t, 0.05, "fine", stance="informed", flipped=t == 1)] for t in range(3)]


def psnr(of: Tensor | Unavailable) -> Tensor:
    assert isinstance(of, Tensor)
    return of


def test_batches_come_back_in_any_order() -> None:
    straight = score(subject(), [guess(t, 0.1, "x") for t in range(3)])
    flipped = score(subject(), [guess(t, 0.1, "x", flipped=True) for t in range(3)])
    assert straight.labels is not None and flipped.labels is not None
    assert float(straight.labels.mean()) == 1.0 == float(flipped.labels.mean())
    assert psnr(flipped.values["psnr"]).tolist() == pytest.approx(psnr(straight.values["psnr"]).tolist())
    assert straight.rank.tolist() == [1] * 6
    assert all(value is None or value > 15 for value in straight.column("psnr"))


def test_select_keeps_what_the_referee_would_within_the_stances() -> None:
    found = select(subject(), candidates(), Referee())
    assert found is not None
    assert [c.recipe for c in found[0]] == ["fine"] * 3 and len(found[1]) == 3
    plain = select(subject(), candidates(), Referee(), ("plain",))
    assert plain is not None and [c.recipe for c in plain[0]] == ["coarse"] * 3
    assert select(subject(), candidates(), Referee(), ("zero_mask",)) is None


def test_the_best_by_truth_is_the_nearest_whatever_the_referee_says() -> None:
    assert [c.recipe for c in best_by_truth(subject(), candidates())] == ["fine"] * 3


def test_every_recipe_has_its_own_row() -> None:
    chosen = best_by_truth(subject(), candidates())
    rows = per_recipe(subject(), candidates(), Referee(rehearsal={"fine/informed": 30.0}), chosen, Seed(0))
    assert [(r.recipe, r.stance, r.tries, r.chosen) for r in rows] == [
        ("coarse", "plain", 1, 0),
        ("fine", "informed", 1, 3),
    ]
    assert [r.rehearsal_psnr for r in rows] == [None, 30.0]
    medians = [r.summary.psnr.median for r in rows if r.summary is not None and r.summary.psnr is not None]
    assert len(medians) == 2 and medians[1] > medians[0]


def test_nulls_know_nothing_of_the_update() -> None:
    selected = score(subject(), best_by_truth(subject(), candidates()))
    rows = null_rows(subject(), resolve("inverting_gradients(steps=50)"), subject().context(50), 3, selected)
    assert set(rows) == {"grey", "data_mean", "prior_only", "derangement"}
    own = float(psnr(selected.values["psnr"]).median())
    assert all(float(psnr(row.values["psnr"]).median()) < own - 5 for row in rows.values())
    assert torch.equal(rows["grey"].images, torch.full_like(rows["grey"].images, 0.5))
    assert torch.equal(rows["derangement"].images, selected.images)
    assert not bool((rows["derangement"].rank == 1).any())


def test_prior_only_does_not_move_with_the_update() -> None:
    selected = score(subject(), best_by_truth(subject(), candidates()))
    ensemble, context = resolve("inverting_gradients(steps=50)"), subject().context(50)
    other = make_subject(records=6, batch_size=2, model="mlp(hidden=8)")
    left, right = (null_rows(each, ensemble, context, 2, selected)["prior_only"].images for each in (subject(), other))
    assert torch.equal(left, right)


def test_a_real_attack_identifies_everyone() -> None:
    single = make_subject()
    found = launch(resolve("linear_layer").members[0].attack, [t.observation for t in single.targets], single.context(1))
    scored = score(single, found)
    assert scored.rank.tolist() == [1] * 4
    summary = scored.summary(Seed(0))
    assert summary.identified.value == 1.0
