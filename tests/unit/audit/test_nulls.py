"""What anyone gets without the update: tried as often as the attackers, matched like them, of the same label."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradveil.attacks import resolve
from gradveil.audit import nulls
from gradveil.audit.judge import Scored, originals, score, scored_images
from gradveil.audit.nulls import DERANGEMENT, Deranged, bars, deranged, derangements, null_rows
from gradveil.audit.scene import Subject
from gradveil.metrics import ranks
from gradveil.metrics.base import Unavailable
from gradveil.randomness import Seed
from gradveil.records import Reconstruction
from tests.unit.audit.small import make_subject


@functools.cache
def subject() -> Subject:
    return make_subject(records=6, batch_size=2)


def near(to: Subject, error: float = 0.05) -> Scored:
    def rebuilt(index: int) -> Reconstruction:
        batch = to.targets[index].batch
        wave = torch.sin(3 * torch.arange(batch.inputs.numel(), dtype=torch.float32)).reshape(batch.inputs.shape)
        return Reconstruction((batch.inputs + error * wave).clamp(0, 1), batch.targets, "near", target=index)

    return score(to, [rebuilt(index) for index in range(len(to.targets))])


def psnr(of: Tensor | Unavailable) -> Tensor:
    assert isinstance(of, Tensor)
    return of


@given(labels=st.lists(st.integers(0, 3), min_size=2, max_size=30), seed=st.integers(0, 9))
def test_derangement_never_keeps_a_record_and_prefers_its_label(labels: list[int], seed: int) -> None:
    count = len(labels)
    other = deranged(labels, range(count), range(count), np.random.default_rng(seed))
    for index, (label, chosen) in enumerate(zip(labels, other, strict=True)):
        assert chosen != index and 0 <= chosen < count
        alike = [j for j, each in enumerate(labels) if each == label and j != index]
        assert (labels[chosen] == label) is bool(alike)
    shared = [i for i, label in enumerate(labels) if labels.count(label) > 1]
    assert sorted(other[i] for i in shared) == shared, "a draw spreads over all records of a label"


def test_draws_differ_by_generator_and_repeat_by_seed() -> None:
    draws = [deranged([None] * 12, range(12), range(12), np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 5))
def test_a_draw_stays_out_of_the_own_update_and_takes_nobody_twice(updates: int, size: int, seed: int) -> None:
    places = [place // size for place in range(updates * size)]
    other = deranged([place % 2 for place in range(len(places))], places, range(len(places)), np.random.default_rng(seed))
    assert all(places[chosen] != places[place] for place, chosen in enumerate(other))
    for update in range(updates):
        own = [chosen for place, chosen in enumerate(other) if places[place] == update]
        assert len(set(own)) == len(own)


def test_a_copy_of_a_record_is_no_other_record() -> None:
    """Records 0 and 1 are one; a derangement that swapped them would count the attack's success as luck."""
    for seed in range(8):
        other = deranged([5, 5, 5, 5], range(4), [0, 0, 2, 3], np.random.default_rng(seed))
        assert other[0] in (2, 3) and other[1] in (2, 3)


def test_nulls_know_nothing_of_the_update() -> None:
    selected = near(subject())
    drawn = derangements(subject(), [selected] * 3, Seed(0))
    rows = null_rows(subject(), resolve("inverting_gradients(steps=50)"), subject().context(50), 3, drawn)
    assert set(rows) == {"grey", "data_mean", "prior_only", "derangement"}
    own = float(psnr(selected.values["psnr"]).median())
    assert all(float(psnr(row.values["psnr"]).median()) < own - 5 for row in rows.values())
    assert torch.equal(rows["grey"].images, torch.full_like(rows["grey"].images, 0.5))
    assert drawn.counts == (0, 0, 0) and not any(rows["derangement"].hits)


def test_prior_only_does_not_move_with_the_update() -> None:
    ensemble, context = resolve("inverting_gradients(steps=50)"), subject().context(50)
    other = make_subject(records=6, batch_size=2, model="mlp(hidden=8)")
    drawn = derangements(subject(), [near(subject())], Seed(0))
    left, right = (null_rows(each, ensemble, context, 2, drawn)["prior_only"].images for each in (subject(), other))
    assert torch.equal(left, right)


def test_batches_of_a_draw_are_matched_as_the_attack_was() -> None:
    """An attacker who returns another update's records hits them all, in whatever order, once those are the draw."""
    two = make_subject(records=4, batch_size=2, known_labels=False)
    swapped = two.candidates[torch.tensor([3, 2, 1, 0])]
    hits = derangements(two, [scored_images(two, swapped)], Seed(0))
    assert hits.counts == (4,), "with two updates of two records there is one other update"


def test_the_bar_is_the_largest_of_as_many_draws_as_attackers() -> None:
    single = make_subject(records=8)
    pictures = scored_images(single, single.candidates[torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])])
    drawn = derangements(single, [pictures] * 12, Seed(3))
    assert len(drawn.counts) == 12 and max(drawn.counts) > min(drawn.counts)
    assert sum(drawn.largest.hits) == max(drawn.counts)
    found = bars({"grey": scored_images(single, torch.full_like(single.candidates[:8], 0.5)), DERANGEMENT: drawn.largest}, drawn)
    assert found.identified is not None
    assert (found.identified.null, found.identified.draws) == (DERANGEMENT, 12)
    assert found.identified.value == max(drawn.counts) / 8 and found.identified.top >= found.identified.value


