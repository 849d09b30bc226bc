"""The partition `sizes`: clients with given numbers of records, such as the nine hospitals of the shadow paper."""

from __future__ import annotations

import pytest

from gradveil.data import PARTITIONS, Dataset, load_data
from gradveil.errors import UsageError
from gradveil.randomness import Seed

HOSPITALS = [8, 32, 128, 512, 8, 32, 128, 512, 1]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_data("digits")


def test_the_papers_hospitals_are_the_default(digits: Dataset) -> None:
    parts = PARTITIONS.build("sizes").split(digits, 9, Seed(0))
    assert [len(part) for part in parts] == HOSPITALS
    assert len({row for part in parts for row in part}) == sum(HOSPITALS), "no record appears twice"
    assert PARTITIONS.build("sizes").split(digits, 9, Seed(0)) == parts
    assert PARTITIONS.build("sizes").split(digits, 9, Seed(1)) != parts


def test_given_sizes(digits: Dataset) -> None:
    assert [len(p) for p in PARTITIONS.build("sizes(sizes=[5, 1, 3])").split(digits, 3, Seed(0))] == [5, 1, 3]


@pytest.mark.parametrize("count", [9, 10, 244, 1797])
def test_scaled_sizes_use_every_record_and_leave_nobody_out(digits: Dataset, count: int) -> None:
    parts = PARTITIONS.build("sizes(scaled=True)").split(digits.take(range(count)), 9, Seed(0))
    sizes = [len(part) for part in parts]
    assert sum(sizes) == count and min(sizes) >= 1
    assert all(sizes[i] >= sizes[j] for i in range(9) for j in range(9) if HOSPITALS[i] > HOSPITALS[j])


@pytest.mark.parametrize(
    ("spelling", "clients", "words"),
    [
        ("sizes", 3, "9 sizes for 3 clients"),
        ("sizes(sizes=[2000])", 1, "add up to 2000"),
        ("sizes(sizes=[0, 3])", 2, "whole numbers above 0"),
        ("sizes(sizes=[])", 1, "whole numbers above 0"),
        ("sizes(sizes=[1.5])", 1, "whole numbers above 0"),
    ],
)
def test_what_cannot_be_dealt_is_said(digits: Dataset, spelling: str, clients: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PARTITIONS.build(spelling).split(digits, clients, Seed(0))
