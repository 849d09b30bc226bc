"""The parts of an attacker with a list: who fills an update, which releases are asked about, when a record is there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gradveil.attacks.listing import Evidence, Hypotheses
from gradveil.attacks.listing.generic import _blocks, _Runs, apart_of
from gradveil.attacks.listing.joint import Joint
from gradveil.attacks.listing.presence import Presence
from gradveil.audit import list_level as levels
from gradveil.audit.lists import Pool
from gradveil.randomness import Seed
from tests.unit.audit.small import make_subject


def hypotheses(size: int, **changes: Any) -> Hypotheses:
    inputs = torch.arange(7.0)[:, None]
    return Hypotheses(inputs=inputs, labels=torch.arange(7), size=size, seed=Seed(1), **changes)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_update_holds_its_candidate_beside_the_companions_of_the_draw(size: int) -> None:
    listed = hypotheses(size)
    assert listed.varies == (size > 1)
    for index in range(7):
        for draw in (0, 3):
            beside = listed.companions(index, draw)
            assert len(beside) == size - 1 and index not in beside
            inputs, labels = listed.batch(index, draw)
            assert inputs.flatten().tolist() == [index, *beside] and labels.tolist() == [index, *beside]
    if size > 1:
        orders = {tuple(listed.companions(0, draw)) for draw in range(8)}
        assert len(orders) > 1, "another draw has other companions"
        shared = [set(listed.companions(index, 2)) - {0, 1} for index in (0, 1)]
        assert len(shared[0] & shared[1]) >= size - 2, "those of a draw are the same for all"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_others_that_are_known_stand_around_the_candidate(place: int) -> None:
    others = torch.tensor([[70.0], [71.0]]), torch.tensor([70, 71])
    listed = hypotheses(3, others=others, place=place)
    assert not listed.varies and listed.companions(2, 0) == []
    expected = [70.0, 71.0]
    expected.insert(place, 2.0)
    inputs, labels = listed.batch(2, 0)
    assert inputs.flatten().tolist() == expected and labels.tolist() == expected


def test_who_filled_an_update_is_left_out_around_its_release() -> None:
    listed, draws = hypotheses(3), [5, 6, 7, 8]
    apart = apart_of(listed, draws)
    assert apart.shape == (4, 7)
    for index, draw in enumerate(draws):
        assert set((~apart[index]).nonzero().flatten().tolist()) == set(listed.companions(index, draw))
    assert bool(apart_of(hypotheses(1), draws).all())


@pytest.mark.parametrize(("learned", "count"), [(3, 3), (3, 8), (20, 50), (5, 6)])
def test_candidates_come_in_blocks_and_each_once(learned: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.attacks.listing.generic.BLOCK", 4)
    held: list[Any] = [SimpleNamespace(name=index, mean={"a": torch.zeros(2)}) for index in range(learned)]
    runs: Any = SimpleNamespace(sent=lambda index: SimpleNamespace(name=index))
    blocks: list[Any] = list(_blocks(runs, held, count))
    assert [each.name for block in blocks for each in block] == list(range(count))
    assert max(len(block) for block in blocks) <= 4 and len(blocks) == -(-learned // 4) + -(-(count - learned) // 4)


def evidence(features: torch.Tensor, **changes: Any) -> Evidence:
    n = features.shape[1]
    everything: dict[str, Any] = {
        "own": features,
        "truth": torch.arange(len(features)),
        "apart": torch.ones(len(features), n) > 0,
    }
    return Evidence(name="x", informed=False, features=features, **(everything | changes))


def test_releases_are_asked_about_in_the_order_given() -> None:
    features = torch.rand((3, 5, 2), generator=torch.Generator().manual_seed(0)).double()
    seen = torch.arange(15.0).reshape(3, 5).double()
    joint = Joint(columns=torch.eye(5).double(), seen=seen, own=seen)
    rows = torch.tensor([2, 0, 2, 1])
    found = evidence(features, joint=joint).of(rows)
    assert torch.equal(found.features, features[rows]) and torch.equal(found.own, features)
    assert found.joint is not None and torch.equal(found.joint.seen, seen[rows]) and torch.equal(found.joint.own, seen)
    assert evidence(features).of(rows).joint is None


def test_a_ranking_follows_its_own_release_and_its_list() -> None:
    features = torch.full((3, 5, 1), -1.0).double()
    for release, best in enumerate((4, 2, 0)):
        features[release, best] = 1.0
    own = torch.full((5, 5, 1), -1.0).double()
    own[torch.arange(5), torch.arange(5)] = 1.0
    told = evidence(features, own=own, truth=torch.arange(5), apart=torch.ones(5, 5) > 0)
    listed = torch.ones(3, 5, dtype=torch.bool)
    listed[0, 1] = False
    found = told.ranking(listed, torch.ones(5, 5, dtype=torch.bool))
    assert found.scores.argmax(1).tolist() == [4, 2, 0] and found.rehearsed == 1.0
    assert torch.isinf(found.scores).nonzero().tolist() == [[0, 1]]
    assert found.presence.rehearsed == 1.0


@pytest.mark.parametrize(
    ("there", "absent", "threshold", "rehearsed"),
    [
        ([3.0, 4.0], [0.0, 1.0], 2.0, 1.0),
        ([0.0, 0.5], [5.0, 7.0], -0.5, 0.5),  # all are said to be there
        ([1.0, 3.0], [2.0, 0.0], 0.5, 0.75),
        ([1.0, 1.0], [1.0, 1.0], 0.5, 0.5),
        ([5.0, 6.0, 7.0], [5.0, 5.0, 4.0], 5.5, 5 / 6),
        ([-5.0], [-6.0], -5.5, 1.0),
        ([3.0, 4.0, 5.0], [0.0, 1.0], 2.0, 1.0),
        ([3.0], [0.0, 1.0, 4.0], 2.0, 0.75),
        ([0.0], [1.0, 2.0, 3.0], 3.0, 0.75),  # none is said to be there
    ],
)
def test_the_threshold_is_where_own_releases_are_told_best(
    there: list[float], absent: list[float], threshold: float, rehearsed: float
) -> None:
    found = Presence._best(torch.tensor(there), torch.tensor(absent), "lead")
    assert found.number == "lead" and found.rehearsed == pytest.approx(rehearsed)
    assert found.threshold == pytest.approx(threshold)


def test_a_list_is_shorter_only_where_all_its_client_runs_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client who draws nothing one run is enough."""
    monkeypatch.setattr("gradveil.attacks.listing.client.ListClient.seconds", lambda self: 0.1)
    plain, drawing = make_subject(records=2), make_subject(records=2, defense="gaussian_noise")
    for subject, seconds, size in (
        (plain, 20.0, 200),
        (plain, 19.9, 100),
        (drawing, 20.0 * levels.RUNS, 200),
        (drawing, 20.0 * levels.RUNS - 0.1, 100),
        (drawing, 20.0, max(levels.LEAST, 200 >> (levels.RUNS - 1).bit_length())),
    ):
        assert levels._affordable(subject, subject.context(5), 200, seconds) == size


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_pool_knows_which_candidates_stand_behind_each_update(batch_size: int) -> None:
    subject = make_subject(records=6, batch_size=batch_size)
    pool = Pool.of(subject, 20)
    assert len(pool) == 20 and len(pool.batches) == 6 // batch_size
    for target, batch in zip(subject.targets, pool.batches, strict=True):
        assert torch.equal(pool.inputs[list(batch)], target.batch.inputs)
        assert torch.equal(pool.labels[list(batch)], target.batch.targets)
    around = torch.ones(20, 20, dtype=torch.bool)
    listed = pool.lists(around)
    for row, (update, own) in enumerate(pool.records):
        others = set(pool.batches[update]) - {own}
        assert set((~listed[row]).nonzero().flatten().tolist()) == others
    assert dataclasses.replace(pool, owners=None).clusters(4) == ([each // batch_size for each in range(4)],)


@pytest.mark.parametrize(("draws", "varies", "expected"), [(3, True, [3, 4, 5]), (1, False, [0, 0, 0])])
def test_a_release_of_its_own_is_a_draw_that_nothing_else_has(draws: int, varies: bool, expected: list[int]) -> None:
    asked: list[tuple[int, int]] = []

    def observe(index: int, draw: int) -> Any:
        asked.append((index, draw))
        weights = {"a": torch.tensor(float(10 * index + draw))}
        return SimpleNamespace(updates=(SimpleNamespace(weights=weights),))

    runs = _Runs(cast("Any", SimpleNamespace(observe=observe)), draws, varies)
    for index in range(3):
        (value,) = runs.release(index, []).values()
        assert float(value) == 10 * index + expected[index]
        assert runs.draw_of_release(index) == expected[index]
    assert asked == list(enumerate(expected))
    held = {"a": torch.ones(2)}
    assert runs.release(1, [held]) is held and len(asked) == 3
