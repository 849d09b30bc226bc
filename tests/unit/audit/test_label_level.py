"""What an update says about labels, by attacker, beside what anyone could guess."""

from __future__ import annotations

import itertools

import pytest
import torch

from gradveil.audit.label_level import label_level, label_null, strongest
from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.metrics import share_of, wilson
from gradveil.study.cell import Cell
from gradveil.study.levels import Level, Reach
from tests.unit.audit.small import make_subject


def level_of(subject: Subject) -> Level:
    return label_level(subject, subject.context(1))


def counts(level: Level) -> dict[str, int]:
    return {each.attacker: each.share.count for each in level.reached}


def test_without_a_defense_there_is_one_attacker_who_reads_everything() -> None:
    level = level_of(make_subject(records=8))
    assert counts(level) == {"plain": 8} and level.attacker == "plain"
    assert level.share is not None and (level.share.count, level.share.n) == (8, 8)
    assert level.reached[0].informed is False and level.reason == ""


def test_censor_hides_labels_from_the_plain_attacker_alone() -> None:
    level = level_of(make_subject(records=16, defense="censor(trials=2)"))
    found = counts(level)
    assert list(found) == ["plain", "own", "generic"]
    assert min(found["own"], found["generic"]) >= 12 and found["plain"] <= 4
    assert level.share is not None and level.share.count == max(found.values())
    assert [each.informed for each in level.reached] == [False, True, True]


def test_known_labels_do_not_count() -> None:
    level = level_of(make_subject(records=8, defense="gaussian_noise(std=1000.0)", known_labels=True))
    assert level.share is not None and level.share.count < 8


@pytest.mark.parametrize("defense", ["none", "clipping(bound=1.0)"])
def test_a_batch_counts_the_overlap_of_its_labels(defense: str) -> None:
    subject = make_subject(records=8, batch_size=4, defense=defense)
    level = level_of(subject)
    assert level.share is not None and level.share.n == 8 and level.share.count >= 6
    assert level.null is not None and level.null.null == "best fixed labels"


def test_labels_of_one_update_share_their_luck() -> None:
    level = level_of(make_subject(records=16, batch_size=4))
    assert level.share is not None and (level.share.count, level.share.n) == (16, 16)
    assert level.share.effective == 4 and level.share.low == wilson(4, 4)[0]


def test_masks_and_embeddings_have_a_reason_instead() -> None:
    segments = Cell(
        data="segments", model="unet(width=2, levels=1, activation='tanh')", loss="dice", records=1, known_labels=True
    )
    masks = level_of(build_subject(segments, load_cell_data(segments), 0))
    assert "masks" in masks.reason and masks.share is None
    cut = level_of(make_subject(records=2, cut="cut1"))
    assert "embedding" in cut.reason and cut.share is None


def test_the_strongest_is_the_largest_count_with_an_interval_that_allows_for_the_choice() -> None:
    reached = [Reach(attacker=name, share=share_of(count, 20)) for name, count in (("plain", 3), ("own", 9), ("generic", 8))]
    share, who = strongest(reached)
    assert who == "own" and share.count == 9
    assert share.low == wilson(9, 20, 1 - 0.05 / 3)[0] < reached[1].share.low
    assert share.high == reached[1].share.high


def test_the_null_of_one_example_is_the_commonest_class() -> None:
    null = label_null(torch.tensor([0, 1, 1, 1, 2]), 4, 1, 10)
    assert null.value == pytest.approx(0.6) and null.high == wilson(6, 10)[1]


def test_the_null_of_a_batch_is_the_best_fixed_multiset() -> None:
    labels = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    shares = [0.5, 0.3, 0.2]
    best = 0.0
    for guess in itertools.combinations_with_replacement(range(3), 3):
        total = 0.0
        for drawn in itertools.product(range(3), repeat=3):
            overlap = sum(min(guess.count(c), drawn.count(c)) for c in range(3))
            total += overlap * shares[drawn[0]] * shares[drawn[1]] * shares[drawn[2]]
        best = max(best, total / 3)
    assert label_null(labels, 3, 3, 30).value == pytest.approx(best)