def test_many_draws_without_a_hit_say_more_than_one() -> None:
    single = make_subject(records=8)
    tops = []
    for many in (1, 12):
        drawn = Deranged(near(single, 0.9), (0,) * many)
        found = bars({DERANGEMENT: Scored(drawn.largest.images, drawn.largest.values, torch.full((8,), 2), None)}, drawn)
        assert found.identified is not None and found.identified.value == 0
        tops.append(found.identified.top)
    assert tops[1] < tops[0] / 3


def test_a_single_update_is_deranged_with_candidates_that_were_not_attacked() -> None:
    one = make_subject(records=4, batch_size=4)
    drawn = derangements(one, [near(one)], Seed(0))
    assert drawn.counts == (0,)
    # What the draw scores against are no records of the update: its PSNR is that of strangers.
    assert float(psnr(drawn.largest.values["psnr"]).median()) < 15
    assert int(ranks(near(one).images, torch.arange(4), one.candidates).max()) == 1


@pytest.mark.parametrize("tries", [1, 3, 8])
def test_the_prior_alone_is_tried_as_often_as_told_by_recipes_that_match_nothing(
    tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    inner: Any = vars(nulls)["run_recipe"]

    def noting(recipe: Any, observations: Any, context: Any) -> Any:
        asked.append((recipe, len(observations), context))
        return inner(recipe, observations, context)

    monkeypatch.setattr(nulls, "run_recipe", noting)
    subject = make_subject(records=2)
    for name, recipes in (("informed-1", 2), ("linear_layer", 1)):
        asked.clear()
        found = nulls._prior_only(subject, resolve(name), subject.context(500), tries)
        assert len(asked) == min(recipes, tries) and sum(recipe.restarts for recipe, *_ in asked) == tries
        restarts = [recipe.restarts for recipe, *_ in asked]
        assert max(restarts) - min(restarts) <= 1 and restarts == sorted(restarts, reverse=True)
        for recipe, count, context in asked:
            told = (recipe.matching, recipe.steps, recipe.relative, recipe.stance)
            assert told == (0.0, nulls.PRIOR_STEPS, False, "plain") and recipe.tv > 0
            assert (count, context.budget, context.execution) == (2, nulls.PRIOR_STEPS, "batched")
            assert context.seed == subject.context(1).seed.child("prior only")
        assert asked[0][0].start == "noise" and len({recipe.name for recipe, *_ in asked}) == len(asked)
        assert found.labels is None and len(found.images) == 2


def test_nulls_are_grey_the_mean_the_prior_and_the_largest_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject(records=3)
    tries: list[int] = []
    grey = scored_images(subject, torch.full_like(originals(subject), 0.5))

    def noting(*given: Any) -> Scored:
        tries.append(given[-1])
        return grey

    monkeypatch.setattr(nulls, "_prior_only", noting)
    drawn = derangements(subject, [grey, scored_images(subject, originals(subject))], Seed(0))
    for asked in (2, 50):
        rows = nulls.null_rows(subject, resolve("informed-1"), subject.context(1), asked, drawn)
        assert list(rows) == ["grey", "data_mean", "prior_only", "derangement"] and rows["derangement"] is drawn.largest
    assert tries == [2, nulls.MOST_PRIOR_TRIES]
    assert torch.allclose(rows["data_mean"].images, subject.candidates.mean(0).expand(3, -1, -1, -1))
    assert bool((rows["grey"].images == 0.5).all())


def test_every_attacker_has_a_draw_of_its_own_and_the_one_with_most_hits_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject(records=6)
    drawn: list[list[int]] = []
    inner = nulls._other_rows

    def noting(*given: Any) -> Any:
        rows = inner(*given)
        drawn.append(rows.tolist())
        return rows

    monkeypatch.setattr(nulls, "_other_rows", noting)
    same = scored_images(subject, originals(subject))
    derangements(subject, [same] * 4, Seed(0))
    assert len({tuple(rows) for rows in drawn}) > 1
    # Who shows the record of the draw hits; the other attackers do not.
    other = subject.candidates[torch.tensor(drawn[2])]
    hitting = scored_images(subject, other)
    found = derangements(subject, [same, same, hitting, same], Seed(0))
    assert found.counts[2] == max(found.counts) == 6 and torch.equal(found.largest.images, hitting.images)
    assert found.largest.hits == [True] * 6 and found.largest.labels is None


def test_pictures_go_to_the_records_of_the_draw_whatever_their_order() -> None:
    subject = make_subject(records=6, batch_size=3)
    rows = torch.tensor([9, 4, 7, 20, 12, 31])
    wanted = subject.candidates[rows]
    mixed = torch.cat([part.roll(1, 0) for part in wanted.split(3)])
    assert torch.equal(nulls._matched(subject, mixed, rows), wanted)
    single = make_subject(records=2)
    assert torch.equal(nulls._matched(single, mixed[:2], rows[:2]), mixed[:2]), "one picture has nobody to change with"
