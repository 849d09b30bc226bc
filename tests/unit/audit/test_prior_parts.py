"""What decides which records an attacker learns from, argument by argument."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradveil.audit import prior
from gradveil.audit.state import Seen, order_of_records
from gradveil.data import foreground, stationary
from gradveil.randomness import Seed
from tests.unit.audit.small import CELL, people

HERE = CELL.replace(records=6, batch_size=2, seed=5, lists="auto")
POOL = [4, 9, 20]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prior, "CANDIDATES", 10)
    monkeypatch.setattr(prior, "ENOUGH", 8)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, 10),
        ({"lists": "off"}, 10),
        ({"lists": "9"}, 10),
        ({"lists": "17"}, 17),
        ({"records": 11}, 12),
        ({"records": 10, "clients": 3}, 12),
        ({"records": 13, "batch_size": 3, "lists": "14"}, 15),
    ],
)
def test_spare_are_rows_behind_all_that_are_attacked_candidates_or_listed(changes: dict[str, Any], first: int) -> None:
    cell, alone = HERE.replace(**changes), dataclasses.replace(people(), owners=None)
    assert prior._spare(cell, alone) == order_of_records(cell, alone)[first:]


def test_owners_under_attack_teach_nothing_where_enough_others_are_there() -> None:
    data, cell = people(), HERE.replace(records=2, batch_size=1)
    owners = data.owners
    assert owners is not None
    order = order_of_records(cell, data)
    taken = {owners[row] for row in order[:2]}
    strangers = [row for row in order[10:] if owners[row] not in taken]
    assert 8 <= len(strangers) < len(order[10:])
    assert prior._spare(cell, data) == strangers == prior.of_other_owners(data, order[:2], order[10:])
    few = strangers[:7] + [row for row in order[10:] if owners[row] in taken]
    assert prior.of_other_owners(data, order[:2], few) == few, "too few others to learn from"


def test_the_audited_data_teach_from_as_many_records_as_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for enough, source in ((30, "same"), (31, "other")):
        monkeypatch.setattr(prior, "ENOUGH", enough)
        assert prior.source_of(HERE, people()) == source
        assert prior.source_of(HERE.replace(prior="none"), people()) == "none"
        assert prior.source_of(HERE.replace(prior="other"), people()) == "other"


def own(factor: float = 0.5) -> Any:
    """What a sender may have of every record: it can be looked at row by row and says its shape, and nothing else."""
    return SimpleNamespace(inputs=factor * people().inputs, input_shape=(1, 6, 6))


@pytest.mark.parametrize(("most", "fits", "kept"), [(4096, 2**25, 30), (7, 2**25, 7), (4096, 36 * 11 + 35, 11), (4096, 5, 1)])
def test_of_the_same_data_the_first_spare_rows_are_held_as_the_sender_has_them(
    most: int, fits: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prior, "MOST", most)
    monkeypatch.setattr(prior, "MOST_VALUES", fits)
    alone = dataclasses.replace(people(), owners=None)
    rows = order_of_records(HERE, alone)[10 : 10 + kept]
    found = prior.public_records(HERE, alone, own(), POOL)
    apart = [row for row in rows if row not in POOL]  # what is in the pool is a copy of itself
    assert found.source == "same" and torch.equal(found.inputs, 0.5 * people().inputs[apart])
    assert torch.equal(found.targets, people().targets[apart])


def test_copies_of_candidates_and_of_one_another_are_told_apart() -> None:
    inputs = people().inputs.clone()
    rows = [30, 31, 32, 33, 34]
    inputs[31], inputs[34] = inputs[9], inputs[32]
    held: Any = SimpleNamespace(inputs=inputs)
    found = prior._same(people(), held, POOL, rows)
    assert torch.equal(found.inputs, inputs[[30, 32, 33, 34]]) and torch.equal(found.targets, people().targets[[30, 32, 33, 34]])
    assert torch.equal(prior._same(people(), held, [0], rows).inputs, inputs[rows])


@pytest.mark.parametrize(
    ("source", "name", "photos"), [("other", "people", True), ("other", "photos", False), ("none", "people", None)]
)
@pytest.mark.parametrize(("made", "fits", "count"), [(12, 2**25, 12), (12, 36 * 7, 7)])
def test_what_is_made_has_a_seed_a_shape_and_labels_of_its_own(
    source: str, name: str, photos: bool | None, made: int, fits: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(prior, "MADE", made)
    monkeypatch.setattr(prior, "MOST_VALUES", fits)
    pictures = torch.rand(count, 1, 6, 6)

    def make(*given: Any, **more: Any) -> torch.Tensor:
        asked.append((*given, more))
        return pictures

    monkeypatch.setattr(prior, "other_pictures" if source == "other" else "stationary", make)
    monkeypatch.setattr(prior, "own_part", lambda cell, images: ("part", cell, images))
    cell = HERE.replace(prior=source)
    data: Any = SimpleNamespace(name=name, input_shape=(1, 6, 6), dense=False, classes=5)
    found = prior.public_records(cell, data, own(), POOL)
    more = {} if photos is None else {"photos": photos}
    assert asked == [((1, 6, 6), count, Seed(5).child("prior", source), more)]
    held: Any = found.inputs
    assert held[:2] == ("part", cell) and held[2] is pictures and found.source == source
    assert found.targets.tolist() == [place % 5 for place in range(count)]
    masks: Any = SimpleNamespace(name=name, input_shape=(1, 6, 6), dense=True, classes=1)
    assert torch.equal(prior.public_records(cell, masks, own(), POOL).targets, foreground(pictures))


def test_where_no_other_pictures_are_of_that_shape_a_law_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prior, "other_pictures", lambda *given, **more: None)
    monkeypatch.setattr(prior, "MADE", 3)
    data: Any = SimpleNamespace(name="x", input_shape=(9,), dense=False, classes=0)
    found = prior.public_records(HERE.replace(prior="other"), data, SimpleNamespace(input_shape=(9,)), POOL)  # type: ignore[arg-type]
    assert torch.equal(found.inputs, stationary((9,), 3, Seed(5).child("prior", "other")))
    assert found.targets.tolist() == [0, 0, 0]


def test_a_sentence_says_what_was_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = prior._spare(HERE, people())
    others = tuple(row for row in range(40) if row not in spare)
    assert ": no candidate, and no near copy" in prior.prior_sentence(HERE, people(), Seen())
    assert "some of which" in prior.prior_sentence(HERE, people(), Seen(rows=(*others, spare[-1])))
    assert "some of which" not in prior.prior_sentence(HERE, people(), Seen(rows=others))
    assert "stationary law" in prior.prior_sentence(HERE.replace(prior="none"), people(), Seen())
    asked = prior.prior_sentence(HERE.replace(prior="other"), people(), Seen())
    assert asked == "The attacker learns from records of other data, and from none of the audited ones."
    monkeypatch.setattr(prior, "ENOUGH", 31)
    few = prior.prior_sentence(HERE, people(), Seen())
    assert few == f"{asked[:-1]}, of which only 30 are left beside attacked records and candidates."
