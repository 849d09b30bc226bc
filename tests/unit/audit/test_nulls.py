"""What anyone gets without the update: tried as often as the attackers, matched like them, of the same label."""

from __future__ import annotations

import functools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradveil.attacks import resolve
from gradveil.audit.judge import Scored, score, scored_images
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
