"""F1 and Dice against scikit-learn and by hand; IIP with and without features."""

from __future__ import annotations

from typing import Any

import pytest
import sklearn.metrics
import torch

from gradveil.errors import UsageError
from gradveil.learning.task import dice, f1_score
from gradveil.metrics import among_nearest, ranks

REFERENCE: Any = sklearn.metrics.f1_score


def test_f1_against_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    true = (torch.rand(200, generator=generator) < 0.3).long()
    predicted = torch.where(torch.rand(200, generator=generator) < 0.8, true, 1 - true)
    for positive in (0, 1):
        assert f1_score(predicted, true, positive) == pytest.approx(float(REFERENCE(true, predicted, pos_label=positive)))


def test_f1_is_low_where_accuracy_is_fooled() -> None:
    true = torch.tensor([0] * 9 + [1])
    assert f1_score(torch.zeros(10, dtype=torch.int64), true) == 0.0
    assert f1_score(true, true) == 1.0


def test_dice_by_hand() -> None:
    true = torch.zeros(4, 1, 2, 2)
    true[0] = 1
    true[1, 0, 0] = 1
    predicted = torch.zeros(4, 1, 2, 2)
    predicted[0] = 1
    predicted[1, 0, :, 0] = 1
    predicted[3, 0, 0, 0] = 1
    assert dice(predicted, true).tolist() == [1.0, 0.5, 1.0, 0.0]


def test_dice_of_one_picture_is_the_f1_of_its_pixels() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.rand((1, 64), generator=generator) < 0.4 for _ in range(2))
    assert dice(left, right).item() == pytest.approx(f1_score(left[0].long(), right[0].long()))


def test_shapes_must_fit() -> None:
    with pytest.raises(UsageError, match="F1"):
        f1_score(torch.tensor([1]), torch.tensor([1, 0]))
    with pytest.raises(UsageError, match="Dice"):
        dice(torch.zeros(2, 3), torch.zeros(3, 2))


def test_iip_counts_the_exact_image_among_the_nearest() -> None:
    candidates = torch.tensor([[0.0], [0.1], [0.2], [0.9]])
    rank = ranks(torch.tensor([[0.19], [0.4]]), [0, 3], candidates)
    assert rank.tolist() == [3, 4]
    assert among_nearest(rank, 1).tolist() == [False, False]
    assert among_nearest(rank, 3).tolist() == [True, False]
    with pytest.raises(UsageError, match="at least"):
        among_nearest(rank, 0)


def test_features_rank_by_their_cosine() -> None:
    candidates = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.1, 0.9]])
    found = torch.tensor([[0.2, 0.0]])  # nearest in pixels to the last, in direction to the first
    assert ranks(found, [0], candidates).item() == 2
    assert ranks(found, [0], candidates, embed=lambda x: 3 * x).item() == 1
