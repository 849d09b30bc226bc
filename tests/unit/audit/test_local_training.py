"""What clients really do, in an audit: epochs, minibatches, orders, momentum and dropout, and which records a model has seen."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from gradveil.attacks.engine.labels import recover_labels
from gradveil.audit.risks import risk_of_cell
from gradveil.audit.scene import Subject, build_learner, build_subject
from gradveil.audit.state import CANDIDATES, seen_by_model
from gradveil.data import Dataset
from gradveil.defenses import build_defense
from gradveil.errors import UsageError
from gradveil.learning.dropout import HandedDropout
from gradveil.records import Reconstruction
from gradveil.study.cell import Cell
from gradveil.tensors import Named
from tests.unit.audit.small import CELL, digits, few_digits, make_subject

EPOCHS: dict[str, Any] = {"batch_size": 40, "records": 40, "minibatch": 4, "local_epochs": 2}
"""40 records, minibatches of 4, 2 local epochs."""


def dropping_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    size = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 16), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(16, classes))


DROPPING = f"{__file__}:dropping_net"


def residual(subject: Subject) -> float:
    """Return what is left of the update, as a share, when the truth is replayed as the attacker replays."""
    (target,) = subject.targets
    seen, learner = target.observation.update.weights, target.observation.learner
    told = target.observation.adversary.replay(learner, target.batch.inputs, target.batch.targets, {})
    return _energy({name: value - seen[name] for name, value in told.items()}) / _energy(seen)


def _energy(named: Named) -> float:
    return float(torch.stack([value.double().square().sum() for value in named.values()]).sum())


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9}, {"clients": 2, "batch_size": 20}, {"minibatch": 7}])
def test_an_update_of_epochs_in_minibatches_is_replayed_exactly(changes: dict[str, Any]) -> None:
    subject = make_subject(**{**EPOCHS, **changes})
    assert subject.targets[0].observation.learner.settings.shares == "weights"
    assert residual(subject) < 1e-9


def test_orders_of_later_epochs_are_not_known() -> None:
    assert 1e-6 < residual(make_subject(**{**EPOCHS, "batch_size": 12, "records": 12, "shuffle": True})) < 0.1


def test_what_the_attacker_does_not_know_is_told() -> None:
    quiet, loud = (make_subject(**EPOCHS, **more).targets[0].observation.threat.describe() for more in ({}, {"shuffle": True}))
    assert "Clients train with 2 local epochs, minibatches of 4, which the attacker replays." in quiet
    secret = "Every epoch after the first has an order of its own, which the attacker does not know."
    assert secret in loud and secret not in quiet
    assert not any("epoch" in line for line in make_subject().targets[0].observation.threat.describe())


def test_recovered_labels_are_dealt_to_minibatches_and_not_sorted() -> None:
    observation = make_subject(**{**EPOCHS, "local_epochs": 1}, learning_rate=1e-4).targets[0].observation
    labels = recover_labels(observation)
    assert len(labels) == 40 and not torch.equal(labels, labels.sort().values)
    counts = torch.bincount(labels, minlength=10)
    assert all(len(minibatch.unique()) > 2 for minibatch in labels.split(4) if len(counts.nonzero()) > 3)
    whole = make_subject(batch_size=40, records=40).targets[0].observation
    assert torch.equal(recover_labels(whole), recover_labels(whole).sort().values)


def test_counts_of_labels_come_through_momentum() -> None:
    """What momentum carries on would else count labels several times."""
    told: dict[str, Any] = {"batch_size": 8, "records": 8, "local_epochs": 3, "momentum": 0.9, "learning_rate": 1e-4}
    (target,) = make_subject(**told).targets
    found = torch.bincount(recover_labels(target.observation), minlength=10)
    assert int((found - torch.bincount(target.batch.targets, minlength=10)).abs().sum()) <= 2


def test_dropout_is_on_for_the_client_and_off_for_who_replays() -> None:
    on, off = (make_subject(model=DROPPING, dropout=dropout, records=1) for dropout in (True, False))
    assert sum(isinstance(layer, HandedDropout) for layer in on.learner.model.modules()) == 1
    assert residual(on) > 0.01 > 1e-9 > residual(off)
    assert any("masks" in line for line in on.targets[0].observation.threat.describe())
    assert on.learner.weights.keys() == off.learner.weights.keys()
    again = make_subject(model=DROPPING, dropout=True, records=1)
    assert _energy(on.targets[0].observation.update.weights) == _energy(again.targets[0].observation.update.weights)


def test_risks_of_single_records_need_no_minibatches() -> None:
    scores = risk_of_cell(make_subject(**{**EPOCHS, "batch_size": 4, "records": 4, "minibatch": 2}, risk="dense"))
    assert scores is not None and scores.reason == "" and scores.defended is not None
    assert len(scores.defended.records) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"local_steps": 3, "local_epochs": 2}, "local_epochs is 2 and local_steps 3"),
        ({"batch_size": 4, "minibatch": 8, "local_epochs": 1}, "set minibatch to at most 4"),
        ({"batch_size": 8, "minibatch": 2, "local_steps": 3}, "only 6 of the 8 records"),
        ({"local_epochs": 1, "momentum": 0.5, "optimizer": "adam"}, "momentum is for optimizer = 'sgd'"),
        ({"local_steps": 2, "shuffle": True}, "count local_epochs instead of local_steps"),
    ],
)
def test_settings_that_do_not_fit_together_are_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make_subject(**changes)
    assert "\n" not in str(caught.value)


def test_dropout_of_a_model_without_any_is_refused() -> None:
    with pytest.raises(UsageError, match="the model has no dropout layer"):
        make_subject(dropout=True)


@functools.cache
def some_digits() -> Dataset:
    return digits().take(range(300))


@pytest.mark.parametrize(
    ("data", "sentence", "attacked", "candidates"),
    [
        (digits, "none of them under attack or among the candidates", False, False),
        (some_digits, "none of them under attack; the other candidates are among them", False, True),
        (few_digits, "those under attack included", True, True),
    ],
)
def test_a_model_is_trained_on_other_records_where_there_are_enough(
    data: Any, sentence: str, attacked: bool, candidates: bool
) -> None:
    cell, dataset = CELL.replace(state="trained(steps=3)"), data()
    subject, seen = build_subject(cell, dataset, 0), seen_by_model(cell, dataset)
    assert (seen.attacked, bool(set(seen.rows) & set(subject.indices))) == (attacked, attacked)
    shown = {tuple(row.flatten().tolist()) for row in subject.candidates[4:CANDIDATES]}
    trained = {tuple(dataset.inputs[row].flatten().tolist()) for row in seen.rows}
    assert bool(shown & trained) == candidates
    assert any(sentence in line for line in subject.targets[0].observation.threat.describe())


def test_records_that_are_held_out_do_not_change_the_model() -> None:
    cell = CELL.replace(state="trained(steps=3)")
    spoilt = digits().inputs.clone()
    spoilt[list(build_subject(cell, digits(), 0).indices)] = 0.0
    changed = Dataset(**{**digits().__dict__, "inputs": spoilt})
    plain = build_defense("none")
    one, two = (build_learner(cell, data, plain).weights for data in (digits(), changed))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    three, four = (build_learner(cell, data, plain).weights for data in (few_digits(), few_digits().take(range(99, -1, -1))))
    assert not all(torch.equal(value, four[name]) for name, value in three.items())


def test_given_weights_are_not_said_to_be_blind() -> None:
    seen = seen_by_model(Cell(state="given"), digits())
    assert seen.sentence == "Whether the given weights have seen the records under attack is not known."
    assert seen_by_model(Cell(), digits()).sentence == ""


def test_the_truth_scores_best_before_the_referee() -> None:
    from gradveil.attacks.referee import Referee

    (target,) = make_subject(**EPOCHS).targets
    truth = Reconstruction(target.batch.inputs, target.batch.targets, recipe="truth")
    other = truth.replace(inputs=target.batch.inputs.flip(0))
    scores = Referee().scores(target.observation, [truth, other])
    assert scores[0] < 1e-6 * scores[1]
