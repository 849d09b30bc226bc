"""One seed, many independent generators, and never a global one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.randomness import Seed

TEXTS = st.text(st.characters(exclude_characters="\x1f", exclude_categories=["Cs"]), max_size=8)
KEYS = st.tuples(st.integers(0, 2**63), st.lists(TEXTS, max_size=3).map(tuple), TEXTS, st.integers(0, 99), st.integers(0, 99))
Key = tuple[int, tuple[str, ...], str, int, int]


def number(key: Key) -> int:
    value, path, role, client, round_ = key
    return Seed(value).child(*path).number(role, client=client, round=round_)


@given(KEYS, KEYS)
def test_numbers_agree_exactly_where_the_keys_do(left: Key, right: Key) -> None:
    assert 0 <= number(left) < 2**63
    assert (number(left) == number(right)) == (left == right)


def test_a_path_is_not_confused_with_a_role_or_a_number() -> None:
    numbers = {
        Seed(1).number("a"),
        Seed(1).child("a").number(""),
        Seed(1).child("a", "b").number("c"),
        Seed(1).child("ab").number("c"),
        Seed(1).number("a", client=1),
        Seed(1).number("a", round=1),
        Seed(11).number("a"),
        Seed(1).number("1"),
    }
    assert len(numbers) == 8
    assert Seed(1).child("a").child("b") == Seed(1).child("a", "b")
    assert Seed(1).child(3).number("x") == Seed(1).child("3").number("x")


def test_neighbouring_seeds_are_unrelated() -> None:
    draws = torch.stack([torch.randn(2000, generator=Seed(value).generator("noise")) for value in range(4)])
    correlation = torch.corrcoef(draws) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.1


def test_asking_for_one_generator_does_not_move_another() -> None:
    seed = Seed(5)
    first = seed.generator("a")
    before = torch.rand(3, generator=first)
    second = seed.generator("a")
    torch.rand(100, generator=seed.generator("b"))
    assert torch.equal(before, torch.rand(3, generator=second))


@pytest.mark.usefixtures("untouched_global_rng")
def test_global_generators_are_left_alone() -> None:
    seed = Seed(5).child("x")
    torch.rand(3, generator=seed.generator("a"))
    seed.numpy("a").normal(size=3)


@pytest.mark.parametrize("role", ["a", "b"])
def test_numpy_generators_repeat_too(role: Any) -> None:
    assert Seed(1).numpy(role).integers(1000, size=5).tolist() == Seed(1).numpy(role).integers(1000, size=5).tolist()
    assert Seed(1).numpy("a").integers(1000, size=5).tolist() != Seed(1).numpy("b").integers(1000, size=5).tolist()
