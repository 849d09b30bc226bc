"""Attackers who hold a list: what is planted is found, what is hidden is not, and nobody is told the truth."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gradveil.attacks.listing import generic_evidence, own_evidence
from gradveil.audit.cell import run_cell
from gradveil.audit.list_counts import Try, best_guess, counted, of_the_strongest
from gradveil.audit.list_level import list_level, matching_share, measure_lists
from gradveil.audit.lists import Pool, list_seed, neighbours
from gradveil.audit.scene import build_subject
from gradveil.data import Dataset
from gradveil.metrics import share_of, wilson
from gradveil.study.cell import Cell
from gradveil.study.codec import decode, encode
from gradveil.study.levels import LISTS, Listed, ListLevel
from tests.unit.audit.small import CELL, digits, make_subject

SIZE = 24


def measured(size: int = SIZE, **changes: Any) -> ListLevel:
    found = measure_lists(make_subject(**changes), size)
    assert not found.reason
    return found


def test_a_cell_asks_for_lists_unless_it_says_otherwise() -> None:
    assert Cell().lists == "auto" and list_level(make_subject()) is None


def random_list(found: ListLevel) -> Listed:
    assert found.headline is not None and found.headline.share is not None
    return found.headline


def count(found: ListLevel) -> tuple[int, int]:
    share = random_list(found).share
    assert share is not None
    return share.count, share.n


def own_dataset(**changes: Any) -> Dataset:
    return dataclasses.replace(digits().take(range(60)), **changes)


@pytest.fixture(scope="module")
def undefended() -> ListLevel:
    return measured(records=8)


def test_without_a_defense_everyone_is_named_on_every_list_and_missed_by_none(undefended: ListLevel) -> None:
    assert list(undefended.lists) == ["random", "same_label", "nearest"] and set(undefended.lists) < set(LISTS)
    for each in undefended.lists.values():
        assert each.share is not None and each.share.value == 1.0
        assert [reach.share.value for reach in each.reached] == [1.0, 1.0]
        assert [(reach.attacker, reach.informed, reach.rehearsed) for reach in each.reached] == [
            ("generic", False, 1.0),
            ("own", True, 1.0),
        ]
        assert each.sensitivity is not None and each.sensitivity.d is None and each.sensitivity.low is not None
    assert undefended.presence is not None and undefended.presence.share is not None
    assert undefended.presence.share.value == 1.0
    assert random_list(undefended).size == SIZE and undefended.draws == 1


def test_under_heavy_noise_lists_and_presence_are_at_chance() -> None:
    found = measured(records=24, defense="gaussian_noise(std=100.0)")
    bar = random_list(found).null
    assert bar is not None and bar.high is not None
    assert count(found)[0] / 24 <= bar.high + 1 / 24
    sensitivity = random_list(found).sensitivity
    assert sensitivity is not None and sensitivity.low is not None and sensitivity.low < 0.1
    presence = found.presence
    assert presence is not None and presence.share is not None and presence.share.low < 0.5
    assert all(reach.rehearsed is not None and reach.rehearsed < 0.8 for reach in presence.reached)
    assert found.draws == 4


@pytest.mark.parametrize(
    "defense", ["censor", "quantisation(mode='sign')", "quantisation(mode='qsgd', bits=4)", "pruning(rate=0.9)", "svdefense"]
)
def test_what_is_no_noise_falls_to_both_attackers(defense: str) -> None:
    found = measured(records=6, defense=defense)
    assert [reach.share.count for reach in random_list(found).reached] == [6, 6]


@pytest.mark.parametrize(
    "changes",
    [
        {"local_steps": 2, "learning_rate": 0.5},
        {"rounds": 2},
        {"rounds": 2, "defense": "censor(active_rounds=0)"},
        {"cut": "cut1", "ensemble": "quick"},
    ],
)
def test_local_steps_rounds_and_embeddings_are_replayed(changes: dict[str, Any]) -> None:
    assert count(measured(records=4, **changes)) == (4, 4)


def test_two_rounds_tell_more_than_one_under_noise() -> None:
    settings: dict[str, Any] = {"records": 24, "defense": "gaussian_noise(std=0.6)"}
    one, four = (count(measured(rounds=rounds, **settings))[0] for rounds in (1, 4))
    assert four > one


def test_of_a_batch_the_other_records_hide_it_unless_they_are_known() -> None:
    found = measured(records=16, batch_size=4)
    assert list(found.lists) == ["random", "same_label", "nearest", "others_known"]
    known, unknown = found.lists["others_known"], random_list(found)
    assert known.share is not None and (known.share.count, known.share.n) == (4, 4)
    assert [reach.attacker for reach in known.reached] == ["generic", "own"]
    assert [reach.attacker for reach in unknown.reached] == ["generic"]
    assert unknown.size == SIZE - 3  # the other records of the update are not on the list
    assert unknown.share is not None and unknown.share.n == 16 and unknown.share.count < 16
    assert found.draws == 4  # other records are noise, also where the defense draws nothing


def test_of_an_aggregate_it_is_the_same() -> None:
    found = measured(records=8, clients=2)
    known = found.lists["others_known"].share
    assert known is not None and known.value == 1.0


def test_who_knows_the_label_rules_out_all_others() -> None:
    noisy: dict[str, Any] = {"records": 12, "defense": "gaussian_noise(std=100.0)"}
    blind, told = measured(**noisy), measured(known_labels=True, **noisy)
    labels = Pool.of(make_subject(**noisy), SIZE).labels
    assert random_list(told).size < SIZE / 2 < random_list(blind).size == SIZE
    assert told.lists["same_label"] == random_list(told)
    null, other = random_list(told).null, random_list(blind).null
    assert null is not None and other is not None and null.value > 2 * other.value
    assert len(labels) == SIZE


def test_duplicates_of_the_truth_are_no_miss_whatever_their_label() -> None:
    once = digits().take(range(20))
    twice = dataclasses.replace(
        once,
        inputs=torch.cat([once.inputs, once.inputs, once.inputs]),
        targets=torch.cat([once.targets, once.targets, (once.targets + 1) % once.classes]),
        records=tuple(str(i) for i in range(60)),
    )
    subject = build_subject(CELL.replace(records=6), twice, 0)
    pool = Pool.of(subject, 60)
    assert len(pool) == 40  # equal inputs with equal labels are listed once
    found = measure_lists(subject, 60)
    assert count(found) == (6, 6)
    assert random_list(found).size == 39  # the same input under another label is no other record
    assert found.presence is not None and found.presence.share is not None and found.presence.share.value == 1.0


def test_ties_with_others_count_against_the_attacker() -> None:
    pool = Pool.of(make_subject(records=2), 6)
    scores = torch.zeros(2, 6)
    assert pool.ranks(scores) == [6, 6]
    own = [record for _, record in pool.records]
    scores[0, own[0]] = 1.0
    assert pool.ranks(scores) == [1, 6]
    scores[0] = float("-inf")
    scores[0, own[0]] = -5.0
    assert pool.ranks(scores)[0] == 1  # nobody else is on the list


def test_attackers_get_lists_and_releases_and_no_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject(records=4, defense="quantisation(mode='sign')")
    pool = Pool.of(subject, SIZE)
    told = pool.hypotheses(list_seed(subject), 1)
    other = dataclasses.replace(pool, batches=pool.batches[::-1])
    assert other.hypotheses(list_seed(subject), 1) is not told
    seen = [target.observation for target in subject.targets]
    scrubbed = dataclasses.replace(
        subject, targets=tuple(dataclasses.replace(t, batch=subject.targets[0].batch) for t in subject.targets)
    )
    for attack in (generic_evidence, lambda *a: own_evidence(*a, own=8)):
        honest, blind = (attack(seen, told, each.context(1)) for each in (subject, scrubbed))
        assert torch.equal(honest.features, blind.features)
    # The attacked records stand anywhere on the list, so that its order tells nothing.
    assert sorted(record for _, record in pool.records) != list(range(4))


def test_owners_are_counted_and_so_is_naming_the_commonest() -> None:
    owners = tuple("much" if i % 2 else f"p{i // 6}" for i in range(60))
    clear = measure_lists(build_subject(CELL.replace(records=6), own_dataset(owners=owners), 0), 40)
    listed = random_list(clear)
    audited = {owners[row] for row in build_subject(CELL.replace(records=6), own_dataset(owners=owners), 0).indices}
    assert listed.owners is not None and listed.owners.count == listed.owners.n == len(audited) < 6
    assert listed.owners_null is not None and listed.owners_null.null == "commonest owner"
    assert 0.4 < listed.owners_null.value < 0.8
    one = measure_lists(
        build_subject(CELL.replace(records=6, defense="gaussian_noise(std=100.0)"), own_dataset(owners=("a",) * 60), 0), 40
    )
    assert random_list(one).owners is not None and random_list(one).owners.value == 1.0  # type: ignore[union-attr]
    assert random_list(one).share.value < 1.0  # type: ignore[union-attr]
    pool = Pool.of(build_subject(CELL.replace(records=6), own_dataset(owners=owners), 0), 40)
    assert not any(pool.owner_hits(torch.zeros(6, 40)).values())  # all tied: nobody's owner is named


def test_an_owner_on_a_list_is_one_owner_however_many_records_of_theirs_are_audited() -> None:
    owners = tuple(f"p{i // 3}" for i in range(60))
    subject = build_subject(CELL.replace(records=24), own_dataset(owners=owners), 0)
    audited = {owners[row] for row in subject.indices}
    listed = random_list(measure_lists(subject, 60))
    assert listed.owners is not None and (listed.owners.count, listed.owners.n) == (len(audited), len(audited))
    assert len(audited) < 24 == listed.share.n  # type: ignore[union-attr]
    assert [reach.owners for reach in listed.reached] == [share_of(len(audited), len(audited))] * 2
    pool = Pool.of(subject, 60)
    scores = torch.zeros(24, 60)
    scores[0, pool.records[0][1]] = 1.0  # one record found: its owner is hit, though their other records were missed
    assert sum(pool.owner_hits(scores).values()) == 1
    # Three tries each: naming whoever is on a list of 60 three times hits more owners than 1 in 20.
    everyone = pool.lists(torch.ones(60, 60, dtype=torch.bool))
    tries = [sum(owners[row] == name for row in subject.indices) for name in audited]
    assert pool.commonest_owner(everyone) == pytest.approx(sum(1 - 0.95**k for k in tries) / len(tries))


def test_records_of_one_update_or_owner_are_worth_less_on_lists_too() -> None:
    missed = Try("x", False, [2] * 16, [SIZE] * 16, None, Pool.of(make_subject(records=16, batch_size=4), SIZE).clusters(16))
    assert missed.share.effective == 4, "four updates, and no variance to see"
    owners = tuple(f"p{i // 30}" for i in range(60))
    few = random_list(measure_lists(build_subject(CELL.replace(records=8), own_dataset(owners=owners), 0), SIZE)).share
    assert few is not None and (few.count, few.n, few.effective) == (8, 8, 2)


def test_a_near_copy_of_the_truth_is_no_miss() -> None:
    once = digits().take(range(20))
    near = (once.inputs + 0.002 * torch.randn(once.inputs.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    twice = dataclasses.replace(
        once,
        inputs=torch.cat([once.inputs, near]),
        targets=torch.cat([once.targets, once.targets]),
        records=tuple(map(str, range(40))),
    )
    subject = build_subject(CELL.replace(records=12, defense="gaussian_noise(std=0.02)"), twice, 0)
    assert subject.distinct == 20
    assert count(measure_lists(subject, 40)) == (12, 12)


def test_who_rebuilt_a_picture_can_look_it_up() -> None:
    """Under much noise no list attacker names anybody; with the pictures in hand whoever rebuilt them does."""
    settings: dict[str, Any] = {"records": 8, "defense": "gaussian_noise(std=1000.0)"}
    subject = make_subject(**settings)
    pictures = torch.cat([target.batch.inputs for target in subject.targets])
    blind = random_list(measure_lists(subject, SIZE))
    told = random_list(measure_lists(subject, SIZE, pictures=0.7 * pictures + 0.1))
    assert blind.share is not None and blind.share.count < 8
    assert told.share is not None and (told.share.count, told.attacker) == (8, "rebuilt pictures")
    assert [each.attacker for each in told.reached] == ["generic", "own", "rebuilt pictures"]
    grey = random_list(measure_lists(subject, SIZE, pictures=torch.full_like(pictures, 0.5)))
    assert grey.reached[-1].share.count <= 1 and grey.share is not None and grey.share.value < 0.5


def test_of_a_batch_nobody_knows_which_picture_is_of_which_record() -> None:
    subject = make_subject(records=8, batch_size=4, defense="gaussian_noise(std=1000.0)")
    pictures = torch.cat([target.batch.inputs for target in subject.targets])
    mixed = pictures.unflatten(0, (2, 4)).flip(1).flatten(0, 1)
    straight, turned = (random_list(measure_lists(subject, SIZE, pictures=each)).reached[-1] for each in (pictures, mixed))
    assert straight == turned and straight.share.count == 8


def test_neighbours_are_those_with_the_nearest_updates() -> None:
    subject = make_subject(records=4)
    pool = Pool.of(subject, 12)
    learner = subject.learner
    updates = [learner.update(x, y) for x, y in zip(pool.inputs.split(1), pool.labels.split(1), strict=True)]
    flat = torch.stack([torch.cat([v.reshape(-1) for v in update.values()]) for update in updates]).double()
    exact = torch.cdist(flat, flat).topk(4, largest=False).indices.sort(1).values
    found = neighbours([learner], pool, 4, list_seed(subject))
    assert found.sum(1).tolist() == [4] * 12 and bool(found.diagonal().all())
    assert torch.equal(found.nonzero()[:, 1].reshape(12, 4), exact)


def test_sketches_of_large_updates_keep_their_neighbours() -> None:
    subject = make_subject(records=4, model="mlp(hidden=128)")
    assert subject.learner.parameters > 2 * 4096
    pool = Pool.of(subject, 24)
    near = neighbours([subject.learner], pool, 3, list_seed(subject))
    updates = [subject.learner.update(x, y) for x, y in zip(pool.inputs.split(1), pool.labels.split(1), strict=True)]
    flat = torch.stack([torch.cat([v.reshape(-1) for v in update.values()]) for update in updates]).double()
    exact = torch.zeros_like(near).scatter(1, torch.cdist(flat, flat).topk(3, largest=False).indices, True)
    assert float((near & exact).sum()) / float(exact.sum()) > 0.85


def test_the_largest_share_has_a_lower_end_for_the_choice_and_the_upper_end_of_all() -> None:
    shares = [share_of(3, 16), share_of(5, 16), share_of(1, 4)]
    top, best = of_the_strongest(shares)
    assert best == 1 and (top.count, top.n) == (5, 16)
    assert top.low == wilson(5, 16, 1 - 0.05 / 3)[0] < shares[1].low
    assert top.high == max(each.high for each in shares) == shares[2].high
    assert of_the_strongest([share_of(60, 64), share_of(2, 2)])[1] == 0, "two of two are less than sixty of sixty-four"
    assert of_the_strongest([share_of(0, 4), share_of(0, 16)])[0].n == 16


def test_a_null_is_the_largest_of_as_many_guesses() -> None:
    one, many = best_guess("guess", 0.1, 20, 1), best_guess("guess", 0.1, 20, 5)
    assert one.value == pytest.approx(0.1) and one.high == 0.2
    assert many.value > 0.15 and many.high is not None and many.high >= 0.25
    trials = torch.distributions.Binomial(20, torch.tensor(0.1)).sample((20000, 5)).amax(1) / 20
    assert many.value == pytest.approx(float(trials.mean()), abs=0.01)


def test_attackers_who_looked_at_fewer_updates_are_counted_over_those() -> None:
    found = counted([Try("a", False, [1, 1, 3, 1], [4] * 4, 0.5), Try("b", True, [1, 1], [4] * 2, None)])
    assert found.attacker == "b" and found.share is not None and (found.share.count, found.share.n) == (2, 2)
    assert found.size == 4 and [reach.share.n for reach in found.reached] == [4, 2]


def test_it_is_part_of_a_cell_and_survives_the_file() -> None:
    result = run_cell(CELL.replace(lists="12"), digits()).result
    assert result.levels is not None and result.levels.listed is not None
    assert "lists_reach_pictures" in [check.name for check in result.checks]
    kept = decode(type(result), encode(result))
    assert kept.levels == result.levels and encode(kept)["levels"]["list"]["lists"]["random"]["share"]["count"] == 4


def test_the_matching_attack_is_the_attacker_who_knows_the_noise() -> None:
    defense = "clipping(bound=1) + gaussian_noise(std=0.4)"
    subject = build_subject(CELL.replace(records=24, defense=defense), digits().take(range(64)), 0)
    found = measure_lists(subject, len(subject.candidates)).headline
    assert found is not None
    assert matching_share(subject).count == {each.attacker: each.share.count for each in found.reached}["own"] > 3


def test_what_is_no_number_names_nobody() -> None:
    pool = Pool.of(make_subject(records=2), 6)
    own = [record for _, record in pool.records]
    scores = torch.zeros(2, 6)
    scores[0, own[0]] = float("nan")  # compares as larger than nothing, and so nobody was ahead of it
    scores[1] = float("inf")
    assert pool.ranks(scores) == [6, 6]


def test_owners_share_their_luck_where_others_are_known_too() -> None:
    owners = tuple(f"p{i // 30}" for i in range(60))
    subject = build_subject(CELL.replace(records=16, batch_size=4), own_dataset(owners=owners), 0)
    share = measure_lists(subject, SIZE).lists["others_known"].share
    assert share is not None and share.n == 4 and share.effective is not None and share.effective <= 2
