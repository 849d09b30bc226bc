"""What attackers get at each level, how strong they were shown to be, and why they may have failed: in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from gradveil.study.evidence import Power, Rung
from gradveil.study.measures import Paired
from gradveil.study.results import CellResult
from gradveil.verdict.levels import LEVELS, View, level_of, levels_of
from gradveil.verdict.numbers import NBSP, count, interval, percent, significant

__all__ = ["gain_words", "gap_words", "level_rows", "list_words", "not_tried", "power_words", "strength_lines", "view_words"]

HALF = 0.5
SURE = 0.05
UNMEASURED = "Power not measured: nobody looked how strong these attackers are here; --power does."


def view_words(view: View) -> str:
    """Say what the strongest attacker got at one level, or why nobody knows.

    >>> view_words(View(name="label", reason="audit again"))
    'label not measured: audit again'
    """
    share = view.share
    if share is None:
        return f"{view.name.replace('_', ' by ')} not measured: {view.reason}"
    listed = f" of {view.size}" if view.name in ("list", "list_owner") and view.size else ""
    told = f"{share.count} of {count(share.n, view.unit)} {view.done}{listed} ({interval(share.low, share.high)})"
    return told if view.null is None else f"{told}, without the update {percent(view.null.value)}"


def level_rows(cell: CellResult) -> list[tuple[str, View]]:
    """Return the levels of a cell with their titles, from the least that can be had to the most."""
    views = dict(zip(LEVELS, levels_of(cell), strict=True))
    size = views["list"].size
    rows = [
        ("Its label", views["label"]),
        (f"The record, from a list of {size}" if size else "The record, from a list", views["list"]),
        ("The picture of the record", views["picture"]),
    ]
    more = [
        ("Whether a list has it at all", level_of(cell, "presence")),
        ("Its owner, from a list", level_of(cell, "list_owner")),
        ("Its owner, by the picture", level_of(cell, "owner")),
    ]
    return [*rows, *((title, view) for title, view in more if view.share is not None)]


def power_words(cell: CellResult) -> str:
    """Say how strong the attackers of a cell were shown to be."""
    power = cell.power
    if power is None:
        return UNMEASURED
    if not power.ladder and not power.planted:
        return f"Power not measured: {power.reason}." if power.reason else UNMEASURED
    if not power.shown:
        return f"{_who(power)} won only where nothing was defended, if anywhere, so that they failed here says little."
    parts = [*_weaker(power), *_planted(power)] or ["they break the defense as it is"]
    return f"{_who(power)} were shown to win: {'; '.join(parts)}."


def _who(power: Power) -> str:
    return f"These attackers ({power.ensemble})" if power.ensemble else "These attackers"


def _weaker(power: Power) -> list[str]:
    """Name the strongest setting that fell."""
    fallen = [rung for rung in power.ladder if rung.broken or (rung.null is None and rung.identified.value > HALF)]
    what = "the undefended update" if fallen and fallen[-1].spelling == "none" else fallen[-1].spelling if fallen else ""
    return [f"they break {what} ({_counted(fallen[-1])})"] if fallen else []


def _planted(power: Power) -> list[str]:
    if power.a50 is not None:
        return [_half(power.a50)]
    found = [rung for rung in power.planted if rung.identified.value > HALF]
    return [f"they find {_counted(found[0])} with a leak of weight {significant(found[0].leak)}"] if found else []


def _half(a50: float) -> str:
    """Say what a50 means, as `gradveil.audit.power` defines it: the leak's part of the loudness of what is seen."""
    if a50 <= 0:
        return "they find half of the records as it is (a50 is 0)"
    if a50 >= 1:
        return "they find half of the records only where the raw update is all that is seen (a50 is 1)"
    return f"they find half of the records once a leak of the raw update is {significant(100 * a50)}{NBSP}% of what is seen (a50)"


def _counted(rung: Rung) -> str:
    return f"{rung.identified.count} of {rung.identified.n}"


def gap_words(cell: CellResult) -> str:
    """Say whether searches failed or there was nothing to find; empty where nobody looked."""
    gap = cell.gap
    if gap is None:
        return ""
    failed, gone = gap.search_failed, gap.information_gone
    return (
        f"Search told from information: for {failed.count} of {failed.n} records the search failed (the truth explains the "
        f"update better than what was found), for {gone.count} a wrong picture explains it as well as the truth"
    )


def list_words(cell: CellResult) -> str:
    """Say how strong who holds a list was shown to be, and what that means for other lists; empty where nobody held one."""
    listed = cell.levels.listed.headline if cell.levels is not None and cell.levels.listed is not None else None
    rehearsed = [reach.rehearsed for reach in listed.reached if reach.rehearsed is not None] if listed is not None else []
    if listed is None or not rehearsed:
        return ""
    told = f"Of releases of their own, attackers who hold a list of {listed.size} named up to {percent(max(rehearsed))}"
    found = listed.sensitivity
    if found is None or not {"10", "1000000"} <= found.at.keys():
        return told
    least = "at least " if found.d is None else "about "
    return f"{told}; among 10 candidates expect {least}{percent(found.at['10'])}, among a million {percent(found.at['1000000'])}"


def gain_words(gain: Paired | None) -> str:
    """Say whether knowing the defense helped beyond chance; empty where nobody compared."""
    if gain is None:
        return ""
    p = "p < 0.001" if gain.p < 0.001 else f"p = {gain.p:.2g}"
    told = f"{gain.first} identified by who knows the defense alone, {gain.second} by who ignores it alone, {p}"
    return told if gain.p < SURE else f"no clear difference: {told}"


def not_tried(cells: Sequence[CellResult]) -> list[str]:
    """Say which levels nobody looked at, and where nobody looked how strong the attackers are."""
    lines = []
    for name, what in (("label", "labels"), ("list", "an attacker who holds a list of candidates")):
        reasons = dict.fromkeys(view.reason for view in (level_of(cell, name) for cell in cells) if view.share is None)
        lines += [f"{what}: {reason}" for reason in reasons]
    without = [cell.defense.spelling for cell in cells if not cell.defense.is_none and not _curve(cell)]
    if without:
        lines.append("how strong these attackers are against the defense (power)")
    return lines


def strength_lines(cells: Sequence[CellResult]) -> list[str]:
    """Return what stands below a table: the power shown against every defense, and which levels nobody looked at."""
    found: dict[str, list[str]] = {}
    defended = [cell for cell in cells if not cell.defense.is_none]
    for cell in defended:
        found.setdefault(power_words(cell), []).append(cell.defense.spelling)
    names = {line: dict.fromkeys(spellings) for line, spellings in found.items()}
    all_of_them = len(dict.fromkeys(cell.defense.spelling for cell in defended))
    lines = [f"{'all defenses' if len(own) == all_of_them else ', '.join(own)}: {line}" for line, own in names.items()]
    return [*lines, *(f"not measured: {line}" for line in not_tried(cells) if "power" not in line)]


def _curve(cell: CellResult) -> bool:
    return cell.power is not None and bool(cell.power.ladder or cell.power.planted)
