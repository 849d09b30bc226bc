"""The verdict and its words: what may be said, which defense is called best, and when nothing may be said at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradveil.audit import trust as checks
from gradveil.study.codec import decode
from gradveil.study.kept import KeptCell, KeptUtility
from gradveil.study.load import load_run
from gradveil.study.measures import Share, Spread
from gradveil.study.results import CellResult
from gradveil.verdict import numbers
from gradveil.verdict import status as verdict
from gradveil.verdict.status import Headline, Status, choose_headline, settings_of, status_of
from gradveil.verdict.words import (
    costs,
    headline_sentence,
    identified_sentence,
    judgement,
    progress_sentence,
    trust,
    utility_words,
)
from tests.unit.report.example_results import DEFENSES, FAIL, WARN, Example, make_results

NONE = DEFENSES[0]


def headline(folder: Path, defenses: Sequence[Example] = DEFENSES) -> Headline:
    return choose_headline(load_run(make_results(folder, defenses=defenses)))


def spaced(text: str) -> str:
    return text.replace("\u00a0", " ")


def test_the_verdict_says_count_share_interval_and_chance(tmp_path: Path) -> None:
    cell = headline(tmp_path).undefended
    assert cell is not None
    expected = "the strongest attacker identified 15 of 16 records (94 %, 95 % interval 65–99 %); guessing would find 1 in 128"
    assert spaced(identified_sentence(cell)) == expected
    twice = replace(cell, candidates=256, duplicates=128)
    assert spaced(identified_sentence(twice)) == expected, "copies are one record, of which guessing may name either"


def test_the_best_defense_has_the_lowest_upper_bound(tmp_path: Path) -> None:
    best = headline(tmp_path).best
    assert best is not None and best.defense.spelling == "gaussian_noise(std=0.1)"


@pytest.mark.parametrize(
    ("changes", "winner"),
    [({"bytes_up": 10}, "b"), ({"defense_ms": 1.0}, "b"), ({}, "a"), ({"bytes_up": 99999, "defense_ms": 1.0}, "a")],
)
def test_ties_go_to_fewer_bytes_then_less_time(tmp_path: Path, changes: dict[str, float], winner: str) -> None:
    a = Example("a", 1, 1, 11.0)
    best = headline(tmp_path, [NONE, a, replace(a, spelling="b", **changes)]).best  # type: ignore[arg-type]
    assert best is not None and best.defense.spelling == winner


def test_a_defense_that_failed_a_check_cannot_be_best(tmp_path: Path) -> None:
    failing = replace(DEFENSES[3], checks=[FAIL])
    best = headline(tmp_path, [NONE, DEFENSES[1], failing]).best
    assert best is not None and best.defense.spelling == DEFENSES[1].spelling


@pytest.mark.parametrize(
    ("example", "status", "words"),
    [
        (NONE, Status.BROKEN, "Broken by quick-1"),
        (Example("x", 1, 1, 10.0), Status.UNPROVEN, "Not identified by quick-1 (1 of 16 identified; the largest of 4 tries"),
        (Example("x", 1, 3, 10.0), Status.UNCLEAR, "too few to tell"),
        (Example("x", 0, 0, 20.0), Status.UNCLEAR, "Leaks something"),
        (
            Example("x", 0, 0, 20.0, checks=[FAIL]),
            Status.NO_VERDICT,
            "No verdict, because a check failed: The matching loss never fell",
        ),
    ],
)
def test_a_cell_is_judged_against_the_best_null(tmp_path: Path, example: Example, status: Status, words: str) -> None:
    cells = load_run(make_results(tmp_path, defenses=[NONE, example])).cells
    assert status_of(cells[1], cells[0]) is status
    assert words in spaced(judgement(cells[1], cells[0]))


def test_few_records_do_not_show_that_a_defense_holds(tmp_path: Path) -> None:
    none, held = load_run(make_results(tmp_path, defenses=[NONE, Example("x", 0, 0, 9.0)])).cells
    few = replace(held, selected=replace(held.selected, identified=replace(held.selected.identified, n=15)))
    assert (status_of(held, none), status_of(few, none)) == (Status.UNPROVEN, Status.UNCLEAR)
    assert verdict.ENOUGH == checks.FEW_RECORDS, "the report may not import the audit, and both say what few is"
    assert "15 records are too few" in spaced(judgement(few, none))


@pytest.mark.parametrize("bare", [Example("none", 0, None, 9.0), replace(NONE, checks=[FAIL])])
def test_no_defense_passes_where_the_undefended_update_holds(tmp_path: Path, bare: Example) -> None:
    cells = load_run(make_results(tmp_path, defenses=[bare, Example("x", 0, 0, 9.0)])).cells
    assert status_of(cells[1], cells[0]) is Status.UNTESTED
    assert "ot broken" not in judgement(cells[1], cells[0])


def test_the_leading_setting_is_the_one_that_leaks_most(tmp_path: Path) -> None:
    make_results(tmp_path, grid=[{"batch_size": 16}, {"batch_size": 1}, {"batch_size": 4}])
    found = choose_headline(load_run(tmp_path))
    assert found.undefended is not None and found.undefended.settings.batch_size == 1
    assert len(found.settings) == 3


def test_without_an_undefended_cell_there_is_no_verdict(tmp_path: Path) -> None:
    results = load_run(make_results(tmp_path, defenses=DEFENSES[1:]))
    found = choose_headline(results)
    assert "not measured" in headline_sentence(found)
    assert trust(found, results).level == "fail"


def test_a_failed_check_on_the_undefended_update_takes_the_verdict(tmp_path: Path) -> None:
    results = load_run(make_results(tmp_path, defenses=[replace(NONE, checks=[FAIL]), *DEFENSES[1:]]))
    badge = trust(choose_headline(results), results)
    assert (badge.level, badge.title) == ("fail", "No verdict")
    assert badge.reasons[0] == FAIL["sentence"] + "."


def test_warnings_are_shown_and_clean_runs_say_how_many_checks_passed(tmp_path: Path) -> None:
    warned = load_run(make_results(tmp_path / "w", defenses=[replace(NONE, checks=[WARN]), *DEFENSES[1:]]))
    assert trust(choose_headline(warned), warned).reasons == (WARN["sentence"],)
    clean = load_run(make_results(tmp_path / "c"))
    assert spaced(trust(choose_headline(clean), clean).title) == "2 checks passed"


def test_a_useless_defense_is_not_sold_as_help(tmp_path: Path) -> None:
    found = headline(tmp_path, [NONE, Example("x", 15, 16, 31.0)])
    assert not found.helps
    assert "no defense of this run lowered" in headline_sentence(found)


def test_an_unfinished_run_says_how_much_is_done(tmp_path: Path) -> None:
    results = load_run(make_results(tmp_path, missing=3))
    assert spaced(progress_sentence(results)) == "This run is not finished: 5 of 8 cells are done. The same command continues it."
    assert "3 cells are not measured yet" in spaced(trust(choose_headline(results), results).reasons[-1])


def test_costs_say_what_was_not_measured(tmp_path: Path) -> None:
    found = headline(tmp_path)
    assert found.best is not None
    told = {name: spaced(value) for name, value in costs(found.best, found.undefended)}
    assert told["Accuracy"] == "not measured in this run"
    assert told["Client time per update"] == "3.1 ms, 1.07× undefended"
    assert told["Bytes per update"] == "63.3 kB, as many as undefended"


WRITTEN: list[tuple[Callable[[], str], str]] = [
    (lambda: numbers.percent(0.125), "13 %"),
    (lambda: numbers.percent(0.0), "0 %"),
    (lambda: numbers.percent(0.004), "0.4 %"),
    (lambda: numbers.percent(0.996), "99.6 %"),
    (lambda: numbers.percent(1e-17), "0 %"),
    (lambda: numbers.percent(None), "–"),
    (lambda: numbers.interval(0.717, 0.989), "72–99 %"),
    (lambda: numbers.spread(Spread(median=31.04, low=28.1, high=None, worst=None, n=3), "dB"), "31.0 dB"),
    (lambda: numbers.spread(Spread(median=0.00071, low=0.0005, high=0.0009, worst=None, n=3)), "0.00071 (0.00050–0.00090)"),
    (lambda: numbers.size(63304), "63.3 kB"),
    (lambda: numbers.size(999), "999 B"),
    (lambda: numbers.size(2.5e12), "2500 GB"),
    (lambda: numbers.ms(1500), "1.5 s"),
    (lambda: numbers.duration(200), "3 min 20 s"),
    (lambda: numbers.duration(7260), "2 h 1 min"),
    (lambda: numbers.significant(0), "0"),
    (lambda: numbers.significant(1e-9), "1.0e-09"),
    (lambda: numbers.times(12.3), "12×"),
]


def test_numbers_read_like_a_person_wrote_them() -> None:
    for shown, expected in WRITTEN:
        assert spaced(shown()) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "1 local epoch, minibatches of 16"),
        ({"local_steps": 1}, "1 local step, minibatches of 16"),
        ({"local_steps": 5}, "5 local steps, minibatches of 16"),
        ({"minibatch": 0, "local_epochs": 2}, "2 local epochs, all records in every step"),
        ({"minibatch": 0, "cut": "cut1", "parts": "whole"}, "1 pass over the records, all records in every step"),
    ],
)
def test_how_a_federation_trained_is_told_as_it_was(changes: dict[str, object], expected: str) -> None:
    settings = {"rounds": 3, "local_epochs": 1, "local_steps": 0, "minibatch": 16, "learning_rate": 0.1}
    assert expected in utility_words(decode(KeptUtility, {**settings, **changes}))


def test_an_attacker_who_alone_is_ahead_is_the_strongest(tmp_path: Path) -> None:
    cell = load_run(make_results(tmp_path, defenses=[NONE, Example("x", 1, 1, 10.0)])).cells[1]
    assert cell.attackers[0].summary is not None
    strong = replace(cell.selected, identified=Share(value=0.75, low=0.5, high=0.9, count=12, n=16))
    weak = replace(cell.selected, identified=Share(value=0.19, low=0.07, high=0.43, count=3, n=16))
    assert cell.identified.count == cell.selected.identified.count == 1
    ahead = replace(cell, attackers=tuple(replace(cell.attackers[0], summary=each) for each in (weak, strong)))
    assert "the strongest attacker identified 12 of 16 records" in spaced(identified_sentence(ahead))
    close = replace(cell, attackers=(replace(cell.attackers[0], summary=weak),))
    assert close.identified.count == 3, "by however little"


def test_results_that_lack_a_later_setting_stand_beside_those_that_have_it(tmp_path: Path) -> None:
    older, newer = load_run(make_results(tmp_path, defenses=DEFENSES[:2])).cells

    def with_settings(**changes: str) -> CellResult:
        return replace(newer, settings=decode(KeptCell, {**newer.settings.as_dict(), **changes}))

    assert len(settings_of([older, with_settings(read="", cut="", risk="off")])) == 1
    assert len(settings_of([older, with_settings(cut="cut1")])) == 2
    assert len(settings_of([older, with_settings(patience="3")])) == 2, "a setting that this version does not know"


def test_a_small_ratio_is_not_nothing() -> None:
    assert (numbers.times(0.0045), numbers.times(0.01), numbers.times(1.07)) == ("0.004×", "0.01×", "1.07×")
