"""What an attacker learns from is none of what it attacks, and the threat model says what it is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gradveil.attacks import resolve
from gradveil.audit import prior as module
from gradveil.audit.judge import originals, scored_images
from gradveil.audit.nulls import derangements, null_rows
from gradveil.audit.party import own_part
from gradveil.audit.scene import Subject, build_subject
from gradveil.audit.state import CANDIDATES
from gradveil.data import load_source
from gradveil.randomness import Seed
from gradveil.run.grid import cells_of
from gradveil.study.cell import Cell
from gradveil.study.plan import Plan
from tests.unit.audit.small import CELL, digits, few_digits, make_subject


def told(subject: Subject) -> str:
    return " ".join(subject.targets[0].observation.threat.describe())


def test_records_of_the_same_data_are_no_candidates() -> None:
    subject = make_subject()
    found = subject.prior
    assert found.source == "same" and found is subject.context(10).public
    flat = digits().inputs.flatten(1)
    apart = torch.cdist(found.inputs.flatten(1), subject.candidates.flatten(1))
    assert float(apart.min()) > 0 and len(found.inputs) > 1000
    rows = torch.cdist(found.inputs[:50].flatten(1), flat).argmin(1)
    assert torch.equal(digits().targets[rows], found.targets[:50])
    assert "other records of the same data: no candidate" in told(subject)


def test_near_copies_of_candidates_are_left_out() -> None:
    data = digits()
    pool = [int(row) for row in make_subject().pool[:10]]
    spare = next(row for row in range(len(data)) if row not in make_subject().pool)
    inputs = data.inputs.clone()
    inputs[spare] = (inputs[pool[3]] + 1e-3).clamp(0, 1)
    near = dataclasses.replace(data, inputs=inputs)
    before, after = (build_subject(CELL, each, 0).prior.inputs for each in (data, near))
    assert len(after) == len(before) - 1
    assert float((after - inputs[pool[3]]).flatten(1).norm(dim=1).min()) > 0.1


def test_where_too_few_are_left_other_data_are_taken_and_it_is_said() -> None:
    few = build_subject(CELL, few_digits(), 0)
    assert few.prior.source == "other"
    assert "only 0 are left beside attacked records" in told(few)
    asked = make_subject(prior="other")
    assert asked.prior.source == "other" and "records of other data, and from none of the audited ones." in told(asked)


def test_lists_hold_none_of_what_is_learned_from() -> None:
    longer = make_subject(lists=str(CANDIDATES + 300))
    assert len(make_subject().prior.inputs) - len(longer.prior.inputs) > 250


@pytest.mark.parametrize("prior", ["other", "none"])
def test_other_priors_hold_nothing_of_the_data(prior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MADE", 40)
    found = make_subject(prior=prior).prior
    assert found.source == prior and found.inputs.shape == (40, *digits().input_shape)
    assert float(torch.cdist(found.inputs.flatten(1), digits().inputs.flatten(1)).min()) > 0.3
    assert set(found.targets.tolist()) == set(range(10))
    again, other = make_subject(prior=prior).prior, make_subject(prior=prior, seed=1).prior
    assert torch.equal(found.inputs, again.inputs) and not torch.equal(found.inputs, other.inputs)


def test_photographs_under_attack_teach_nobody() -> None:
    cell = Cell(data="photos", records=2, prior="other", lists="off")
    found = module.public_records(cell, photos := load_source(cell), photos, [0, 1])
    assert float(torch.cdist(found.inputs[:200].flatten(1), photos.inputs.flatten(1)).min()) > 0.5


def test_no_more_is_held_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_VALUES", 30 * digits().inputs[0].numel())
    assert len(make_subject().prior.inputs) <= 30 and len(make_subject(prior="none").prior.inputs) == 30


def test_a_party_learns_from_its_own_part() -> None:
    whole = make_subject(prior="other")
    part = make_subject(prior="other", cut="cut1", parts="left_right", party=1, model="mlp(hidden=8)")
    assert torch.equal(part.prior.inputs, own_part(part.cell, whole.prior.inputs))
    same = make_subject(cut="cut1", parts="left_right", party=1, model="mlp(hidden=8)").prior
    assert same.inputs.shape[1:] == part.own.input_shape


def test_records_the_model_was_trained_on_are_said_to_be_among_them() -> None:
    assert "some of which the model was trained on" in told(make_subject(state="trained(steps=1)"))
    assert "some of which" not in told(make_subject())


def test_three_priors_are_three_cells() -> None:
    cells = cells_of(Plan.default(prior=("same", "other", "none"), defense=("none",)))
    assert [cell.prior for cell in cells] == ["same", "other", "none"]
    assert len({cell.key() for cell in cells}) == 3


def test_the_mean_of_public_records_is_a_null_where_attackers_learn() -> None:
    subject = make_subject(prior="same")
    truth = originals(subject)
    drawn = derangements(subject, [scored_images(subject, truth)], Seed(0))
    rows = null_rows(subject, resolve("kernel_regression(records=64)"), subject.context(5), 1, drawn)
    label = int(subject.targets[0].batch.targets[0])
    public = subject.prior
    assert torch.allclose(rows["public_mean"].images[0], public.inputs[public.targets == label].mean(0))
    without = null_rows(subject, resolve("linear_layer"), subject.context(5), 1, drawn)
    assert "public_mean" not in without, "nulls of older ensembles stay what they were"
    other = make_subject(prior="other")
    rows = null_rows(other, resolve("kernel_regression(records=64)"), other.context(5), 1, drawn)
    assert torch.allclose(rows["public_mean"].images[0], other.prior.inputs.mean(0))


def test_records_of_attacked_owners_are_not_public_where_others_are_enough() -> None:
    data = digits()
    many = dataclasses.replace(data, owners=tuple(f"writer {row % 50}" for row in range(len(data))))
    subject = build_subject(CELL, many, 0)
    taken = {row % 50 for row in subject.indices}
    rows = torch.cdist(subject.prior.inputs.flatten(1), data.inputs.flatten(1)).argmin(1).tolist()
    assert rows and not taken & {row % 50 for row in rows}
    assert "other records of the same data of other owners" in told(subject)
    few = dataclasses.replace(data, owners=tuple(f"hospital {row % 2}" for row in range(len(data))))
    both = build_subject(CELL, few, 0)
    assert len(both.prior.inputs) == len(make_subject().prior.inputs) and "of other owners" not in told(both)
