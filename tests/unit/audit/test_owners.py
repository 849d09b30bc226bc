"""Whose pictures are they: owners are counted where single records cannot be told apart."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gradveil.audit import owners
from gradveil.audit.judge import Scored, scored_images
from gradveil.audit.nulls import largest_of
from gradveil.audit.owners import _others, owners_level
from gradveil.audit.scene import Subject, build_subject
from gradveil.data import Dataset
from gradveil.randomness import Seed
from gradveil.significance import effective_number
from gradveil.study.measures import Share
from tests.unit.audit.small import CELL, make_subject

PEOPLE, EACH = 16, 3


def people(batch_size: int = 1) -> Subject:
    """Three near-equal pictures of each person: far nearer to one another than strangers are, and no copies."""
    generator = torch.Generator().manual_seed(0)
    faces = torch.rand((PEOPLE, 1, 1, 8, 8), generator=generator)
    pictures = (0.8 * faces + 0.1 + 0.04 * torch.randn((PEOPLE, EACH, 1, 8, 8), generator=generator)).clamp(0, 1)
    data = Dataset(
        name="faces",
        inputs=pictures.flatten(0, 1),
        targets=torch.arange(PEOPLE * EACH) % 2,
        classes=2,
        class_names=("a", "b"),
        records=tuple(map(str, range(PEOPLE * EACH))),
        owners=tuple(f"person {place // EACH}" for place in range(PEOPLE * EACH)),
    )
    return build_subject(CELL.replace(records=PEOPLE * EACH, batch_size=batch_size), data, 0)


def means(subject: Subject) -> Scored:
    """What an attacker gets who rebuilds each person's mean picture."""
    means = subject.dataset.inputs.unflatten(0, (PEOPLE, EACH)).mean(1)
    return scored_images(subject, torch.stack([means[row // EACH] for row in subject.indices]))


def test_the_mean_of_a_persons_pictures_names_the_person_and_hardly_a_record() -> None:
    subject = people()
    assert subject.distinct == PEOPLE * EACH, "near-equal pictures of one person are no copies"
    found = means(subject)
    level = owners_level(subject, {"the mean": found}, Seed(0))
    assert level is not None and level.share is not None and level.null is not None
    assert (level.share.count, level.share.n, level.attacker) == (PEOPLE, PEOPLE, "the mean")
    assert found.share.value <= 1 / 3
    assert level.null.value <= 1 / PEOPLE < level.share.low and level.share.low > level.null.top


def test_an_owner_is_hit_once_by_whichever_record() -> None:
    """One good picture of one record of each of four people, nothing else: four owners of sixteen."""
    subject = people()
    images = torch.full_like(subject.candidates[: len(subject.indices)], 0.5)
    known = {row // EACH: place for place, row in enumerate(subject.indices) if row // EACH < 4}
    for place in known.values():
        images[place] = subject.candidates[place]
    level = owners_level(subject, {"some": scored_images(subject, images)}, Seed(0))
    assert level is not None and level.share is not None
    # Grey is nearest to somebody, and may be to one of the others.
    assert 4 <= level.share.count <= 5 and level.share.n == PEOPLE


def test_another_persons_pictures_hit_nobody() -> None:
    subject = people()
    shifted = subject.dataset.inputs.unflatten(0, (PEOPLE, EACH)).mean(1).roll(1, 0)
    images = torch.stack([shifted[row // EACH] for row in subject.indices])
    level = owners_level(subject, {"wrong": scored_images(subject, images)}, Seed(0))
    assert level is not None and level.share is not None and level.share.count == 0


def test_the_strongest_counts_and_the_null_is_drawn_for_each() -> None:
    subject = people()
    grey = scored_images(subject, torch.full_like(subject.candidates[: len(subject.indices)], 0.5))
    level = owners_level(subject, {"grey (plain)": grey, "mean (informed)": means(subject)}, Seed(0))
    assert level is not None and level.null is not None and level.share is not None
    assert level.attacker == "mean (informed)" and level.null.draws == 2
    assert [(reach.attacker, reach.informed) for reach in level.reached] == [("grey (plain)", False), ("mean (informed)", True)]
    assert level.share.low < level.reached[1].share.low, "corrected for the choice"


def test_owners_of_one_update_share_their_luck() -> None:
    subject = people(batch_size=8)
    level = owners_level(subject, {"mean": means(subject)}, Seed(0))
    assert level is not None and level.share is not None
    assert level.share.effective is not None and level.share.effective < level.share.n == PEOPLE


def test_data_without_owners_have_no_such_level() -> None:
    without = make_subject()
    assert owners_level(without, {"x": scored_images(without, without.candidates[:4])}, Seed(0)) is None
    alone = people()
    single = dataclasses.replace(alone.dataset, owners=("one",) * len(alone.dataset))
    level = owners_level(dataclasses.replace(alone, dataset=single), {"mean": means(alone)}, Seed(0))
    assert level is not None and level.null is None, "with one owner there is nobody else to be"


def test_the_null_of_owners_seeks_people_of_the_same_label() -> None:
    """Who reads the label alone, and answers with anybody of it, names every second owner of that label and none of the other."""
    own, labels = list(range(8)), [place // 4 for place in range(8)]
    for seed in range(5):
        drawn = _others(own, labels, own, np.random.default_rng(seed))
        assert drawn is not None and sorted(drawn) == own
        assert all(a != b and labels[a] == labels[b] for a, b in zip(own, drawn, strict=True))
    single = _others([0, 0, 1, 2], [0, 0, 1, 1], [0, 1, 2], np.random.default_rng(0))
    assert single is not None and single[0] == single[1] != 0 and single[2:] == [2, 1], "alone with its label: anybody else"


@pytest.mark.parametrize(
    ("shares", "winner"),
    [
        ((Share.of(4, 16), Share.of(6, 16, effective=2.0)), "b"),
        ((Share.of(6, 16, effective=2.0), Share.of(6, 16)), "b"),
        ((Share.of(6, 16), Share.of(4, 16)), "a"),
    ],
)
def test_the_strongest_is_who_hits_most_and_then_who_does_so_most_surely(
    shares: tuple[Share, Share], winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(shares)
    monkeypatch.setattr(owners, "_share", lambda *given: next(left))
    level = owners_level(people(), {name: means(people()) for name in "ab"}, Seed(0))
    assert level is not None and level.attacker == winner
    assert [(reach.attacker, reach.share) for reach in level.reached] == list(zip("ab", shares, strict=True))


def test_a_single_owner_is_compared_with_someone_of_the_pool_and_others_with_one_another() -> None:
    def generator() -> np.random.Generator:
        return np.random.default_rng(0)

    for pool in ([5, 7], [5, 5, 7]):
        assert _others([5, 5], ["a", "a"], pool, generator()) == [7, 7]
    assert _others([5, 5], ["a", "a"], [5, 5], generator()) is None
    drawn = {tuple(_others([5], ["a"], [5, 7, 8, 9], np.random.default_rng(seed)) or ()) for seed in range(20)}
    assert drawn == {(7,), (8,), (9,)}
    for labels in (["a", "a"], ["a", "b"]):
        assert _others([5, 6], labels, [5, 6, 7, 8, 9], generator()) == [6, 5], "only who is attacked"


@pytest.mark.parametrize("updates", [[0, 1, 2, 3], [0, 0, 1, 1]])
def test_the_null_of_owners_is_worth_as_many_updates_as_they_are_in(updates: list[int]) -> None:
    worth = effective_number([0.0] * 4, updates)
    assert owners._null([1, 0, 2], 4, updates) == largest_of([1, 0, 2], 4, worth) != largest_of([1, 0, 2], 4, 1.0)
    assert owners._null([], 4, updates) is None
