"""Records stored twice are one record: found, grouped, and never held against the attacker."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.errors import UsageError
from gradveil.metrics import duplicate_groups, owner_hits, ranks
from gradveil.metrics.duplicates import NEAR


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand((count, 3, 8, 8), generator=torch.Generator().manual_seed(seed))


def test_every_record_stored_twice_is_found() -> None:
    once = pictures(100)
    groups = duplicate_groups(torch.cat([once, once]))
    assert groups.tolist() == [*range(100), *range(100)]


def test_a_picture_saved_again_is_the_same_and_another_of_the_person_is_not() -> None:
    """Quantised to 8 bits is a copy; pictures that differ by a hundredth of what strangers differ by are not."""
    some = pictures(40)
    saved = (some[:4] * 255).round() / 255
    scale = float((some[0] - some[1]).square().mean()) ** 0.5
    similar = (some[4:8] + 0.1 * scale * torch.randn((4, 3, 8, 8), generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    groups = duplicate_groups(torch.cat([some, saved, similar])).tolist()
    assert groups == [*range(40), 0, 1, 2, 3, 44, 45, 46, 47]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.integers(0, 5), st.floats(0.0, 0.5))
def test_groups_are_those_of_all_pairs_compared(count: int, copies: int, near: float) -> None:
    """Strips only spare work: every pair within the limit, and no other, is joined."""
    some = pictures(count, 3)
    pool = torch.cat([some, some[:copies] + 0.01])
    flat = pool.flatten(1).double()
    distance = (flat[:, None] - flat[None]).square().sum(2)
    left, right = torch.triu_indices(len(pool), len(pool), offset=1)
    limit = near * float(distance[left, right].median()) if len(pool) > 1 else 0.0
    reach = distance <= limit
    for _ in range(len(pool)):
        reach = (reach.double() @ reach.double()) > 0
    expected = [int(row.nonzero()[0]) for row in reach]
    assert duplicate_groups(pool, near).tolist() == expected


def test_many_pairs_are_sampled_and_say_the_same() -> None:
    some = pictures(120)
    assert duplicate_groups(torch.cat([some, some[:7]])).tolist() == [*range(120), *range(7)]


@pytest.mark.parametrize("near", [-0.1, 1.0])
def test_a_share_that_makes_no_sense_is_refused(near: float) -> None:
    with pytest.raises(UsageError, match="no duplicates to look for"):
        duplicate_groups(pictures(3), near)
    assert NEAR == 0.001


def test_a_copy_of_the_truth_is_not_held_against_the_attacker() -> None:
    once = pictures(50)
    pool = torch.cat([once, once])
    without = ranks(once[:4], range(4), pool)
    assert without.tolist() == [2] * 4, "the copy is as near"
    assert ranks(once[:4], range(4), pool, copies=duplicate_groups(pool)).tolist() == [1] * 4


def test_copies_of_another_record_count_once() -> None:
    pool = torch.tensor([[0.0], [0.5], [0.5], [0.5], [1.0]])
    guess = torch.tensor([[0.45]])
    assert ranks(guess, [0], pool).tolist() == [4]
    assert ranks(guess, [0], pool, copies=duplicate_groups(pool)).tolist() == [2]


def test_a_constant_guess_among_copies_still_identifies_nobody() -> None:
    pool = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    assert ranks(torch.tensor([[0.5]]), [0], pool, copies=duplicate_groups(pool)).tolist() == [2]


def test_the_nearest_of_all_pictures_names_the_owner() -> None:
    pool = torch.tensor([[0.125], [0.25], [0.75], [0.875]])
    owners, copies = torch.tensor([0, 0, 1, 1]), torch.arange(4)
    guesses = torch.tensor([[0.19], [0.55], [0.5]])
    assert owner_hits(guesses, torch.tensor([0, 0, 0]), pool, owners, copies).tolist() == [True, False, False], (
        "ties do not count"
    )
    assert owner_hits(guesses, torch.tensor([1, 1, 1]), pool, owners, copies).tolist() == [False, True, False]


def test_a_copy_under_another_owner_is_no_rival() -> None:
    pool, owners = torch.tensor([[0.1], [0.1], [0.9]]), torch.tensor([0, 1, 1])
    guess = torch.tensor([[0.12]])
    copies = duplicate_groups(pool)
    for owner in (0, 1):
        assert owner_hits(guess, torch.tensor([owner]), pool, owners, copies).tolist() == [True]
    assert owner_hits(guess, torch.tensor([0]), pool, owners, torch.arange(3)).tolist() == [False]
