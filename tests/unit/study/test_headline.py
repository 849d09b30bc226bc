"""The headline is the largest count that an attacker's own referee chose, with an interval that allows for the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradveil.significance import wilson
from gradveil.study.headline import ALL, INFORMED, PLAIN, choices, contenders, headline_share
from gradveil.study.kept import KeptCell
from gradveil.study.measures import Share, Summary
from gradveil.study.results import Attacker, CellResult, Record


def found(count: int, n: int = 16) -> Summary:
    return Summary(identified=Share.of(count, n))


def cell(selected: int, plain: int | None, informed: int | None, *alone: tuple[str, int], n: int = 16) -> CellResult:
    return CellResult(
        selected=found(selected, n),
        best_by_truth=found(n, n),
        plain=None if plain is None else found(plain, n),
        informed=None if informed is None else found(informed, n),
        attackers=tuple(
            Attacker(recipe=f"search_{place}", stance=stance, summary=found(count, n))
            for place, (stance, count) in enumerate(alone)
        ),
    )


SEVERAL = (("plain", 1), ("plain", 0), ("informed", 1), ("zero_mask", 0))


@pytest.mark.parametrize(
    ("of", "count", "who"),
    [
        (cell(5, 3, 5, *SEVERAL), 5, ALL),
        (cell(1, 3, 1, *SEVERAL), 3, PLAIN),  # "the strongest identified 1 of 16" stood beside "plain 3 of 16"
        (cell(1, 0, 4, *SEVERAL), 4, INFORMED),
        (cell(1, 1, 1, *SEVERAL, ("averaged", 9)), 9, "search 4 (averaged)"),
        (cell(4, 4, 4, *SEVERAL, ("averaged", 4)), 4, ALL),
    ],
)
def test_the_strongest_attacker_has_the_largest_count(of: CellResult, count: int, who: str) -> None:
    assert (of.identified.count, of.strongest.name) == (count, who)
    assert of.identified.count < 16, "the best by truth is nobody's choice"


def test_the_lower_end_allows_for_the_choice_and_the_upper_end_for_everybody() -> None:
    several = cell(8, 3, 8, *SEVERAL)
    tried = len(contenders(several))
    assert tried == 7, "three choices and four recipes"
    assert several.identified.low == pytest.approx(wilson(8, 16, 1 - 0.05 / tried)[0])
    assert several.identified.low < wilson(8, 16)[0] - 0.05
    assert several.identified.high == wilson(8, 16)[1]
    one = cell(8, 8, None, ("plain", 8))
    assert len(contenders(one)) == 1 and one.identified == found(8).identified, "nobody chose"


def test_the_upper_end_is_the_largest_of_all() -> None:
    """An attacker with fewer hits but worth fewer records may be able to reach more."""
    few = Share.of(1, 16, effective=2.0)
    assert headline_share([Share.of(2, 16), few]).high == few.high > Share.of(2, 16).high


@pytest.mark.parametrize(
    ("stances", "own"),
    [
        ((), (ALL, PLAIN, INFORMED)),
        (("plain",), ()),
        (("plain", "plain"), (ALL,)),
        (("plain", "informed"), (ALL,)),
        (("plain", "plain", "informed"), (ALL, PLAIN)),
        (("plain", "informed", "averaged"), (ALL, INFORMED)),
    ],
)
def test_a_choice_among_one_recipe_is_that_recipe(stances: tuple[str, ...], own: tuple[str, ...]) -> None:
    assert choices(stances) == own


def test_intervals_of_older_cells_count_updates() -> None:
    """Cells kept before there were clusters say which records were hit; two updates of eight are no sixteen records."""
    settings = replace(KeptCell(), batch_size=8)
    nobody = replace(cell(0, 0, None, ("plain", 0), ("plain", 0)), settings=settings, records=(Record(),) * 16)
    assert nobody.identified.high == pytest.approx(wilson(0, 2)[1])
    together = replace(
        cell(8, 8, None, ("plain", 8)), settings=settings, records=(Record(identified=True),) * 8 + (Record(),) * 8
    )
    assert together.identified.effective == 1.0
    owners = tuple(Record(owner=f"o-{place // 4}") for place in range(16))
    assert replace(nobody, settings=KeptCell(), records=owners).identified.high == pytest.approx(wilson(0, 4)[1])
    assert replace(nobody, settings=KeptCell()).identified.high == wilson(0, 16)[1]
