"""What lists hand to attackers and how their answers are counted, with hand-made lists and attackers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.audit import list_level, list_others, lists
from gradveil.audit.list_counts import Try, best_guess, clustered, counted
from gradveil.audit.list_level import _Lists, matching_share, measure_lists
from gradveil.audit.lists import Pool
from gradveil.audit.state import order_of_records
from gradveil.errors import GradveilError, UsageError
from gradveil.metrics import share_of
from gradveil.randomness import Seed
from gradveil.study.levels import Listed, ListLevel
from tests.unit.audit.small import CELL, people
from tests.unit.stand_ins import fake, noted

HERE = CELL.replace(records=6, batch_size=2, seed=5)
SEED = Seed(5).child("list")


def pool_of(size: int = 8, batches: tuple[tuple[int, ...], ...] = ((3, 1), (5, 0)), owners: str = "") -> Pool:
    inputs = torch.rand(size, 3, generator=torch.Generator().manual_seed(1))
    groups = torch.arange(size)
    groups[7] = 3  # a copy of the first attacked record
    return Pool(inputs, torch.arange(size) % 3, groups, tuple(owners) or None, batches)


def subject(**changes: Any) -> Any:
    """A cell of three updates of two records each."""
    targets = tuple(fake(observation=fake(name=place, learners=f"learners {place}")) for place in range(3))
    cell = HERE.replace(**changes)
    context = lambda budget: ("context", budget)  # noqa: E731
    return fake(cell=cell, targets=targets, dataset=people(), candidates=torch.zeros(9, 3), context=context)


class Says:
    """An attacker that gives every candidate of a list a score, and says who is there."""

    def __init__(self, name: str, scores: Tensor, *, updates: int = 2, informed: bool = False, draws: int = 1) -> None:
        self.name, self.scores, self.informed, self.draws = name, scores, informed, draws
        self.features, self.rows = torch.zeros(updates, 1, 1), torch.arange(updates)
        self.asked: list[Any] = []

    def of(self, updates: Tensor) -> Says:
        self.rows = updates
        return self

    def ranking(self, listed: Tensor, around: Tensor) -> Any:
        self.asked.append((self.rows.tolist(), listed, around))
        scores = self.scores[: len(listed)].masked_fill(~listed, float("-inf"))
        return fake(scores=scores, rehearsed=0.25, presence=fake(says=lambda own: own.amax(1) > 0.5, rehearsed=0.75))


@pytest.mark.parametrize(("asked", "size"), [("auto", 256), ("12", 12)])
def test_a_cell_s_lists_are_as_long_as_it_asks(asked: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_level, "measure_lists", lambda *given, **more: (given, more))
    made, pictures = subject(lists=asked), torch.ones(1)
    found: Any = list_level.list_level(made, pictures)
    assert found[0] == (made, size) and found[1]["pictures"] is pictures
    assert list_level.list_level(subject(lists="off"), pictures) is None


def watched(patch: pytest.MonkeyPatch, length: int) -> list[Any]:
    asked: list[Any] = []
    patch.setattr(list_level, "_affordable", lambda *given: noted(asked, given) or 7)
    patch.setattr(Pool, "of", lambda *given: noted(asked, given) or pool_of(8) if length == 8 else range(length))
    patch.setattr(list_level._Lists, "level", lambda self: noted(asked, self) or ListLevel(draws=3))
    return asked


def test_lists_are_made_of_no_more_than_there_is_and_can_be_afforded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made, pictures = watched(monkeypatch, 8), subject(), torch.ones(6, 3)
    assert measure_lists(made, 50, seconds=9.0, pictures=pictures).draws == 3
    assert asked[0] == (made, ("context", 1), 40, 9.0) and asked[1] == (made, 7)
    assert asked[2].subject is made and asked[2].context == ("context", 1) and asked[2].pictures is pictures
    assert len(asked[2].pool) == 8
    measure_lists(made, 11)
    assert asked[3] == (made, ("context", 1), 11, 120.0)


@pytest.mark.parametrize("clients", [1, 3])
def test_a_list_needs_more_candidates_than_an_update_has_records(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, each = subject(clients=clients), 2 * clients
    assert f"the {each} records of an update; there are {each}" in measure_lists(made, each).reason
    watched(monkeypatch, each)
    assert f"more than {each} candidates, copies counted once; there are {each}" in measure_lists(made, each + 1).reason
    watched(monkeypatch, each + 1)
    assert measure_lists(made, each + 1).draws == 3

    def broken(*_: Any) -> int:
        raise UsageError("too dear")

    monkeypatch.setattr(list_level, "_affordable", broken)
    assert measure_lists(made, each + 1).reason == "no list could be tested: too dear"
    assert issubclass(UsageError, GradveilError)


@pytest.mark.parametrize(("size", "few"), [(100, 17), (9, 9)])
@pytest.mark.parametrize("varies", [True, False])
def test_a_dear_client_gets_shorter_lists(size: int, few: int, varies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    made: Any = subject()
    monkeypatch.setattr(Pool, "of", lambda *given: fake(hypotheses=lambda *more: (given, more)))
    monkeypatch.setattr(
        list_level, "ListClient", lambda *given: noted(asked, given) or fake(seconds=lambda: 0.5, varies=lambda: varies)
    )
    monkeypatch.setattr(list_level, "halved", lambda *given: given)
    found: Any = list_level._affordable(made, "context", size, 60.0)  # type: ignore[arg-type]
    assert found == (size, 17, 2.0 if varies else 0.5, 60.0)
    assert asked == [(made.targets[0].observation, ((made, few), (SEED, 2)), "context")]


@pytest.mark.parametrize("varies", [True, False])
def test_attackers_see_as_many_updates_as_the_list_has(varies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    made: Any = subject()
    monkeypatch.setattr(Pool, "hypotheses", lambda self, *given: noted(asked, given) or FakeHypotheses(varies))
    monkeypatch.setattr(list_level, "generic_evidence", lambda *given: ("generic", *given))
    monkeypatch.setattr(list_level, "affordable", lambda *given: noted(asked, given) or (1, 5))
    monkeypatch.setattr(list_level, "own_evidence", lambda *given, **more: ("own", *given, more))
    found: Any = _Lists(made, "context", pool_of())._evidence()  # type: ignore[arg-type]
    seen = [target.observation for target in made.targets[:2]]
    assert asked[0] == (SEED, 2) and found[0][:2] == ("generic", seen) and found[0][3] == "context"
    assert len(found) == (1 if varies else 2)
    if not varies:
        assert (asked[1][0], len(asked[1][1]), asked[1][2:]) == (seen, 8, (8, 60.0))
        assert found[1][:2] == ("own", seen[:1]) and found[1][3:] == ("context", {"own": 5}) and found[1][2] is found[0][2]


class FakeHypotheses:
    def __init__(self, varies: bool) -> None:
        self.varies = varies

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(("known", "dense"), [(False, False), (True, False), (False, True)])
def test_who_is_on_lists_of_a_kind(known: bool, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    near = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) > 0.5
    monkeypatch.setattr(list_level, "neighbours", lambda *given: noted(asked, given) or near)
    made, pool = subject(known_labels=known), pool_of()
    made.dataset = fake(dense=dense)
    kinds = _Lists(made, None, pool)._kinds()  # type: ignore[arg-type]
    everyone, same = torch.ones(8, 8, dtype=torch.bool), pool.labels[:, None] == pool.labels[None]
    wanted = {"random": same if known else everyone, "same_label": same, "nearest": near & same if known else near}
    if dense:
        wanted = {"random": everyone, "nearest": near}
    assert list(kinds) == list(wanted) and all(torch.equal(kinds[name], own) for name, own in wanted.items())
    assert asked == [("learners 0", pool, 32, SEED)]


def scores_with(first: list[int]) -> Tensor:
    """Return (4, 8) scores of records 3, 1, 5, 0: those at these places are ranked first, the others last of all."""
    scores = torch.linspace(0, 0.4, 8).repeat(4, 1)
    for row, own in enumerate((3, 1, 5, 0)):
        scores[row, own] = 1.0 if row in first else -1.0
    return scores


def test_every_attacker_is_counted_on_the_records_it_looked_at_beside_who_looks_pictures_up() -> None:
    pool = pool_of(owners="abcaabbc")
    around = torch.ones(8, 8, dtype=torch.bool)
    around[5, 6] = False
    generic, own = Says("generic", scores_with([0, 2, 3])), Says("own", scores_with([0]), updates=1, informed=True)
    pictures = torch.stack([pool.inputs[0], pool.inputs[0], pool.inputs[5], pool.inputs[5], pool.inputs[1], pool.inputs[3]])
    made = subject()
    found = _Lists(made, None, pool, pictures)._listed([generic, own], around)  # type: ignore[arg-type, list-item]
    listed = pool.lists(around)
    assert [(rows, shown.shape) for rows, shown, _ in (*generic.asked, *own.asked)] == [([0, 0, 1, 1], (4, 8)), ([0, 0], (2, 8))]
    assert torch.equal(generic.asked[0][1], listed) and torch.equal(own.asked[0][1], listed[:2]) and generic.asked[0][2] is around
    # Lists of the first record have no copy of it, and none has the other record of its update.
    sizes = [6, 7, 6, 7]
    assert [int(each) + 1 for each in (listed & ~pool.alike()).sum(1)] == sizes
    looked = _Lists(made, None, pool, pictures)._looked_up(pictures, listed)  # type: ignore[arg-type]
    tries = [
        Try("generic", False, [1, sizes[1], 1, 1], sizes, 0.25, ([0, 0, 1, 1], list("abba"))),
        Try("own", True, [1, sizes[1]], sizes[:2], 0.25, ([0, 0], list("ab"))),
        Try("rebuilt pictures", True, pool.ranks(looked), sizes, None, ([0, 0, 1, 1], list("abba"))),
    ]
    wanted = counted(tries)
    reached = tuple(dataclasses.replace(each, owners=None) for each in found.reached)
    assert dataclasses.replace(found, reached=reached, owners=None, owners_null=None) == wanted
    assert found.reached[2].share.count == 1 and found.attacker == "generic"
    shares = [
        clustered(list(pool.owner_hits(each).values()), pool.owner_updates(len(each)))
        for each in _scores(generic, own, looked, listed)
    ]
    assert [each.owners for each in found.reached] == shares and found.owners is not None
    assert found.owners_null == best_guess("commonest owner", pool.commonest_owner(listed), found.owners.n, 3)
    assert found.owners.n == 2


def _scores(generic: Says, own: Says, looked: Tensor, listed: Tensor) -> list[Tensor]:
    rest = [
        each.scores[: len(shown)].masked_fill(~shown, float("-inf")) for each, shown in ((generic, listed), (own, listed[:2]))
    ]
    return [*rest, looked]


def test_pictures_are_looked_up_by_the_nearest_of_their_own_update() -> None:
    pool = pool_of(batches=((3, 1), (5, 0)))
    listed = pool.lists(torch.ones(8, 8, dtype=torch.bool))
    pictures = torch.rand(6, 3, generator=torch.Generator().manual_seed(2))  # those of a third update are on no list
    found = _Lists(subject(), None, pool, pictures)._looked_up(pictures, listed)  # type: ignore[arg-type]
    for row, update in enumerate((0, 0, 1, 1)):
        for place in range(8):
            far = min(
                float((each - pool.inputs[place]).double().square().sum()) for each in pictures[2 * update : 2 * update + 2]
            )
            assert float(found[row, place]) == pytest.approx(-far if listed[row, place] else float("-inf"))


def test_a_list_without_a_second_candidate_is_none() -> None:
    pool = Pool(torch.rand(3, 2), torch.arange(3), torch.zeros(3, dtype=torch.int64), None, ((0, 2),))
    found = _Lists(subject(), None, pool)._listed([], torch.ones(3, 3, dtype=torch.bool))  # type: ignore[arg-type]
    assert found == Listed(reason="no list of this kind has a second candidate")


def test_presence_is_told_of_lists_that_a_coin_took_the_record_off() -> None:
    pool = pool_of(owners="abcaabbc")
    around = torch.ones(8, 8, dtype=torch.bool)
    sure, never = Says("sure", scores_with([0, 1, 2, 3])), Says("never", scores_with([]), informed=True)
    found = _Lists(subject(), None, pool)._presence([sure, never], around)  # type: ignore[arg-type, list-item]
    absent = torch.rand(4, generator=SEED.generator("presence")) < 0.5
    assert 0 < int(absent.sum()) < 4
    shown = sure.asked[0][1]
    assert torch.equal(shown, pool.lists(around) & ~(absent[:, None] & pool.alike()))
    there = ~absent
    assert [each.attacker for each in found.reached] == ["sure", "never"] and [each.informed for each in found.reached] == [
        False,
        True,
    ]
    assert [each.share for each in found.reached] == [
        clustered([True] * 4, [0, 0, 1, 1], list("abba")),
        clustered((~there).tolist(), [0, 0, 1, 1], list("abba")),
    ]
    assert all(each.rehearsed == 0.75 for each in found.reached) and found.attacker == "sure"
    assert found.null == best_guess("coin", 0.5, 4, 2) != best_guess("coin", 0.5, 2, 4)
    few = torch.eye(8, dtype=torch.bool)
    assert "too short" in _Lists(subject(), None, pool)._presence([sure], few).reason  # type: ignore[arg-type, list-item]
    few[:, 6] = few[:, 4] = True
    assert not _Lists(subject(), None, pool)._presence([sure], few).reason  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize("size", [1, 2])
def test_lists_of_other_known_records_are_for_updates_of_several(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pool = subject(batch_size=size, records=3 * size), pool_of()
    one, other = Says("a", torch.zeros(4, 8), draws=3), Says("b", torch.zeros(4, 8), draws=7)
    monkeypatch.setattr(_Lists, "_evidence", lambda self: [one, other])
    monkeypatch.setattr(_Lists, "_kinds", lambda self: {"random": "everyone", "nearest": "near"})
    monkeypatch.setattr(_Lists, "_listed", lambda self, evidence, around: (evidence, around))
    monkeypatch.setattr(_Lists, "_presence", lambda self, evidence, around: ("presence", evidence, around))
    monkeypatch.setattr(list_level, "others_known", lambda *given: given)
    found: Any = _Lists(made, "context", pool).level()  # type: ignore[arg-type]
    assert found.lists["random"] == ([one, other], "everyone") and found.lists["nearest"] == ([one, other], "near")
    assert found.presence == ("presence", [one, other], "everyone") and found.draws == 7
    assert found.lists.get("others_known") == ((made, "context", pool) if size > 1 else None)


@pytest.mark.parametrize("noise", [None, 0.5])
@pytest.mark.parametrize("known", [True, False])
def test_the_matching_attack_has_all_candidates_and_rehearses_where_no_noise_is_told(
    noise: float | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    pool = pool_of(batches=((3,), (1,), (5,)))
    made: Any = subject(known_labels=known)
    for target in made.targets:
        target.observation.adversary = fake(arrives=lambda seen: fake(noise_std=noise))
    says = Says("own", scores_with([0, 2]), updates=3)
    monkeypatch.setattr(Pool, "of", lambda *given: noted(asked, given) or pool)
    monkeypatch.setattr(Pool, "hypotheses", lambda self, *given: given)
    monkeypatch.setattr(list_level, "own_evidence", lambda *given, **more: noted(asked, (given, more)) or says)
    assert matching_share(made) == share_of(2, 3)
    seen = [target.observation for target in made.targets]
    assert asked == [(made, 9), ((seen, (SEED, 1), ("context", 1)), {"own": 0 if noise else 8})]
    same = pool.labels[:, None] == pool.labels[None]
    around = same if known else torch.ones(8, 8, dtype=torch.bool)
    assert torch.equal(says.asked[0][2], around) and torch.equal(says.asked[0][1], pool.lists(around))


@pytest.mark.parametrize(("size", "kept", "updates"), [(3, 3, 1), (4, 4, 2), (9, 9, 3), (100, 40, 3)])
def test_a_pool_holds_whole_updates_and_is_filled_with_others(size: int, kept: int, updates: int) -> None:
    order = order_of_records(HERE, people())
    made: Any = fake(cell=HERE, dataset=people(), own=people(), targets=(0, 1, 2), indices=order[:6])
    pool = Pool.of(made, size)
    attacked = order[: 2 * updates]
    rows = [*attacked, *order[6:]][:kept]
    if size == 100:
        rows, kept = [*attacked, *order[6:]], 40
    mixed = [rows[place] for place in SEED.numpy("order").permutation(kept)]
    assert torch.equal(pool.inputs, people().inputs[mixed]) and torch.equal(pool.labels, people().targets[mixed])
    assert people().owners is not None and pool.owners == tuple(people().owners[row] for row in mixed)  # type: ignore[index]
    assert pool.batches == tuple(
        tuple(mixed.index(row) for row in attacked[start : start + 2]) for start in range(0, 2 * updates, 2)
    )
    assert pool.groups.tolist() == list(range(kept))


def test_exact_copies_are_listed_once_and_attacked_ones_never_left_out() -> None:
    inputs, targets = torch.arange(8.0)[:, None].clone(), torch.zeros(8, dtype=torch.int64)
    inputs[3], inputs[5] = inputs[1], inputs[1]
    targets[5] = 1
    made: Any = fake(own=fake(inputs=inputs), dataset=fake(targets=targets))
    assert lists._same_as(made, [0, 1, 3, 4, 5, 6], [0, 1, 3], 3) == {0: 0, 1: 1, 3: 1, 4: 4}
    assert lists._same_as(made, [0, 1, 3, 4, 5, 6], [0, 1, 3], 2) == {0: 0, 1: 1, 3: 1}
    assert lists._same_as(made, [0, 1, 4, 3, 5, 6], [0], 4) == {0: 0, 1: 1, 4: 4, 3: 1, 5: 5}


def test_where_others_are_known_every_update_has_a_list_with_its_record_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, made = dataclasses.replace(pool_of(), batches=((3, 1),) * 6), subject(known_labels=True)
    made.targets = made.targets * 2
    asked: list[Any] = []

    def evidence(seen: Any, hypotheses: Any, context: Any, own: int = -1) -> Any:
        asked.append((seen, hypotheses, context, own))

        def ranking(listed: Tensor, around: Tensor) -> Any:
            asked.append((listed, around))
            return fake(scores=torch.zeros(listed.shape).masked_fill(~listed, float("-inf")), rehearsed=0.5)

        return fake(ranking=ranking)

    monkeypatch.setattr(list_others, "generic_evidence", evidence)
    monkeypatch.setattr(list_others, "own_evidence", evidence)
    places = []
    for index in range(6):
        asked.clear()
        row = list_others._Row.of(made, "context", pool, index, 4)  # type: ignore[arg-type]
        seed, hypotheses = SEED.child("others known", index), asked[0][1]
        rows = seed.numpy("list").permutation([0, 2, 4, 5, 6, 7])[:3].tolist()
        places.append(int(seed.numpy("place").integers(4)))
        rows.insert(places[-1], 3)
        assert torch.equal(hypotheses.inputs, pool.inputs[rows]) and torch.equal(hypotheses.labels, pool.labels[rows])
        assert hypotheses.size == 2 and hypotheses.seed == seed
        assert torch.equal(hypotheses.others[0], pool.inputs[[1]]) and torch.equal(hypotheses.others[1], pool.labels[[1]])
        assert [each[3] for each in asked[:2]] == [-1, 4] and all(
            each[0] == [made.targets[index].observation] for each in asked[:2]
        )
        assert all(each[1] is hypotheses and each[2] == "context" for each in asked[:2])
        same = hypotheses.labels[:, None] == hypotheses.labels[None]
        assert torch.equal(asked[2][1], same) and torch.equal(asked[2][0], same[places[-1] : places[-1] + 1])
        alike = torch.tensor([each in (3, 7) for each in rows])
        assert row.size == 1 + int((same[places[-1]] & ~alike).sum()) and row.ranks == [row.size, row.size]
        assert row.rehearsed == [0.5, 0.5]
    assert len({*places}) > 2 and max(places) == 3, "the last place, too"


def test_of_all_updates_an_attacker_s_ranks_and_rehearsals_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    attackers = [Says("generic", torch.zeros(1)), Says("own", torch.zeros(1), informed=True)]
    made: dict[int, Any] = {}

    def row(subject: Any, context: Any, pool: Any, index: int, size: int) -> Any:
        made[index] = (subject, context, pool, size)
        rehearsed = [0.25 * (index + 1), None if index else 0.75]
        return list_others._Row(attackers, [1 + index, 2], rehearsed, 4 + index)  # type: ignore[arg-type]

    monkeypatch.setattr(list_others._Row, "of", row)
    monkeypatch.setattr(list_others, "_affordable", lambda *given: (5, 2))
    told, pool = subject(), pool_of(owners="abcaabbc")
    found = list_others.others_known(told, "context", pool)  # type: ignore[arg-type]
    assert made == {index: (told, "context", pool, 5) for index in range(2)}
    owners = (["a", "b"],)
    assert found == counted(
        [Try("generic", False, [1, 2], [4, 5], 0.375, owners), Try("own", True, [2, 2], [4, 5], 0.75, owners)]
    )
    monkeypatch.setattr(list_others._Row, "of", lambda *given: list_others._Row([], [], [], 1))
    assert list_others.others_known(told, "context", pool).reason == "no list of this kind has a second candidate"  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "size", "updates"), [(0.0, 7, 2), (0.28, 7, 2), (0.5, 3, 2), (100.0, 3, 1)])
def test_where_others_are_known_lists_and_updates_shrink_with_what_a_client_costs(
    seconds: float, size: int, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(list_others, "LEAST_SIZE", 3)
    monkeypatch.setattr(list_others, "LEAST_UPDATES", 1)
    monkeypatch.setattr(list_others, "ListClient", lambda *given: noted(asked, given) or fake(seconds=lambda: seconds))
    monkeypatch.setattr(Pool, "hypotheses", lambda self, *given: given)
    made = subject()
    found = list_others._affordable(made, "context", pool_of())  # type: ignore[arg-type]
    assert asked == [(made.targets[0].observation, (SEED, 2), "context")]
    assert found == (size, updates)
