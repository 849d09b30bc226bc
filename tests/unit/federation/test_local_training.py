"""Shuffling and dropout in a federation: what clients draw is theirs, and what no run asked for stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradveil.errors import UsageError
from gradveil.federation import run_training
from gradveil.federation.vertical_training import build_vertical
from gradveil.learning.dropout import HandedDropout
from gradveil.study.training_result import TrainingResult
from tests.unit.federation.small import settings, shapes


def dropping(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    size = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, classes))


DROPPING = f"{__file__}:dropping"


def train(**changes: Any) -> TrainingResult:
    return run_training(settings(**changes), dataset=shapes(48), test=shapes(24, seed=1))


def same(one: TrainingResult, two: TrainingResult) -> bool:
    return all(torch.equal(value, two.weights[name]) for name, value in one.weights.items())


def test_the_first_epoch_has_the_order_of_the_round_with_and_without_shuffling() -> None:
    assert same(train(local_epochs=1), train(local_epochs=1, shuffle=True))
    assert not same(train(local_epochs=2), train(local_epochs=2, shuffle=True))
    assert same(train(local_epochs=2, shuffle=True), train(local_epochs=2, shuffle=True))


def test_clients_train_with_masks_and_are_evaluated_without() -> None:
    off, on, again = (train(model=DROPPING, dropout=dropout, rounds=6) for dropout in (False, True, True))
    assert not same(off, on) and same(on, again)
    assert on.final_accuracy is not None and on.final_accuracy > 0.8, "it learns all the same"
    assert on.weights.keys() == off.weights.keys() and not any("mask" in name for name in on.buffers)


@pytest.mark.parametrize("defense", ["dp_sgd(noise_multiplier=0.1)", "precode(latent=4)"])
def test_dropout_goes_with_defenses_of_single_examples_and_with_models_that_draw(defense: str) -> None:
    assert len(train(model=DROPPING, dropout=True, defense=defense, rounds=1, clients_per_round=1).rounds) == 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="the model has no dropout layer"):
        train(dropout=True)
    with pytest.raises(UsageError, match="count local_epochs instead of local_steps"):
        settings(local_steps=3, shuffle=True)
    with pytest.raises(UsageError, match="parties of vertical learning train with dropout off"):
        build_vertical(settings(dropout=True), "cut1", "whole", data=(shapes(12), shapes(6)))
    assert not isinstance(dropping((1, 8, 8), 3)[3], HandedDropout)
