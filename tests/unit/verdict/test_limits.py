"""Limits: what they compare with, which cells they are meant for, and the exit code they end with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.errors import LeakAboveLimit, Unreliable, UsageError
from gradveil.metrics import share_of
from gradveil.study.codec import decode
from gradveil.study.evidence import Gap, Power
from gradveil.study.kept import KeptCell
from gradveil.study.levels import Level, Levels, Listed, ListLevel, Reach
from gradveil.study.limits import Limit, parse_limit
from gradveil.study.measures import Bar, Spread, Summary
from gradveil.study.results import Attacker, Bars, CellResult, Check, Defense
from gradveil.study.risks import CellRisk, RiskRecord
from gradveil.verdict.limits import compare, enforce


def cell(defense: str, count: int = 0, n: int = 100, fail: bool = False, **more: Any) -> CellResult:
    return CellResult(
        defense=Defense(spelling=defense),
        selected=Summary(identified=share_of(count, n), **more),
        checks=(Check(name="x", level="fail" if fail else "ok", sentence="No loss fell."),),
    )


def beside(*cells: CellResult) -> list[CellResult]:
    """Return cells beside an undefended one of the same setting, which is broken, as a plan has it."""
    bare = [] if any(each.defense.is_none for each in cells) else [replace(cell("none", 90), settings=cells[0].settings)]
    return [*bare, *cells]


def outcome(text: str, *cells: CellResult) -> tuple[list[str], int]:
    found = compare([parse_limit(text)], beside(*cells))
    try:
        enforce(found)
    except LeakAboveLimit as error:
        return [violation.defense for violation in found.violations], error.exit_code
    except Unreliable as error:
        return [], error.exit_code
    return [], 0


def scored(defense: str, *highs: float, fail: bool = False, reason: str = "") -> CellResult:
    records = [RiskRecord(pseudonym=f"r-{i}", invre=high - 0.01, low=0.0, high=high) for i, high in enumerate(highs)]
    return replace(cell(defense, fail=fail), risk=CellRisk(records=tuple(records), reason=reason))


def test_risk_is_gated_by_the_most_its_worst_record_may_score() -> None:
    assert outcome("invre>0.45", scored("none", 0.6), scored("pruning", 0.3, 0.44)) == ([], 0)
    assert outcome("invre>0.45", scored("none", 0.6)) == (["none"], 1)
    assert outcome("invre[pruning]>45%", scored("none", 0.6), scored("pruning", 0.3, 0.46)) == (["pruning"], 1)
    # Attacks that went wrong say nothing about a score without an attack.
    assert outcome("invre>0.45", scored("pruning", 0.46, fail=True)) == (["pruning"], 1)
    found = compare([parse_limit("invre>0.45")], [scored("pruning", 0.46, 0.5, 0.1)])
    assert "InvRE of r-1 is 0.490, at most 0.500; 2 of 3 records" in found.violations[0].sentence


def test_an_attacker_who_alone_is_ahead_counts() -> None:
    def alone(count: int) -> CellResult:
        return replace(quiet, attackers=(Attacker(recipe="some", stance="plain", summary=cell("x", count).selected),))

    quiet = cell("pruning", 1)
    assert outcome("identified>0.1", quiet) == ([], 0)
    assert outcome("identified>0.1", alone(60)) == (["pruning"], 1)
    assert outcome("identified>0.1", alone(6)) == ([], 3), "at most 12 %, so a tenth is not shown"
    assert outcome("identified>0.15", alone(6)) == ([], 0)
    found = compare([parse_limit("identified>0.1")], [alone(60)])
    assert "60 of 100 records identified" in found.violations[0].sentence


def test_without_scores_a_limit_on_risk_cannot_be_judged() -> None:
    for without in (scored("pruning", reason="BatchNorm"), cell("pruning")):
        assert outcome("invre>0.45", without) == ([], 3)
    assert "BatchNorm" in compare([parse_limit("invre>0.45")], [scored("pruning", reason="BatchNorm")]).doubts[0]


@pytest.mark.parametrize(
    ("text", "metric", "value", "defense"),
    [
        ("identified>0.05", "identified", 0.05, ""),
        (" identified > 5% ", "identified", 0.05, ""),
        ("identified[gaussian_noise]>.5", "identified", 0.5, "gaussian_noise"),
        (
            "identified[clipping(bound=1.0) + gaussian_noise(std=0.01)]>0",
            "identified",
            0.0,
            "clipping(bound=1.0) + gaussian_noise(std=0.01)",
        ),
        ("psnr>20", "psnr", 20.0, ""),
        ("mse<1e-3", "mse", 0.001, ""),
        ("invre[none]>0.45", "invre", 0.45, "none"),
    ],
)
def test_a_limit_is_read(text: str, metric: str, value: float, defense: str) -> None:
    assert parse_limit(text) == Limit(text, metric, value, defense)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("identified", "write it as identified>0.05"),
        ("", "write it as identified>0.05"),
        ("identifed>0.05", "did you mean 'identified'?"),
        ("fid<0.1", "known: exposure, identified, invre, label, list, list_owner, mse, owner, presence, psnr, ssim"),
        ("identified<0.05", "a higher identified is a larger leak; write identified>0.05"),
        ("identified>=0.05", "write identified>0.05"),
        ("mse>0.1", "a lower mse is a larger leak; write mse<0.1"),
        ("identified>few", "has no number"),
        ("identified>5", "a share from 0 to 1, as in identified>0.05"),
        ("label>5", "label is a share from 0 to 1, as in label>0.05"),
        ("list<0.05", "write list>0.05"),
        ("identified>nan", "out of range"),
        ("psnr>inf", "out of range"),
    ],
)
def test_a_wrong_limit_gets_one_sentence(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_limit(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_share_above_the_limit_violates_it_and_one_that_may_be_above_cannot_be_told() -> None:
    assert outcome("identified>0.05", cell("none", 90), cell("pruning", 6, 100)) == (["pruning"], 1)
    assert outcome("identified>0.05", cell("none", 90), cell("pruning", 2, 100)) == ([], 3)
    assert outcome("identified>0.05", cell("none", 90), cell("pruning", 2, 1000)) == ([], 0)
    assert outcome("identified>0.05", cell("none", 90), cell("pruning", 0, 16)) == ([], 3)


@given(st.floats(0.001, 0.9))
def test_the_fewest_records_are_just_enough(value: float) -> None:
    limit = Limit("", "identified", value)
    needed = limit.fewest_records()
    assert needed is not None
    assert outcome(f"identified>{value!r}", cell("pruning", 0, needed)) == ([], 0)
    assert needed == 1 or outcome(f"identified>{value!r}", cell("pruning", 0, needed - 1)) == ([], 3)


def test_fifty_nine_records_show_five_percent() -> None:
    assert outcome("identified>0.05", cell("pruning", 0, 59)) == ([], 0)
    assert outcome("identified>0.05", cell("pruning", 0, 58)) == ([], 3)
    assert parse_limit("identified>0.05").fewest_records() == 59
    assert parse_limit("psnr>20").fewest_records() == 1 and parse_limit("identified>0").fewest_records() is None


def test_the_sentence_says_whether_more_records_could_help() -> None:
    (few,) = compare([parse_limit("identified>0.05")], beside(cell("pruning", 0, 16))).doubts
    told = "pruning: cannot tell whether identified>0.05 holds: 0 of 16 records identified, at most 17.1% (exact one-sided 95 %)"
    assert few == f"{told}; audit at least 59 records"
    (some,) = compare([parse_limit("identified>0.25")], beside(cell("pruning", 2, 16))).doubts
    needed = int(some.rpartition("audit at least ")[2].split()[0])
    assert needed > 16, "never fewer than were audited"
    assert outcome("identified>0.25", cell("pruning", -(-needed // 8), needed)) == ([], 0)
    (zero,) = compare([parse_limit("identified>0")], beside(cell("pruning", 0, 16))).doubts
    assert zero.endswith("no number of records shows that, so allow more")
    many = compare([parse_limit("identified>0.05")], [cell("pruning", 50, 100)]).violations[0].sentence
    assert "50 of 100 records identified" in many and "audit" not in many


def test_records_of_few_updates_show_less() -> None:
    """Sixty-four records of eight updates are no sixty-four updates."""
    eight = replace(cell("pruning", 0, 64), selected=Summary(identified=share_of(0, 64, 8.0)))
    assert outcome("identified>0.05", cell("pruning", 0, 64)) == ([], 0)
    assert outcome("identified>0.05", eight) == ([], 3)
    assert "these 64 are worth 8" in compare([parse_limit("identified>0.05")], beside(eight)).doubts[0]


def listed(count: int) -> Listed:
    return Listed(share=share_of(count, 100), size=256, attacker="generic")


def with_levels(**changes: Any) -> CellResult:
    return replace(cell("pruning", 0, 100), levels=Levels(**changes))


def level(count: int, n: int = 100, **more: Any) -> Level:
    return Level(share=share_of(count, n), **more)


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("label", lambda count: with_levels(label=level(count))),
        ("list", lambda count: with_levels(listed=ListLevel(lists={"random": Listed(share=share_of(count, 100), size=256)}))),
        ("owner", lambda count: with_levels(owners=level(count))),
        (
            "list_owner",
            lambda count: with_levels(
                listed=ListLevel(lists={"random": Listed(share=share_of(0, 100), owners=share_of(count, 100), size=256)})
            ),
        ),
        ("presence", lambda count: with_levels(listed=ListLevel(presence=level(count)))),
    ],
)
def test_every_level_has_its_limit(name: str, of: Callable[[int], CellResult]) -> None:
    assert outcome(f"{name}>0.5", of(80)) == (["pruning"], 1)
    assert outcome(f"{name}>0.5", of(45)) == ([], 3)
    assert outcome(f"{name}>0.5", of(30)) == ([], 0)
    apart = 3 if name == "list" else 0  # levels are judged apart; but what a list names, a better search may rebuild
    assert outcome("identified>0.05", of(80)) == ([], apart)
    assert outcome(f"{name}>0.5", cell("pruning")) == ([], 3), "an older cell has no levels"
    assert "audit again" in compare([parse_limit(f"{name}>0.5")], [cell("pruning")]).doubts[0]


def test_a_level_that_was_not_measured_says_why() -> None:
    bare = with_levels(listed=ListLevel(reason="an aggregate of clients has no list here"), owners=Level(reason="no owners"))
    for name, says in (
        ("list", "an aggregate of clients"),
        ("owner", "no owners"),
        ("presence", "an aggregate"),
        ("label", "again"),
    ):
        (doubt,) = compare([parse_limit(f"{name}>0.5")], [bare]).doubts
        assert f"{name} was not measured: " in doubt and says in doubt
    (doubt,) = compare([parse_limit("list_owner>0.5")], [with_levels(listed=ListLevel())]).doubts
    assert "name no owners" in doubt


def test_everybody_who_tried_counts_for_a_level() -> None:
    """One list attacker found nobody of 100, another of 20: the limit is about whoever may be beyond it."""
    weak = Reach(attacker="few", share=share_of(0, 20))
    found = with_levels(label=level(0, reached=(weak,)))
    assert outcome("label>0.05", with_levels(label=level(0))) == ([], 0)
    assert outcome("label>0.05", found) == ([], 3)
    (doubt,) = compare([parse_limit("label>0.05")], [found]).doubts
    assert "the attacker 'few' had time for 20 of them" in doubt and "audit at least" not in doubt, "more records cure nothing"
    (doubt,) = compare([parse_limit("label>0.01")], [found]).doubts
    assert "audit at least 299 labels" in doubt, "who looked at all of them shows no such limit either"
    slow = Reach(attacker="few", share=share_of(0, 20), owners=share_of(0, 20))
    listed = Listed(share=share_of(0, 100), owners=share_of(0, 100), reached=(slow,), size=256)
    assert outcome("list_owner>0.05", with_levels(listed=ListLevel(lists={"random": listed}))) == ([], 3)


def test_guessing_whether_a_record_is_listed_is_half_right() -> None:
    limit = parse_limit("presence>0.6")
    needed = limit.fewest_records()
    assert needed is not None and needed > 59
    assert parse_limit("presence>0.5").fewest_records() is None


@pytest.mark.parametrize(
    "idle",
    [
        {"checks": (Check(name="informed_moved", level="warn", sentence="49 of 64 informed candidates never moved."),)},
        {"checks": (Check(name="informed_ran", level="warn", sentence="No attacker who knows the defense ran."),)},
        {"gap": Gap(search_failed=share_of(9, 16), information_gone=share_of(7, 16), found=share_of(0, 16))},
        {"settings": replace(KeptCell(), steps=40)},
    ],
)
def test_searches_that_failed_show_no_limit(idle: dict[str, Any]) -> None:
    """A lazy adversary and a capped budget passed the gate with a few identified."""
    sound = cell("pruning", 0, 100)
    assert outcome("identified>0.25", sound) == ([], 0)
    lame = replace(sound, **idle)
    assert outcome("identified>0.25", lame) == ([], 3)
    assert outcome("list>0.25", replace(lame, levels=with_levels(label=level(0)).levels)) == ([], 3), "not measured"
    psnr = Spread(median=12.0, low=11.0, high=13.0)
    near = replace(lame, selected=Summary(identified=share_of(0, 100), psnr=psnr))
    assert outcome("psnr>20", near) == ([], 3), "pictures of searches that failed are no better than their shares"
    assert outcome("psnr>12", near) == (["pruning"], 1)
    assert outcome("label>0.25", replace(lame, levels=with_levels(label=level(0)).levels)) == ([], 0), "no search is behind it"
    assert outcome("identified>0.25", replace(cell("pruning", 40), **idle)) == (["pruning"], 1), "what was found, was found"


def test_records_whose_search_failed_are_not_taken_for_missed() -> None:
    def searched(failed: int, n: int = 64) -> CellResult:
        gap = Gap(search_failed=share_of(failed, n), information_gone=share_of(n - failed, n), found=share_of(0, n))
        return replace(cell("pruning", 0, n), gap=gap)

    assert outcome("identified>0.05", searched(0)) == outcome("identified>0.05", searched(5)) == ([], 0)
    assert outcome("identified>0.05", searched(6)) == ([], 3), "0 of 58 may be 5.03 %"
    (doubt,) = compare([parse_limit("identified>0.05")], beside(searched(20))).doubts
    assert "the search failed for 20 of 64 records" in doubt and "as high as 6.6%" in doubt
    of_embedded = replace(searched(20), levels=with_levels(label=level(0)).levels)
    assert outcome("label>0.05", of_embedded) == ([], 0), "no search is behind labels"


def test_pictures_that_nobody_rebuilt_pass_no_limit_where_a_list_names_most() -> None:
    """CENSOR and signs: nothing rebuilt, everybody pointed out."""
    named = replace(cell("censor", 0, 100), levels=Levels(listed=ListLevel(lists={"random": listed(99)})))
    (doubt,) = compare([parse_limit("identified>0.05")], beside(named)).doubts
    assert "the information is there, our search did not get it: 99 of 100" in doubt
    nearer = Summary(identified=share_of(0, 100), psnr=Spread(median=20.0, low=19.0, high=21.0))
    grey = Bars(psnr=Bar(null="grey", value=12.0))
    for more in (replace(named, selected=Summary(identified=share_of(4, 100))), replace(named, selected=nearer, bar=grey)):
        assert outcome("identified>0.25", more) == ([], 3), "a few hits, or somewhat nearer pictures, are no less of a leak"
    hidden = replace(named, levels=Levels(listed=ListLevel(lists={"random": listed(2)})))
    assert outcome("identified>0.05", hidden) == ([], 0)
    assert outcome("identified>0.05", replace(named, selected=Summary(identified=share_of(40, 100)))) == (["censor"], 1)


def test_attackers_who_do_not_break_the_undefended_update_show_no_limit() -> None:
    assert outcome("identified>0.05", cell("none", 0), cell("pruning", 0)) == ([], 3)
    lucky = replace(cell("none", 2), bar=Bars(identified=Bar(null="derangement", value=0.01, high=0.05)))
    assert outcome("identified>0.05", lucky, cell("pruning", 0)) == ([], 3), "a hit or two is luck"
    assert outcome("identified>0.05", cell("none", 90, fail=True), cell("pruning", 0)) == ([], 3)
    (doubt,) = compare([parse_limit("identified>0.05")], [lucky, cell("pruning", 0)]).doubts
    assert "do not clearly break the undefended update either" in doubt
    assert outcome("identified>0.05", cell("none", 0), replace(cell("pruning", 0), power=Power(shown=True))) == ([], 0)
    assert outcome("identified>0.05", cell("none", 90), cell("pruning", 0)) == ([], 0)


def test_a_limit_needs_attackers_who_were_seen_to_win() -> None:
    """A plan without an undefended row and without power: whatever the attackers are worth, finding nobody passed."""
    (doubt,) = compare([parse_limit("identified>0.05")], [cell("pruning", 0)]).doubts
    assert "nothing shows that these attackers win anywhere" in doubt and "--defense none" in doubt
    assert not compare([parse_limit("identified>0.05")], [replace(cell("pruning", 0), power=Power(shown=True))]).doubts
    assert compare([parse_limit("identified>0.05")], [cell("pruning", 40)]).violations, "what was found, was found"
    levels = Levels(label=level(0))
    assert not compare([parse_limit("label>0.05")], [replace(cell("pruning", 0), levels=levels)]).doubts
    assert not compare([parse_limit("identified>0.05")], [cell("none", 0)]).doubts, "the undefended update itself"


def test_a_cap_that_was_shown_to_suffice_is_no_excuse() -> None:
    capped = replace(cell("pruning", 0, 100), settings=replace(KeptCell(), steps=40))
    assert outcome("identified>0.25", replace(capped, power=Power(shown=True))) == ([], 0)


def test_the_baseline_is_for_comparison_unless_it_is_alone() -> None:
    assert outcome("identified>0.05", cell("none", 100), cell("pruning")) == ([], 0)
    assert outcome("identified>0.05", cell("none", 100)) == (["none"], 1)
    assert outcome("identified[none]>0.05", cell("none", 100), cell("pruning")) == (["none"], 1)


def test_a_limit_for_one_defense_fits_it_alone_or_in_a_chain() -> None:
    cells = [cell("gaussian_noise(std=0.1)", 50), cell("clipping(bound=1.0) + gaussian_noise(std=0.1)", 50), cell("pruning", 50)]
    assert outcome("identified[gaussian_noise]>0.05", *cells)[0] == [c.defense.spelling for c in cells[:2]]
    assert outcome("identified[gaussian_noise(std=0.1)]>0.05", *cells)[0] == [cells[0].defense.spelling]
    assert outcome("identified[top_k]>0.05", *cells) == ([], 3)


def test_a_cell_that_cannot_be_trusted_ends_with_3_unless_another_leaks() -> None:
    assert outcome("identified>0.05", cell("pruning", 50, fail=True)) == ([], 3)
    assert outcome("identified>0.05", cell("pruning", 0, fail=True), cell("top_k", 50)) == (["top_k"], 1)
    assert outcome("psnr>20", cell("pruning")) == ([], 3)
    assert outcome("psnr>20", cell("pruning", psnr=Spread(median=12.0, low=11.0))) == ([], 3)


def test_a_cell_that_is_not_done_cannot_pass() -> None:
    found = compare([parse_limit("identified>0.5")], [cell("pruning")], ["abc"])
    with pytest.raises(Unreliable, match="cell abc is not done"):
        enforce(found)
    assert found.as_dict()["passed"] is False


def test_other_metrics_use_the_bound_that_is_worse_for_the_owner() -> None:
    spread = Spread(median=12.0, low=11.0, high=21.0)
    assert outcome("psnr>20", cell("pruning", psnr=spread)) == (["pruning"], 1)
    assert outcome("psnr>22", cell("pruning", psnr=spread)) == ([], 0)
    assert outcome("mse<0.01", cell("pruning", mse=Spread(median=0.02, low=0.005, high=0.03))) == (["pruning"], 1)
    assert outcome("mse<0.001", cell("pruning", mse=Spread(median=0.02, low=0.005, high=0.03))) == ([], 0)


def test_a_list_leaks_no_less_than_pictures_that_can_be_looked_up_on_it() -> None:
    headline = Listed(share=share_of(0, 100), owners=share_of(0, 100), size=256)
    leaking = replace(cell("pruning", 60), levels=Levels(listed=ListLevel(lists={"random": headline}), owners=level(60)))
    for name, unit in (("list", "records"), ("list_owner", "owners")):
        assert outcome(f"{name}>0.5", leaking) == ([], 3) and outcome(f"{name}>0.7", leaking) == ([], 0)
        (doubt,) = compare([parse_limit(f"{name}>0.5")], beside(leaking)).doubts
        assert f"60 of 100 {unit} identified by pictures, which can be looked up on a list" in doubt


def test_lists_that_were_switched_off_are_no_matter_of_the_version() -> None:
    off = replace(with_levels(label=level(1)), settings=decode(KeptCell, {"lists": "off"}))
    (doubt,) = compare([parse_limit("list>0.5")], [off]).doubts
    assert "lists were switched off" in doubt


@pytest.mark.parametrize(("n", "failed", "doubt"), [(2, 1, False), (4, 2, False), (2, 2, True)])
def test_one_record_that_was_searched_well_says_a_little(n: int, failed: int, doubt: bool) -> None:
    """Of one record that was not found the share is at most 95 %; of none it may be anything."""
    gap = Gap(search_failed=share_of(failed, n), information_gone=share_of(n - failed, n), found=share_of(0, n))
    settled = replace(cell("a", 0, n), gap=gap)
    doubts = compare([parse_limit("identified>0.96")], [settled]).doubts
    assert any("the search failed" in each for each in doubts) == doubt
