"""How long lists are: as asked, as long as a dear client leaves time for, and as there are records to tell apart."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gradveil.audit import list_level as levels
from gradveil.audit.list_level import list_level, measure_lists
from gradveil.audit.scene import build_subject
from gradveil.errors import UsageError
from gradveil.study.levels import Listed
from gradveil.study.readers import list_size
from tests.unit.audit.small import CELL, digits, make_subject
from tests.unit.audit.test_list_level import count, random_list


@pytest.mark.parametrize(("asked", "size"), [("off", None), (0, None), (False, None), (12, 12), ("30", 30)])
def test_a_plan_says_how_long_lists_are(asked: object, size: int | None) -> None:
    found = list_level(make_subject(records=2, lists=list_size("lists", asked)))
    assert (random_list(found).size if found is not None else None) == size


@pytest.mark.parametrize("asked", [1, "many", -3, 2.5])
def test_a_list_that_cannot_be_is_refused(asked: object) -> None:
    with pytest.raises(UsageError, match="lists is"):
        list_size("lists", asked)


def test_an_update_of_more_records_than_a_list_has_is_one_sentence() -> None:
    subject = make_subject(records=8, batch_size=8)
    assert "needs more candidates than the 8 records of an update" in measure_lists(subject, 8).reason


def test_dear_clients_get_shorter_lists_and_fewer_updates_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.attacks.listing.client.ListClient.seconds", lambda self: 1.0)
    found = measure_lists(make_subject(records=20), 64, seconds=20.0)
    assert random_list(found).size == 16 and count(found)[1] == 16
    monkeypatch.setattr(levels, "affordable", lambda *given: (3, 8))
    found = measure_lists(make_subject(records=6), 64, seconds=1e3)
    assert [reach.share.n for reach in random_list(found).reached] == [6, 3]


def test_copies_alone_make_no_list() -> None:
    once = digits().take(range(5))
    data = dataclasses.replace(
        once, inputs=once.inputs.repeat(8, 1, 1, 1), targets=once.targets.repeat(8), records=tuple(map(str, range(40)))
    )
    found = measure_lists(build_subject(CELL.replace(records=8, batch_size=8), data, 0), 40)
    assert found.reason == "a list needs more than 8 candidates, copies counted once; there are 5"
    labelled = dataclasses.replace(digits().take(range(40)), targets=torch.arange(40) % 10)
    lonely = dataclasses.replace(labelled, targets=torch.arange(40), classes=40, class_names=tuple(map(str, range(40))))
    known = measure_lists(build_subject(CELL.replace(records=8, batch_size=4, known_labels=True), lonely, 0), 40)
    assert {name: each.reason for name, each in known.lists.items()} == dict.fromkeys(
        ("random", "same_label", "nearest", "others_known"), "no list of this kind has a second candidate"
    )


def test_dear_clients_of_large_batches_keep_a_list_beside_their_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.attacks.listing.client.ListClient.seconds", lambda self: 10.0)
    monkeypatch.setattr(levels, "others_known", lambda *given: Listed())
    found = measure_lists(make_subject(records=20, batch_size=20), 256, seconds=20.0)
    assert random_list(found).size == 16, "of 16 candidates all were in the update, and nobody was left to be told from"
