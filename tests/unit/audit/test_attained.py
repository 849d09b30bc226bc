"""What a regression on public records attains of attacked records: who is asked, what is reused, what stands beside it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.attacks import launch
from gradveil.attacks.kernel_regression import KernelRegression
from gradveil.audit import attained as module
from gradveil.audit.attained import Attained, attained, regression_of
from gradveil.audit.exposures import exposure_of_cell
from gradveil.audit.scene import Subject
from gradveil.records import Reconstruction
from tests.unit.audit.small import digits, make_subject

QUICK = KernelRegression(records=48, seconds=60.0)


def learn(subject: Subject, **more: Any) -> Attained:
    return attained(subject, subject.context(10), subject.prior, attack=QUICK, **more)


def mean(found: Attained, null: float = 0.1) -> float:
    return float(np.mean([found.of(place, null)["attained"] for place in range(len(found.errors))]))


def test_the_error_is_that_of_the_attack_told_the_labels() -> None:
    subject = make_subject(known_labels=True, defense="pruning(rate=0.5)")
    context = dataclasses.replace(subject.context(10), public=subject.prior)
    simulated = dataclasses.replace(QUICK, stance="simulated")
    direct = launch(simulated, [target.observation for target in subject.targets], context)
    unknown = make_subject(defense="pruning(rate=0.5)")
    found = learn(unknown)
    for place, answer in enumerate(direct):
        truth = subject.targets[place].batch.inputs
        assert found.errors[place] == pytest.approx(float((answer.inputs - truth).square().mean()), rel=1e-5)
        assert found.rehearsed[place] == pytest.approx(-10 * math.log10(answer.best_loss), rel=1e-5)
        own = subject.prior.inputs[subject.prior.targets == subject.targets[place].batch.targets]
        assert found.means[place] == pytest.approx(float((own.mean(0) - truth[0]).square().mean()), rel=1e-5)
    assert not unknown.cell.known_labels and mean(found) > 5


def test_noise_that_drowns_all_leaves_what_the_label_tells() -> None:
    bare, drowned = learn(make_subject()), learn(make_subject(defense="gaussian_noise(std=1000.0)"))
    assert mean(bare) > 10 and np.mean(bare.rehearsed) > 5
    for place, (error, by_label) in enumerate(zip(drowned.errors, drowned.means, strict=True)):
        told = drowned.of(place, 0.1)
        assert told["attained"] == pytest.approx(10 * math.log10(0.1 / error))
        assert told["by_label"] == pytest.approx(10 * math.log10(0.1 / by_label))
        assert told["attained"] < told["by_label"] + 1.5
    assert abs(float(np.mean(drowned.rehearsed))) < 0.5
    assert bare.of(0, 0.0) == {} and Attained(reason="x").of(0, 1.0) == {}


@pytest.mark.parametrize("changes", [{"defense": "quantisation(mode='qsgd')"}, {"defense": "invl_gnp"}])
def test_defenses_without_an_oracle_have_it(changes: dict[str, Any]) -> None:
    subject = make_subject(**changes)
    told = exposure_of_cell(subject, subject.context(10), [dataclasses.replace(QUICK, records=20)])
    assert told is not None
    found = told.beside(list("abcd"), [None] * 4, [0.02] * 4, "informed")
    assert found.mean is None and found.reason and found.mean_attained is not None and found.mean_attained > 1
    assert found.mean_by_label is not None and found.mean_rehearsed is not None and not found.unattained


def test_records_of_a_batch_are_matched_and_embeddings_need_no_label() -> None:
    batch = learn(make_subject(batch_size=2, model="lenet"))
    assert len(batch.errors) == 4 and batch.rehearsed[0] == batch.rehearsed[1]
    alone = learn(make_subject(model="lenet"))
    assert 0 < mean(batch) < mean(alone)
    half = make_subject(model="lenet", cut="cut1", parts="left_right")
    seen = learn(half)
    assert mean(seen) > 5 and len(set(seen.rehearsed)) == 1


def test_answers_of_the_cells_own_regression_are_taken_where_the_label_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject()
    asked: list[int] = []

    def counted(attack: Any, observations: Any, context: Any) -> list[Reconstruction]:
        asked.append(len(observations))
        return launch(attack, observations, context)

    monkeypatch.setattr(module, "launch", counted)

    def answer(place: int, label: int, stance: str = "plain") -> Reconstruction:
        inputs = torch.full((1, *digits().input_shape), 0.25)
        return Reconstruction(inputs, torch.tensor([label]), "kernel_regression", place, stance, first_loss=1.0, best_loss=0.1)

    truth = [int(target.batch.targets) for target in subject.targets]
    given = [
        [answer(0, truth[0])],
        [answer(1, truth[1] + 1)],
        [answer(2, truth[2], "simulated")],
        [answer(3, 99), answer(3, truth[3])],
    ]
    found = learn(subject, found=given)
    assert asked == [2] and found.rehearsed[0] == found.rehearsed[3] == pytest.approx(10.0)
    assert found.errors[0] == pytest.approx(float((subject.targets[0].batch.inputs - 0.25).square().mean()))
    assert found.rehearsed[1] != pytest.approx(10.0)


def test_the_regression_that_knows_the_defense_is_the_one() -> None:
    plain, informed = KernelRegression(records=20), KernelRegression(records=30, stance="simulated")
    assert regression_of([plain, informed]) is informed and regression_of([informed, plain]) is informed
    assert regression_of([plain]) is plain and regression_of([]) is None


def test_what_cannot_be_learned_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject()
    few = dataclasses.replace(subject.prior, inputs=subject.prior.inputs[:9], targets=subject.prior.targets[:9])
    context = subject.context(10)
    assert "9 public records are too few" in attained(subject, context, few).reason
    same = dataclasses.replace(subject.prior, inputs=torch.full((40, 1, 8, 8), 0.5), targets=torch.zeros(40, dtype=torch.long))
    assert "all the same" in attained(subject, context, same).reason
    other = dataclasses.replace(subject.prior, inputs=torch.rand(40, 1, 4, 4), targets=torch.arange(40) % 10)
    assert "have the shape (1, 4, 4)" in attained(subject, context, other).reason
    monkeypatch.setattr(module, "DEAR", 0.0)
    refused = attained(subject, context, subject.prior)
    assert "one run of this client takes" in refused.reason and refused.errors == ()
    assert learn(subject).errors, "an ensemble with a regression pays for it"
