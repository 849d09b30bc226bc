"""What may be said of a defense: "not broken" needs attackers who were shown to win, and a list that names most says the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradveil.study.evidence import Gap, Power, Rung
from gradveil.study.kept import KeptCell
from gradveil.study.levels import Level, Levels, Listed, ListLevel
from gradveil.study.measures import Bar, Share, Spread, Summary
from gradveil.study.results import Bars, CellResult, Check, Defense
from gradveil.verdict.level_words import gain_words, gap_words, level_rows, power_words, view_words
from gradveil.verdict.levels import level_of, levels_of
from gradveil.verdict.status import Headline, Setting, Status, cannot_tell, status_of
from gradveil.verdict.words import headline_sentence, judgement

N = 32
SHOWN = Power(
    ensemble="quick-3",
    ladder=(
        Rung(spelling="gaussian_noise(std=0.001)", identified=Share.of(32, N)),
        Rung(spelling="gaussian_noise(std=0.01)", identified=Share.of(20, N)),
        Rung(spelling="gaussian_noise(std=0.1)", identified=Share.of(1, N)),
    ),
    planted=(Rung(leak=0.01, identified=Share.of(3, N)), Rung(leak=0.1, identified=Share.of(31, N))),
    a50=0.034,
    shown=True,
)


def by_list(count: int) -> Levels:
    return Levels(listed=ListLevel(lists={"random": Listed(share=Share.of(count, N), size=256, attacker="likelihood")}))


def cell(count: int, spelling: str = "mine", *, psnr: float = 11.0, **more: Any) -> CellResult:
    more = {"levels": by_list(1)} | more
    return CellResult(
        defense=Defense(spelling=spelling),
        n=N,
        candidates=256,
        selected=Summary(identified=Share.of(count, N), psnr=Spread(median=psnr, low=psnr - 1, high=psnr + 1)),
        bar=Bars(identified=Bar(null="derangement", value=1 / N, high=0.06, draws=7), psnr=Bar(null="grey", value=12.0)),
        **more,
    )


BARE = cell(N, "none", psnr=30.0)


def said(of: CellResult) -> str:
    return judgement(of, BARE).replace("\u00a0", " ")


def test_without_power_a_clean_row_is_not_called_unbroken() -> None:
    quiet = cell(1)
    assert status_of(quiet, BARE) is Status.UNPROVEN
    assert Status.UNPROVEN.value == "not identified; power not measured"
    assert "ot broken" not in said(quiet) and "power not measured" in said(quiet)


def test_with_power_it_is_and_says_where_these_attackers_win() -> None:
    held = cell(1, power=SHOWN)
    assert status_of(held, BARE) is Status.UNBROKEN
    assert "Not broken by" in said(held)
    assert "they break gaussian_noise(std=0.01) (20 of 32)" in said(held), "the strongest setting that fell"
    assert "a leak of the raw update is 3.4 % of what is seen (a50)" in said(held)


def test_whoever_broke_the_defense_itself_was_shown_to_win_and_the_sentence_has_an_end() -> None:
    """Broken, no weaker setting was tried, and of a planted leak they found less than half: "were shown to win: ."."""
    found = Power(planted=(Rung(leak=1.0, identified=Share.of(5, 16)),), shown=True, reason="broken as it is")
    told = power_words(cell(8, power=found))
    assert told == "These attackers were shown to win: they break the defense as it is."


def test_breaking_the_undefended_update_is_called_that() -> None:
    bare = replace(SHOWN, ladder=(Rung(spelling="none", identified=Share.of(32, N)),))
    assert "they break the undefended update (32 of 32)" in power_words(cell(1, power=bare))


def test_presence_stands_below_the_levels_where_it_was_asked() -> None:
    told = Level(share=Share.of(29, N), null=Bar(null="coin", value=0.5, high=0.66))
    asked = cell(1, levels=Levels(listed=ListLevel(lists=by_list(31).listed.lists, presence=told)))  # type: ignore[union-attr]
    assert [title for title, _ in level_rows(asked)][-1] == "Whether a list has it at all"
    assert level_rows(asked)[-1][1].share == told.share
    assert len(level_rows(cell(1, levels=by_list(31)))) == 3


def test_attackers_who_won_nowhere_prove_nothing() -> None:
    weak = replace(SHOWN, shown=False, ladder=SHOWN.ladder[2:], planted=SHOWN.planted[:1], a50=None)
    beaten = cell(1, power=weak)
    assert status_of(beaten, BARE) is Status.CANNOT_TELL and "won only where nothing was defended" in said(beaten)
    assert "won only where nothing was defended" in power_words(beaten)
    assert "Power not measured: too dear." in power_words(cell(1, power=Power(reason="too dear")))
    assert power_words(cell(1)).startswith("Power not measured")


def test_a_planted_leak_tells_what_the_undefended_update_does_not() -> None:
    """Where these attackers do not break even the undefended update, only power shown elsewhere counts."""
    nothing = cell(0, "none")
    assert status_of(cell(1), nothing) is Status.UNTESTED
    assert status_of(cell(1, power=SHOWN), nothing) is Status.UNBROKEN
    assert status_of(cell(1), None) is Status.UNTESTED


def test_what_a_list_names_is_never_called_unbroken() -> None:
    """CENSOR: 2 of 128 pictures, 128 of 128 by who holds a list."""
    for power in (None, SHOWN):
        leaking = cell(1, levels=by_list(31), power=power)
        assert status_of(leaking, BARE) is Status.LISTED
        assert said(leaking).startswith(
            "The information is there, our search did not get it: 31 of 32 records pointed out on a list"
        )
    for count in (2, 3):
        lucky = cell(count, levels=by_list(31), power=SHOWN)
        assert status_of(lucky, BARE) is Status.LISTED, "a hit more than the null had is no reason to doubt the list"
    nearer = cell(2, levels=by_list(31), power=SHOWN, psnr=14.0)
    assert status_of(nearer, BARE) is Status.UNCLEAR and "closer to the originals" in said(nearer)
    assert status_of(cell(1, levels=by_list(12), power=SHOWN), BARE) is Status.UNBROKEN, "less than half, as far as these tell"
    assert status_of(cell(20, levels=by_list(31)), BARE) is Status.BROKEN, "who rebuilds pictures needs no list"


@pytest.mark.parametrize(
    ("levels", "why"),
    [
        (None, "audit again"),
        (Levels(), "audit again"),
        (Levels(listed=ListLevel(reason="a list needs more candidates than the 40 records of an update")), "more candidates"),
    ],
)
def test_nothing_is_called_unbroken_where_nobody_held_a_list(levels: Levels | None, why: str) -> None:
    """CENSOR with lists and power: the information is there. The same with lists switched off: not broken."""
    blind = cell(1, power=SHOWN, levels=levels)
    assert status_of(blind, BARE) is Status.CANNOT_TELL
    assert "nobody looked whether a list gives the records away" in said(blind) and why in said(blind)
    off = replace(cell(1, power=SHOWN, levels=Levels()), settings=replace(KeptCell(), lists="off"))
    assert "lists were switched off" in said(off)
    assert status_of(cell(1, levels=levels), BARE) is Status.UNPROVEN, "without power the row claims nothing"


def test_not_broken_says_which_level_gives_records_away_all_the_same() -> None:
    null = Bar(null="guess", value=0.004, high=1 / N)
    listed = Listed(share=Share.of(12, N), size=256, null=null)
    for power, begins in ((SHOWN, "Not broken by"), (None, "Not identified by")):
        told = said(cell(1, levels=Levels(listed=ListLevel(lists={"random": listed})), power=power))
        assert told.startswith(begins)
        assert "That is about pictures alone: 12 of 32 records pointed out on a list of 256" in told
    hidden = replace(listed, share=Share.of(1, N))
    assert "pictures alone" not in said(cell(1, levels=Levels(listed=ListLevel(lists={"random": hidden})), power=SHOWN))


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ({"checks": (Check(name="informed_moved", level="warn", sentence="49 of 64 never moved."),)}, "49 of 64 never moved"),
        ({"checks": (Check(name="informed_ran", level="fail"),)}, None),
        (
            {"gap": Gap(search_failed=Share.of(17, N), information_gone=Share.of(9, N), found=Share.of(1, N))},
            "failed for 17 of 32",
        ),
        ({"settings": replace(KeptCell(), steps=40)}, "cut off after 40 steps"),
    ],
)
def test_a_search_that_failed_cannot_tell(reason: dict[str, Any], words: str | None) -> None:
    lame = cell(1, **reason)
    if words is None:
        assert status_of(lame, BARE) is Status.NO_VERDICT and cannot_tell(lame)
        return
    assert status_of(lame, BARE) is Status.CANNOT_TELL
    assert said(lame).startswith("This run cannot tell: ") and words in said(lame)
    assert status_of(cell(20, **reason), BARE) is Status.BROKEN, "what was found, was found"


def test_nothing_is_called_unbroken_whose_owners_are_given_away() -> None:
    """Three near-equal pictures a person and their mean as reconstruction: records at the null, every owner found."""

    def of(found: int, **more: Any) -> CellResult:
        owners = Level(share=Share.of(found, 20), null=Bar(null="derangement", value=0.05, high=0.17))
        return cell(1, levels=replace(by_list(1), owners=owners), power=SHOWN, **more)

    assert status_of(of(1), BARE) is Status.UNBROKEN
    assert status_of(of(20), BARE) is Status.UNCLEAR and status_of(replace(of(20), power=None), BARE) is Status.UNCLEAR
    assert "Leaks whose records these are" in said(of(20)) and "20 of 20 owners identified" in said(of(20))
    owned = {"owners": Share.of(19, 20), "owners_null": Bar(null="guess", value=0.1, high=0.2)}
    listed = Listed(share=Share.of(1, N), size=256, **owned)  # type: ignore[arg-type]
    told = said(cell(1, levels=Levels(listed=ListLevel(lists={"random": listed})), power=SHOWN))
    assert "That is about pictures alone" in told and "19 of 20 owners pointed out on a list" in told


def test_searches_that_mostly_worked_and_checks_that_passed_are_no_excuse() -> None:
    worked = Gap(search_failed=Share.of(16, N), information_gone=Share.of(16, N), found=Share.of(0, N))
    sound = cell(1, gap=worked, checks=(Check(name="informed_moved", level="ok"),), power=SHOWN)
    assert cannot_tell(sound) == "" and status_of(sound, BARE) is Status.UNBROKEN
    assert "for 16 of 32 records the search failed" in gap_words(sound) and gap_words(cell(1)) == ""


def test_not_broken_says_what_records_are_left_where_searches_failed() -> None:
    """Nobody knows of 16 of 32, so the 11 % that 1 of 32 leaves possible was said of records nobody searched."""
    some = Gap(search_failed=Share.of(16, N), information_gone=Share.of(15, N), found=Share.of(1, N))
    told, whole = said(cell(1, gap=some, power=SHOWN)), said(cell(1, power=SHOWN))
    assert "the search failed for 16 of 32; of the others the true share may be as high as 28 %" in told
    assert "the true share may be as high as 16 %" in whole and "failed" not in whole


def test_the_first_screen_says_where_a_low_count_may_be_the_attackers_doing() -> None:
    def first(best: CellResult) -> str:
        both = Setting(cells=(BARE, best))
        return headline_sentence(Headline(setting=both, settings=(both,), undefended=BARE, best=best))

    idle = Check(name="informed_ran", level="warn", sentence="Informed: none ran.")
    assert first(cell(1, levels=None)).endswith("with the best defense of this run, 1 of 32")
    doubt = "1 of 32; this run cannot tell whether that is the defense’s doing"
    assert first(cell(1, checks=(idle,), levels=None)).endswith(doubt)


def test_a_cap_is_part_of_the_name() -> None:
    capped = cell(1, settings=replace(KeptCell(), ensemble="quick-3", steps=40), power=SHOWN)
    assert capped.ensemble == "quick-3 cut off after 40 steps"
    assert "Not broken by quick-3 cut off after 40 steps" in said(capped)


def test_thirty_two_records_of_few_updates_are_too_few() -> None:
    few = replace(cell(0, power=SHOWN), selected=Summary(identified=Share.of(0, N, effective=4.0)))
    assert status_of(few, BARE) is Status.UNCLEAR


def test_older_cells_say_what_was_not_measured() -> None:
    label, listed, picture = levels_of(cell(3, levels=None))
    assert view_words(label).startswith("label not measured: ") and view_words(listed).startswith("list not measured: ")
    assert view_words(picture).replace("\u00a0", " ") == "3 of 32 records identified (3–24 %), without the update 3 %"
    assert not picture.open and level_of(cell(N), "picture").open


def test_a_gain_by_luck_is_called_that() -> None:
    from gradveil.study.measures import Paired

    assert gain_words(Paired(first=2, second=1, p=1.0)).startswith("no clear difference: ")
    assert gain_words(Paired(first=20, second=0, p=1e-6)).endswith("p < 0.001") and gain_words(None) == ""
