"""Lists that say less than pictures do."""

from __future__ import annotations

from gradveil.audit.candidate_checks import check_lists
from gradveil.metrics import share_of
from gradveil.study.levels import Level, Levels, Listed, ListLevel
from gradveil.study.measures import Summary
from gradveil.study.results import CellResult


def clear_leak(pictures: int, named: int) -> CellResult:
    headline = Listed(share=share_of(named, 64), owners=share_of(named, 64))
    return CellResult(
        selected=Summary(identified=share_of(pictures, 64)),
        levels=Levels(listed=ListLevel(lists={"random": headline}), owners=Level(share=share_of(pictures, 64))),
    )


def test_lists_that_fall_behind_pictures_are_noticed() -> None:
    assert [check_lists(clear_leak(*each)).level for each in ((40, 10), (40, 38), (10, 64), (40, 30))] == [
        "warn",
        "ok",
        "ok",
        "ok",
    ]
    said = check_lists(clear_leak(40, 10)).sentence
    assert "40 of 64 records were identified by pictures, 10 of 64 pointed out on lists" in said and "40 of 64 owners" in said
    assert check_lists(CellResult(selected=Summary(identified=share_of(9, 9)))).level == "ok"
